"""The live page of a server in a real browser: it follows, it alarms, it fits a phone."""

import re
import time
from contextlib import ExitStack
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

if any(find_spec(name) is None for name in ("prometheus_client", "starlette", "uvicorn")):
    pytest.skip("the live page needs the extra `serve`", allow_module_level=True)

from swiftsure.serve import ExitCosts, Limits, create_app, start
from tests.browser.driver import PATIENCE
from tests.serve.builders import Adder, Client, manager_of, policy_of, wait_until
from tests.serve.test_audit_log import audit_log_of

SHOWN = """
const text = (id) => document.getElementById(id).textContent;
return {
  state: document.getElementById("state").dataset.state, headline: text("headline"),
  requests: text("requests"), saved: text("saved") + " " + text("saved-what"),
  bill: text("bill"), reasons: text("reasons"),
  audits: text("audits"), promise: text("promise"),
  rows: document.querySelectorAll("#recent tr").length,
  first: document.querySelector("#recent td")?.textContent,
  drawn: document.getElementById("area-0").getAttribute("d") || "",
  evidence: document.getElementById("evidence").getAttribute("d") || "",
  ticks: [...document.querySelectorAll("#evidence-ticks span")].map((tick) => tick.textContent),
  failed: text("failed"),
  wide: document.documentElement.scrollWidth > innerWidth,
  colour: getComputedStyle(document.getElementById("state")).backgroundColor,
};
"""
RED = "rgb(192, 24, 24)"


def wait_for(browser, reached):
    end = time.monotonic() + PATIENCE
    while not reached(found := browser.script(SHOWN)):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


@pytest.fixture
def clock(monkeypatch):
    """The clock of the history, in seconds; it stands still unless a test moves it."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("swiftsure.serve.history.time", clock)
    return clock


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    engine = Adder(policy_of())
    engine.costs = {"flops": ExitCosts((1.0, 2.0, 4.0), 4.0)}
    audit_log = audit_log_of(engine, tmp_path)
    app = create_app(engine, Limits(max_wait_ms=0), manager=manager_of(audit_log), audit_rate=1.0)
    with start(app) as address:
        yield engine, address


def test_the_page_follows_the_server_into_an_alarm(browser, served, clock):
    engine, address = served
    client = Client(address)
    browser.emulate(width=390)
    browser.visit(address)
    for k in range(30):
        client.predict([1, 2, 3], id=f"<b>request {k}</b>")
        clock.now += 1
    last = ("30", "30", "<b>request 29</b>")
    facts = ("requests", "audits", "first")
    found = wait_for(browser, lambda found: tuple(map(found.get, facts)) == last and found["drawn"])
    assert found["state"] == "ok"
    assert found["promise"] == str(engine.policy)
    assert (found["saved"], found["rows"]) == ("75.0 % of FLOPs saved", 10)
    assert found["evidence"]
    assert not found["wide"]
    engine.wrong = 1.0
    wait_until(lambda: client.predict([1, 2, 3])[1]["full_model"], PATIENCE)
    found = wait_for(browser, lambda found: found["state"] == "full model")
    assert found["colour"] == RED
    assert "Alarm" in found["headline"]
    assert not found["wide"]
    assert browser.console() == []


def test_idle_time_is_left_empty_and_the_evidence_has_an_axis(browser, tmp_path, clock):
    """Requests for 10 s, none for 80 s, and again for 10 s."""
    audit_log = audit_log_of(Adder(policy_of()), tmp_path)
    app = create_app(Adder(policy_of()), manager=manager_of(audit_log), audit_rate=1.0)
    history = app.state.service.live._history
    for second in range(101):
        answered = min(second, 10) + max(0, second - 90)
        evidence = None if 40 <= second < 60 else 0.5 if second > 90 else 0.25
        history.note([answered, 0, 0], evidence, second)
    clock.now = 100.5  # less than a period later, so the server adds no point of its own
    browser.emulate(width=1000)
    with start(app) as address:
        browser.visit(address)
        found = wait_for(browser, lambda found: found["drawn"])
    columns = re.findall(r"M([\d.]+),100.00H([\d.]+)V0.00", found["drawn"])
    assert len(columns) == 20
    idle = [(float(a), float(b)) for a, b in columns if 35 < float(a) < 265 or 35 < float(b) < 265]
    assert idle == []
    assert found["ticks"] == ["1", "10", "100"]
    assert found["failed"] == "0"
    assert found["evidence"].count("M") == 2  # it is not drawn where nothing is watched
    assert re.search(r"V75.00H[\d.]+V55.00", found["evidence"])
    assert browser.console() == []


def test_the_page_says_when_the_server_is_gone(browser):
    with start(create_app(Adder(policy_of()))) as address:
        browser.visit(address)
        wait_for(browser, lambda found: found["state"] == "ok")
    wait_for(browser, lambda found: found["state"] == "unreachable")


def test_the_page_of_a_proxy_shows_reasons_and_the_bill(browser, tmp_path):
    if any(find_spec(name) is None for name in ("aiohttp", "openai")):
        pytest.skip("the proxy needs the extra `api`")
    from tests.serve.test_proxy import Setup

    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served", rate=1.0)
        for k in range(3):
            setup.ask(f"Is it odd? {k}")
        setup.ask("Is it odd? 7", seed=1)
        setup.ask("KEY 7")
        browser.visit(setup.address)
        found = wait_for(browser, lambda found: "audits" in found["bill"])
    assert found["bill"].startswith("answers ")
    assert "sure enough3" in found["reasons"]
    assert "`seed` was not set when the policy was made1" in found["reasons"]
    assert (found["state"], found["headline"]) == (
        "degraded",
        "A model does not answer, or changed.",
    )
    assert not found["wide"]
