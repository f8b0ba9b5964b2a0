"""`swiftsure serve`: serve a certified model over HTTP."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import print_json, print_policy, print_text
from swiftsure.cli.targets import find_target, import_from_current_folder

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy
    from swiftsure.serve import AuditLog

__all__ = ["serve"]

log = logging.getLogger("swiftsure.cli")

TOKEN = "SWIFTSURE_TOKEN"

OF_PROXIES = ("folder", "host", "port", "resume", "telemetry", "json")
"""What applies to a cascade.toml; all else stands in the file."""
OF_AUDITS = ("epsilon", "labels", "alpha")
"""What means nothing if no request is audited."""
OF_FOLDERS = ("network", "device", "compile", "capture", "providers")
"""How the model of a folder is loaded."""


def serve(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder from EarlyExit.save_pretrained or `swiftsure export`, or the cascade.toml"
            " of a proxy.",
            show_default=False,
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve the network that comes with the library.")
    ] = False,
    drift: Annotated[
        bool,
        typer.Option("--drift", help="With --demo: send images that become noisy, for a drill."),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Most requests in a batch.")] = 16,
    max_wait_ms: Annotated[float, typer.Option(help="Longest wait for a batch to fill.")] = 0.0,
    max_queue: Annotated[int, typer.Option(help="Most requests that wait; then 429.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds until 504.")] = 30.0,
    max_body: Annotated[int, typer.Option(help="Largest body, in bytes.")] = 8 << 20,
    workers: Annotated[
        int, typer.Option(help="Processes that run the model; 0: a thread of the server.")
    ] = 0,
    network: Annotated[
        str | None,
        optional("module:Class of the folder's network, if it is not one of transformers'."),
    ] = None,
    device: Annotated[
        str | None, optional("Where PyTorch runs, such as cuda.", default="the CPU")
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the stages with torch.compile.")
    ] = False,
    capture: Annotated[
        bool, typer.Option("--capture", help="Capture the stages as CUDA graphs.")
    ] = False,
    providers: Annotated[
        str | None,
        optional("Of ONNX Runtime, preferred first: cuda,cpu.", default="the folder's"),
    ] = None,
    audit: Annotated[
        float, typer.Option(help="Share of requests that the full model answers too.")
    ] = 0.0,
    epsilon: Annotated[
        float | None,
        optional("Largest inconsistency allowed in audits, if the policy promises a gap."),
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Watch the promised gap; labels come to /labels.")
    ] = False,
    policy: Annotated[
        Path | None, optional("Policy file to install, and to watch for changes.")
    ] = None,
    fallback: Annotated[
        Path | None, optional("Safer policy for after an alarm.", default="the full model")
    ] = None,
    on_alarm: Annotated[
        str | None, optional("Command to run, or http address to tell, on an alarm.")
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(help="Probability of a false alarm, over all time; --fallback has its own."),
    ] = 0.01,
    state: Annotated[
        Path, typer.Option(help="Folder for the audits' logs, the monitor and its alarm.")
    ] = Path("serving"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Put an alarm aside and watch with a new α.")
    ] = False,
    telemetry: Annotated[
        bool,
        typer.Option("--telemetry", help="Send traces and metrics through OpenTelemetry."),
    ] = False,
    json: options.Json = False,
) -> None:
    r"""Serve a certified model over HTTP, with an alarm and a fallback.

    POST {"inputs": ...} to /predict; see also /health, /policy, /metrics
    and, in a browser, the live page at /.
    A bearer token is required if the environment has SWIFTSURE_TOKEN.

    With --audit, some requests are also answered by the full model, after
    the answer was sent. If the answers differ more than promised, an alarm
    is raised and the full model answers all requests, also after a restart,
    until --resume or a new policy.

    A TOML file describes a cascade of language models, or one that may stop
    thinking early: it is served as a proxy that answers as OpenAI's API
    does. Its audits and limits are in the file; of the options, only --host,
    --port, --resume, --telemetry and --json apply.

    [bold]Example[/bold]

        swiftsure serve model/ --audit 0.05
        swiftsure serve cascade.toml
        swiftsure serve thinking.toml
    """
    from swiftsure.certify.slices import load_policy
    from swiftsure.serve.alarms import alarm_hook
    from swiftsure.serve.app import create_app
    from swiftsure.serve.engine import EngineOptions
    from swiftsure.serve.lifecycle import listen, log_to_stderr, run
    from swiftsure.serve.limits import Limits
    from swiftsure.serve.loading import load_engines
    from swiftsure.serve.policy_manager import PolicyManager, PolicyStore
    from swiftsure.serve.telemetry import instrument

    if demo == (folder is not None):
        raise ValueError("`folder` must be given, or --demo, and not both.")
    _refuse_ignored(context)
    if folder is not None and folder.suffix == ".toml":
        with log_to_stderr(), listen(host, port) as listening:
            _serve_proxy(folder, listening, resume, telemetry=telemetry, json=json)
        return
    if drift and audit == 0:
        audit = 1.0
    limits = Limits(
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        timeout=timeout,
        max_body=max_body,
    )
    if not 0 <= audit <= 1:
        raise ValueError(f"`--audit` must be in [0, 1], but got {audit:g}.")
    with log_to_stderr(), import_from_current_folder():
        listen(host, port).close()  # a busy port is found before the model is loaded
        chosen = EngineOptions(
            network=None if network is None else find_target("--network", network),
            device=device,
            compile=compile_,
            capture=capture,
            providers=() if providers is None else tuple(providers.split(",")),
        )
        engines = load_engines(folder, workers, chosen)
        own = engines[0].policy
        if policy is not None:
            own = load_policy(policy)
            engines[0].check(own)  # before it is stored: a server must be able to start without it
        manager = PolicyManager(
            own,
            watch=_watch(audit, epsilon, labels, alpha, state),
            fallback=None if fallback is None else load_policy(fallback),
            store=PolicyStore(state),
            file=policy,
            on_alarm=alarm_hook(on_alarm),
        )
        token = os.environ.get(TOKEN)
        app = create_app(engines, limits, manager=manager, audit_rate=audit, token=token)
        if telemetry:
            instrument(app)
        with listen(host, port) as listening:
            resumed = resume and manager.resume()
            address = _address(listening)
            if json:
                print_json(
                    {
                        "address": address,
                        "sentence": str(manager.policy),
                        "state": manager.state,
                        "alarm": manager.alarm,
                        "resumed": resumed,
                        "workers": [getattr(engine, "pid", os.getpid()) for engine in engines],
                    }
                )
            else:
                if resume:
                    print_text("The alarm was put aside." if resumed else "There was no alarm.")
                print_policy(manager.policy or own)
                if manager.alarm is not None:
                    print_text(f"The {manager.state} answers: {manager.alarm}", "bold red")
                print_text(f"Serving on {address}")
            sys.stdout.flush()
            if drift:
                say = log.info if json else print_text
                threading.Thread(target=_drill, args=(address, say), daemon=True).start()
            run(app, listening)


def _refuse_ignored(context: typer.Context) -> None:
    """Refuse options that would do nothing."""
    values = context.params
    given = {
        str(option.name).rstrip("_"): option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)).name == "COMMANDLINE"  # type: ignore[union-attr]
    }
    folder, drift = values["folder"], values["drift"]
    if folder is not None and folder.suffix == ".toml":
        for name, option in given.items():
            if name not in OF_PROXIES:
                raise ValueError(
                    f"`{option}` must not be given with {folder}: a proxy's models, limits and"
                    " audits stand in the file. Set it there if the proxy has it; of the options,"
                    " only --host, --port, --resume, --telemetry and --json apply."
                )
        return
    if drift and not values["demo"]:
        raise ValueError("`--drift` needs --demo, whose images it sends.")
    if drift and "audit" in given and values["audit"] == 0:
        raise ValueError("`--audit` must be above 0 with --drift, which waits for the alarm.")
    for name in OF_FOLDERS:
        if name in given and folder is None:
            raise ValueError(f"`{given[name]}` needs a folder: --demo has a network of its own.")
    if values["audit"] == 0 and not drift:
        for name in OF_AUDITS:
            if name in given:
                raise ValueError(
                    f"`{given[name]}` needs audits, and nothing is audited: also give the share of"
                    " requests to audit, such as --audit 0.05."
                )


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve_proxy(
    path: Path, listening: socket.socket, resume: bool, *, telemetry: bool, json: bool
) -> None:
    from swiftsure.serve.lifecycle import run
    from swiftsure.serve.proxy import ProxyConfig, create_proxy
    from swiftsure.serve.telemetry import instrument

    configs = ProxyConfig.load_all(path)
    if resume and all(config.policy is None for config in configs):
        raise ValueError(f"`--resume` needs a policy to go back to, but {path} names none.")
    app = create_proxy(*configs, token=os.environ.get(TOKEN))
    if telemetry:
        instrument(app)
    service = app.state.service
    managers = [service.manager, *(each.manager for each in service.others)]
    put_aside = [each.resume() for each in managers if each.policy is not None and resume]
    resumed = any(put_aside)
    address = f"{_address(listening)}/v1"
    sentences = {
        config.name: None if manager.policy is None else str(manager.policy)
        for config, manager in zip(configs, managers, strict=True)
    }
    if json:
        found = {"address": address, "sentence": sentences[configs[0].name], "resumed": resumed}
        print_json(found if len(configs) == 1 else {**found, "sentences": sentences})
    else:
        if resume:
            print_text("The alarm was put aside." if resumed else "There was no alarm.")
        for config, manager in zip(configs, managers, strict=True):
            if manager.policy is None:
                print_text("There is no policy, so the last model answers all requests.", "bold")
            else:
                print_policy(manager.policy)
            print_text(f"Serving the model {config.name!r} on {address}")
    sys.stdout.flush()
    run(app, listening)


def _drill(address: str, say: Callable[[str], None]) -> None:
    """Send the demo's images, which wait until the server answers, and say when it fell back."""
    from swiftsure import demo
    from swiftsure import serve as serving
    from swiftsure.demo.network import prepared

    images = prepared(demo.sample_images().images).numpy()
    say("The drill begins: 300 images as they are, then noisy ones.")
    found = serving.drill(address, images, token=os.environ.get(TOKEN))
    if found.fallback_after is None:
        say(f"No alarm after {found.sent:,} images.")
    else:
        say(
            f"Alarm: after {found.fallback_after:,} noisy images the full model answers. Start"
            " again without --drift to see that this stays, and with --resume to go back."
        )


def _watch(
    audit: float, epsilon: float | None, labels: bool, alpha: float, state: Path
) -> "Callable[[Policy, float], AuditLog]":
    """Return a function that returns the audit log of a policy, with its share of α.

    If nothing is audited, it still obeys an alarm of before, or of another server.
    """

    def watch(policy: "Policy", share: float) -> "AuditLog":
        from swiftsure import serve as serving

        monitor = None
        if audit > 0:
            monitor = serving.audit_monitor(policy, alpha * share, epsilon, labels=labels)
        return serving.AuditLog(policy, monitor, state)

    return watch
