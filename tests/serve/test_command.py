"""`swiftsure serve`: every option does something in every mode, or is refused."""

import json
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from swiftsure.cli.app import app, main
from swiftsure.monitor import Monitor
from tests.serve.builders import Adder, policy_of

MODES = {
    "folder": ["model"],
    "demo": ["--demo"],
    "drill": ["--demo", "--drift"],
    "proxy": ["cascade.toml"],
}
FILE = "must not be given with cascade.toml: a proxy"
AUDITS = "needs audits, and nothing is audited"


@dataclass
class Seen:
    """What a command would have served."""

    command: list[str]
    loaded: tuple[Any, ...] = ()
    app: Any = None
    address: tuple[str, int] = ("", 0)
    out: str = ""
    drilled: threading.Event = field(default_factory=threading.Event)
    instrumented: list[Any] = field(default_factory=list)

    @property
    def service(self):
        return self.app.state.service

    @property
    def monitor(self):
        return self.service.manager.audit_log.monitor


@pytest.fixture(scope="module")
def policies():
    return {"own": policy_of(), "safer": policy_of(epsilon=0.02), "gap": policy_of("gap")}


@pytest.fixture
def command(tmp_path, policies, monkeypatch):
    """Run `swiftsure serve` up to the moment when it would serve."""
    monkeypatch.chdir(tmp_path)
    for name, policy in policies.items():
        policy.save(tmp_path / f"{name}.json")
    models = "".join(
        f'[[models]]\nbase_url = "http://127.0.0.1:9/v1"\nmodel = "{name}"\n' for name in "ab"
    )
    Path("cascade.toml").write_text(models)
    Path("nets.py").write_text("def build():\n    pass\n")

    def run(*arguments, policy="own"):
        seen = Seen(["serve", *map(str, arguments)])

        def load(*given):
            seen.loaded = given
            return [Adder(policies[policy])]

        def serve(application, listening):
            seen.app, seen.address = application, listening.getsockname()

        monkeypatch.setattr("swiftsure.serve.loading.load_engines", load)
        monkeypatch.setattr("swiftsure.serve.lifecycle.run", serve)
        monkeypatch.setattr("swiftsure.serve.telemetry.instrument", seen.instrumented.append)
        monkeypatch.setattr("swiftsure.cli.serve._drill", lambda *_: seen.drilled.set())
        port = [] if "--port" in seen.command else ["--port", "0"]
        done = CliRunner().invoke(app, [*seen.command, *port])
        seen.out = done.stdout
        if isinstance(done.exception, ValueError):
            raise done.exception
        assert (done.exit_code, done.exception) == (0, None), done.output
        if hasattr(seen.app.state, "service"):
            seen.service.manager.close()
        return seen

    return run


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


PORT = free_port()
ANYWHERE = {
    "--host": ("127.0.0.2", lambda seen: seen.address[0] == "127.0.0.2"),
    "--port": (PORT, lambda seen: seen.address[1] == PORT),
    "--json": (None, lambda seen: "address" in json.loads(seen.out)),
    "--telemetry": (None, lambda seen: seen.instrumented == [seen.app]),
}
OF_A_MODEL = {
    "--max-batch": (2, lambda seen: seen.service.limits.max_batch == 2),
    "--max-wait-ms": (3, lambda seen: seen.service.limits.max_wait_ms == 3),
    "--max-queue": (4, lambda seen: seen.service.limits.max_queue == 4),
    "--timeout": (5, lambda seen: seen.service.limits.timeout == 5),
    "--max-body": (6000, lambda seen: seen.service.limits.max_body == 6000),
    "--workers": (2, lambda seen: seen.loaded[1] == 2),
    "--audit": (0.5, lambda seen: (seen.service.audit_rate, seen.monitor.n) == (0.5, 0)),
    "--policy": ("safer.json", lambda seen: seen.service.manager.policy == policy_of(epsilon=0.02)),
    "--fallback": ("safer.json", lambda seen: len(seen.service.manager._ladder) == 2),
    "--on-alarm": ("true", lambda seen: seen.service.manager._on_alarm is not None),
    "--state": ("there", lambda _: Path("there/policy-000001.json").exists()),
    "--resume": (None, lambda seen: "There was no alarm." in seen.out),
}
WITH_AUDITS = {
    "--alpha": (0.2, lambda seen: seen.monitor.alpha == 0.2),
    "--epsilon": (0.3, lambda seen: seen.monitor.epsilon == 0.3),
    "--labels": (None, lambda seen: seen.monitor.risk == "gap"),
}
LOADING = {
    "--network": ("nets:build", lambda seen: seen.loaded[2].network.__name__ == "build"),
    "--device": ("cuda:1", lambda seen: seen.loaded[2].device == "cuda:1"),
    "--compile": (None, lambda seen: seen.loaded[2].compile),
    "--capture": (None, lambda seen: seen.loaded[2].capture),
    "--providers": ("cuda,cpu", lambda seen: seen.loaded[2].providers == ("cuda", "cpu")),
}
DRIFT = {"--drift": (None, lambda seen: seen.drilled.wait(5))}
ALL = ANYWHERE | OF_A_MODEL | WITH_AUDITS | LOADING | DRIFT
APPLIES = {
    "folder": ANYWHERE | OF_A_MODEL | LOADING,
    "demo": ANYWHERE | OF_A_MODEL | DRIFT,
    "drill": ANYWHERE | OF_A_MODEL | WITH_AUDITS,
    "proxy": ANYWHERE,
}
REFUSED = {
    "folder": {"--drift": "needs --demo"} | dict.fromkeys(WITH_AUDITS, AUDITS),
    "demo": dict.fromkeys(LOADING, "needs a folder") | dict.fromkeys(WITH_AUDITS, AUDITS),
    "drill": dict.fromkeys(LOADING, "needs a folder"),
    "proxy": dict.fromkeys(ALL.keys() - ANYWHERE, FILE)
    | {"--resume": "needs a policy to go back to"},
}


