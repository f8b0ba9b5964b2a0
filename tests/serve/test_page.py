"""The live page and what it is fed with."""

import html
import http.client
import json
import re
from html.parser import HTMLParser

import pytest

from swiftsure.serve import Limits, create_app, start
from swiftsure.serve.history import History
from tests.serve.builders import Adder, Client, manager_of, policy_of
from tests.serve.test_audit_log import audit_log_of, audited, wait_until


@pytest.fixture(scope="module")
def policy():
    return policy_of()


def test_the_status_says_what_was_served_and_audited(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    limits = Limits(max_wait_ms=0)
    with start(
        create_app(engine, limits, manager=manager_of(audit_log), audit_rate=1.0)
    ) as address:
        client = Client(address)
        for k in range(12):
            client.predict([1, 2, 3], id=f"request {k}")
        wait_until(lambda: audit_log.made == 12 and audit_log.recent[0]["request"] == "request 11")
        found = client.get("/status")[1]
    assert found["exits"] == [12, 0, 0]
    assert found["saved"] == pytest.approx(2 / 3)
    assert found["sentence"] == str(policy)
    assert [each["request"] for each in found["recent"]] == [
        f"request {k}" for k in range(11, 1, -1)
    ]
    assert found["monitor"]["evidence_needed"] == 100
    assert (found["dropped"], found["alarm"], found["status"]) == (0, None, "ok")


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href"):
                self.links.append(value)


def test_the_page_loads_nothing_and_names_its_elements(policy):
    with start(create_app(Adder(policy), token="secret")) as address:
        status, text = Client(address).get("/")
        assert Client(address).get("/status")[0] == 401
        assert Client(address, "secret").get("/status")[1]["monitor"] is None
    page = Page(text)
    assert status == 200
    assert page.links == []
    assert "//" not in re.sub(r"<!doctype html>", "", text)  # no address of anything elsewhere
    assert len(set(page.ids)) == len(page.ids)
    assert set(re.findall(r'\bat\("([\w-]+)"\)', text)) <= set(page.ids)
    assert "innerHTML" not in text  # request ids come from clients
    assert str(policy.certificate.promises[0].epsilon) not in text  # no data without a token


def test_clients_cannot_break_the_log_with_their_ids(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    for _ in range(3):
        audit_log.audit(audited(request='"}\\n{"loss": 5}'), engine)
    audit_log.close()
    assert (audit_log.monitor.n, audit_log.fault) == (3, None)


def test_events_tell_the_status_and_end_with_the_server(policy):
    events = []
    with start(create_app(Adder(policy), Limits(max_wait_ms=0))) as address:
        Client(address).predict([1, 2, 3])
        place = address.removeprefix("http://")
        connection = http.client.HTTPConnection(place, timeout=10)
        connection.request("GET", "/events")
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        events.append(response.readline())
    connection.close()  # the server has ended, although the page still listened
    found = json.loads(events[0].removeprefix(b"data: "))
    assert found["exits"] == [1, 0, 0]
    assert found["headline"] == "The certified policy answers."


def test_the_page_is_complete_without_scripts_and_escapes(policy):
    with start(create_app(Adder(policy), Limits(max_wait_ms=0))) as address:
        for _ in range(3):
            Client(address).predict([1, 2, 3])
        _, text = Client(address).get("/")
    assert html.escape(str(policy)) in text.replace("&#39;", "&#x27;")
    assert '<b id="requests">3</b>' in text
    assert '<b id="saved">66.7 %</b>' in text


def test_the_history_keeps_the_whole_time_in_bounded_memory():
    history = History(period=1.0, most=50)
    for second in range(1000):
        history.note([second, 2 * second], evidence=0.5, now=float(second))
    found = history.shown(now=999.0)
    assert found["age"][0] == 999
    assert 25 <= len(found["age"]) <= 50
    assert [sum(counts) for counts in zip(*found["exits"], strict=True)] == [
        999 - found["age"][-1],
        2 * (999 - found["age"][-1]),
    ]
