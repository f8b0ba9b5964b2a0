"""`swiftsure serve`: serve a certified model over HTTP."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import print_json, print_policy, print_text

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy
    from swiftsure.serve import Guard, Watcher

__all__ = ["serve"]

TOKEN = "SWIFTSURE_TOKEN"


def serve(
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
    alpha: Annotated[
        float, typer.Option(help="Probability of a false alarm, over all time.")
    ] = 0.01,
    state: Annotated[
        Path, typer.Option(help="Folder for the audits' logs, the monitor and its alarm.")
    ] = Path("serving"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Put an alarm aside and watch with a new α.")
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

    A TOML file describes a cascade of language models: it is served as a
    proxy that answers as OpenAI's API does. Its audits and limits are in the
    file; of the options, only --host, --port and --resume apply.

    [bold]Example[/bold]

        swiftsure serve model/ --audit 0.05
        swiftsure serve cascade.toml
    """
    from swiftsure.serve.app import Limits, create_app
    from swiftsure.serve.loading import load_engines
    from swiftsure.serve.running import run

    if demo == (folder is not None):
        raise ValueError("`folder` must be given, or --demo.")
    if folder is not None and folder.suffix == ".toml":
        _serve_proxy(folder, host, port, resume, json)
        return
    if drift and not demo:
        raise ValueError("`--drift` needs --demo, whose images it sends.")
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
    engines = load_engines(folder, workers)
    guard = _guard(
        engines[0].policy,
        _watch(audit, epsilon, labels, alpha, state),
        state,
        policy,
        fallback,
        resume,
    )
    app = create_app(
        engines, limits, guard=guard, audit_rate=audit, token=os.environ.get(TOKEN) or None
    )
    address = f"http://{host}:{port}"
    if json:
        print_json(
            {
                "address": address,
                "sentence": str(guard.policy),
                "state": guard.state,
                "alarm": guard.alarm,
                "workers": [getattr(engine, "pid", os.getpid()) for engine in engines],
            }
        )
    else:
        print_policy(guard.policy)
        if guard.alarm is not None:
            print_text(f"The {guard.state} answers: {guard.alarm}", "bold red")
        print_text(f"Serving on {address}")
    sys.stdout.flush()
    if drift:
        threading.Thread(target=_drill, args=(address,), daemon=True).start()
    run(app, host, port)


def _serve_proxy(path: Path, host: str, port: int, resume: bool, json: bool) -> None:
    from swiftsure.serve import watching
    from swiftsure.serve.proxy import ProxyConfig, create_proxy
    from swiftsure.serve.running import run

    config = ProxyConfig.load(path)
    policy = config.load_policy()
    if resume and policy is not None:
        aside = watching.resume(policy, config.audit.state)
        print_text("There was nothing to put aside." if aside is None else f"Put aside: {aside}")
    app = create_proxy(config, token=os.environ.get(TOKEN) or None)
    address = f"http://{host}:{port}/v1"
    if json:
        print_json({"address": address, "sentence": None if policy is None else str(policy)})
    elif policy is None:
        print_text("There is no policy, so the last model answers all requests.", "bold")
    else:
        print_policy(policy)
    if not json:
        print_text(f"Serving the model {config.name!r} on {address}")
    sys.stdout.flush()
    run(app, host, port)


def _drill(address: str) -> None:
    """Send the demo's images once the server answers, and say when it fell back."""
    from swiftsure import serve as serving
    from swiftsure.demo import zoo
    from swiftsure.demo.network import prepared

    time.sleep(1.0)
    images = prepared(zoo.shown().sample_images().images).numpy()
    print_text("The drill begins: 300 images as they are, then noisy ones.")
    found = serving.drill(address, images, token=os.environ.get(TOKEN) or None)
    if found.fallback_after is None:
        print_text(f"No alarm after {found.sent:,} images.")
    else:
        print_text(
            f"Alarm: after {found.fallback_after:,} noisy images the full model answers. Start"
            " again without --drift to see that this stays, and with --resume to go back.",
            "bold red",
        )


def _guard(
    own: "Policy",
    watch: "Callable[[Policy], Watcher | None]",
    state: Path,
    file: Path | None,
    fallback: Path | None,
    resume: bool,
) -> "Guard":
    from swiftsure.certify.policy import Policy
    from swiftsure.serve.guarding import Guard, PolicyStore

    if file is not None:
        own = Policy.load(file)
    guard = Guard(
        own,
        watch=watch,
        fallback=None if fallback is None else Policy.load(fallback),
        store=PolicyStore(state),
        file=file,
    )
    if resume:
        print_text("The alarm was put aside." if guard.resume() else "There was no alarm.")
    return guard


def _watch(
    audit: float, epsilon: float | None, labels: bool, alpha: float, state: Path
) -> "Callable[[Policy], Watcher | None]":
    """Return a function that returns the watcher of a policy; None if it need not be watched."""

    def watch(policy: "Policy") -> "Watcher | None":
        from swiftsure import serve as serving
        from swiftsure.serve.watching import policy_version

        # An alarm of before holds even if nothing is audited now.
        if audit == 0 and not (state / policy_version(policy) / "monitor.json").exists():
            return None
        monitor = serving.watched_monitor(policy, alpha, epsilon, labels=labels)
        return serving.Watcher(policy, monitor, state)

    return watch