def given(option):
    value = ALL[option][0]
    return [option] if value is None else [option, value]


def test_no_option_is_missing_here():
    shown = typer.main.get_command(app).commands["serve"].params
    options = {each.opts[0] for each in shown if each.name != "folder"}
    assert options == ALL.keys() | {"--demo"}
    for mode in MODES:
        beside = {"--drift"} if mode == "drill" else set()
        assert APPLIES[mode].keys() | REFUSED[mode] | beside == ALL.keys()


@pytest.mark.parametrize(
    ("mode", "option"), [(mode, option) for mode in MODES for option in sorted(APPLIES[mode])]
)
def test_an_option_that_applies_is_used(command, mode, option):
    policy = "gap" if option in ("--epsilon", "--labels") else "own"
    seen = command(*MODES[mode], *given(option), policy=policy)
    assert ALL[option][1](seen)


@pytest.mark.parametrize("option", sorted(WITH_AUDITS))
def test_options_of_audits_are_used_with_audits(command, option):
    policy = "own" if option == "--alpha" else "gap"
    seen = command("model", "--audit", 0.1, *given(option), policy=policy)
    assert WITH_AUDITS[option][1](seen)


@pytest.mark.parametrize(
    ("mode", "option"), [(mode, option) for mode in MODES for option in sorted(REFUSED[mode])]
)
def test_an_option_that_would_do_nothing_is_refused(command, mode, option):
    with pytest.raises(ValueError, match=REFUSED[mode][option]) as raised:
        command(*MODES[mode], *given(option))
    assert f"`{option}`" in str(raised.value)
    assert not Path("serving").exists()


def test_a_drill_without_audits_is_refused(command):
    with pytest.raises(ValueError, match="`--audit` must be above 0 with --drift"):
        command("--demo", "--drift", "--audit", 0)


def test_a_folder_and_the_demo_together_are_refused(command):
    with pytest.raises(ValueError, match="and not both"):
        command("model", "--demo")


def test_a_policy_of_another_model_is_not_stored(command):
    policy_of(epsilon=0.6).save("other.json")  # which the engine refuses
    with pytest.raises(ValueError, match="another model"):
        command("model", "--policy", "other.json")
    assert command("model").service.manager.number == 1


def test_an_alarm_without_its_monitor_holds_without_audits(command, policies):
    from swiftsure.serve import AuditLog

    audit_log = AuditLog(policies["own"], Monitor(0.05), "serving")
    content = {"format": "swiftsure-fallback", "version": 1, "reason": "Alarm at loss 7."}
    (audit_log.folder / "fallback.json").write_text(json.dumps(content))
    audit_log.close()
    (audit_log.folder / "monitor.json").unlink(missing_ok=True)
    seen = command("model", "--json")
    assert json.loads(seen.out)["state"] == "full model"
    seen = command("model", "--resume", "--json")
    assert (json.loads(seen.out)["state"], json.loads(seen.out)["resumed"]) == ("ok", True)


@pytest.mark.parametrize("arguments", MODES.values(), ids=MODES)
def test_a_busy_port_is_refused_before_anything_else(command, arguments):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"`port` {port} of 127.0.0.1 is in use: stop"):
            command(*arguments, "--port", port)
    assert not Path("serving").exists()


@pytest.mark.parametrize(("option", "value"), [("--host", "192.0.2.1"), ("--port", 70_000)])
def test_an_address_that_cannot_be_used_is_refused(command, option, value):
    with pytest.raises(ValueError, match=rf"`{option[2:]}`.* must be .*{value}"):
        command("--demo", option, value)


def test_a_busy_port_ends_the_program_with_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr("sys.argv", ["swiftsure", "serve", "--demo", "--port", port])
        with pytest.raises(SystemExit) as ended:
            main()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert shown.err.startswith("swiftsure: `port`")
    assert shown.err.count("\n") == 1


def test_the_log_goes_to_standard_error_with_its_time(capsys, policies, tmp_path):
    from swiftsure.serve import PolicyManager
    from swiftsure.serve.lifecycle import log_to_stderr

    with log_to_stderr():
        manager = PolicyManager(policies["own"])
    PolicyManager(policies["own"])  # not any more
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"INFO policy 1 ({manager.version}) is in force")
    assert line[:2] == "20"


def test_the_address_that_is_printed_is_the_one_that_listens(command):
    seen = command("model")
    assert seen.address[1] > 0
    assert f"Serving on http://127.0.0.1:{seen.address[1]}\n" in seen.out
    assert Path("serving/policy-000001.json").exists()
