"""Every system goes with everything that can be done with one, up to reasons of nature.

A cell is "yes" or the number of a reason. The table in docs/reference/systems.md is made here:
`python -m tests.serve.test_matrix` writes it. Each test compares one cell with what happens.
"""

import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch

import swiftsure as ss
from swiftsure.run import RunOptions
from swiftsure.serve import (
    AuditLog,
    Limits,
    PolicyManager,
    WorkerEngine,
    create_app,
    engine_of,
    start,
)
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from tests.serve.builders import Client, at_once, lines, wait_until
from tests.serve.systems import (
    SYSTEMS,
    Network,
    certified,
    engine,
    made,
    monitored,
    other_policy,
    same,
)
from tests.serve.test_proxy_watch import STABLE, Models

for package in ("diffusers", "onnxruntime", "onnxscript", "openai", "transformers"):
    if find_spec(package) is None:
        pytest.skip(f"some systems need {package}", allow_module_level=True)

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "systems.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
GPU = torch.cuda.is_available()
PROXY = "LLM proxy"
"""A cascade of language models behind APIs. It is not an engine: its ways are its own."""


@contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class NatureError(Exception):
    """A reason why something cannot be; `number` is that of `REASONS`."""

    def __init__(self, number: int) -> None:
        super().__init__(REASONS[number])
        self.number = number


REASONS = {
    1: "Its models are functions, or other programs' servers: it has no tensors of its own to"
    " compile, move or export. They may do so themselves.",
    2: "ONNX Runtime optimises the graph when it loads it; there is nothing else to compile.",
    3: "It is a loop over tokens or steps, with caches and random numbers. No stage of it maps"
    " arrays to arrays, as an ONNX file does.",
    4: "It is ONNX stages already.",
    5: "It answers with classes, images or any JSON, and OpenAI's API is for texts. Cascades of"
    " language models have the proxy.",
    6: "It runs no model, so there is nothing to spread over processes; its calls are concurrent.",
}
"""Why a cell is not "yes"."""


# -------------------------------------------------------------------------------------- the ways


@dataclass(frozen=True)
class Case:
    """One system."""

    name: str

    @property
    def kind(self) -> Any:
        return SYSTEMS[self.name]()

    @property
    def policy(self) -> Any:
        return self.kind.policy

    def checked(self) -> list[Any]:
        """The samples that clients send, checked."""
        return [made(self.name).inputs.sample(each) for each in self.kind.samples]


def records(case: Case) -> None:
    assert case.kind.recorded.n > 0


def resumes(case: Case) -> None:
    """A record in shards is resumed, and is the record that is made in one piece."""
    with folder() as place:
        case.kind.record(RunOptions(shards=place, progress=False))
        assert any(place.iterdir())
        again = case.kind.record(RunOptions(shards=place, progress=False))
    assert np.array_equal(again.ids, case.kind.recorded.ids)
    assert certified(case.kind, again).threshold == case.policy.threshold


def collects_on_ray(case: Case) -> None:
    """Workers of Ray make the record that this process makes."""
    if case.name == "cascade":
        raise NatureError(6)
    record = case.kind.record(RunOptions(engine="ray", workers=1, progress=False))
    assert certified(case.kind, record).threshold == case.policy.threshold


def calibrates(case: Case) -> None:
    assert not case.policy.runs_full_model


def evaluates(case: Case) -> None:
    found = case.policy.evaluate(case.kind.recorded)
    assert np.isfinite(found.risk)


def reads_files(case: Case) -> None:
    """A policy in a file is the same policy, and runs."""
    with folder() as place:
        case.policy.save(place / "policy.json")
        loaded = ss.Policy.load(place / "policy.json")
    assert loaded == case.policy
    case.kind.runtime(loaded)


def refuses_others(case: Case) -> None:
    """A policy of another model is refused."""
    with pytest.raises(ValueError, match=r"was made for|made for other|another model"):
        case.kind.runtime(case.policy, other=True)


def runs(case: Case) -> None:
    answers = made(case.name).answer(case.checked(), full=False)
    assert all(0 <= each.exit < made(case.name).n_exits for each in answers)


def mixes_slices(case: Case) -> None:
    """Samples of several slices are in one batch; those of unknown ones get the full system."""
    own, samples = made(case.name), case.checked()
    plain, full = (own.answer(samples, full=each) for each in (False, True))
    sliced = ss.SlicedPolicy(policies={"day": case.policy, "night": case.policy}, delta=0.1)
    own.check(sliced)
    own.install(sliced)
    try:
        names = [("day", None, "unknown", "night")[k % 4] for k in range(len(samples))]
        mixed = own.answer(samples, full=False, slices=names)
        for k, slice_name in enumerate(names):
            expected = plain if slice_name in sliced.policies else full
            assert mixed[k].exit == expected[k].exit
            assert same(mixed[k].content, expected[k].content)
    finally:
        own.install(case.policy)


def audits(case: Case) -> None:
    """The full system's answer, compared with itself, has no loss."""
    own, monitor = made(case.name), monitored(case.policy)
    own.check_loss(monitor.loss)
    samples = case.checked()
    for sample, answer in zip(samples, own.answer(samples, full=True), strict=True):
        asked = answer if own.describe().completions else sample
        assert own.compare(asked, answer, monitor.loss).inconsistency == pytest.approx(0, abs=1e-6)


def monitors(case: Case) -> None:
    own, monitor = made(case.name), ss.Monitor.from_policy(case.policy)
    samples = case.checked()
    for sample, answer in zip(samples, own.answer(samples, full=False), strict=True):
        asked = answer if own.describe().completions else sample
        monitor.update(own.compare(asked, answer, monitor.loss).inconsistency)
    assert monitor.n == len(samples)


def is_fast(case: Case) -> None:
    """It is compiled or captured, and answers the same."""
    if case.name == "ONNX stages":
        raise NatureError(2)
    if case.name == "cascade":
        raise NatureError(1)
    if case.name == "DeeDiff" and not GPU:
        pytest.skip("a sampler is captured on a GPU only")
    fast = engine_of(case.kind.fast("cuda" if GPU else "cpu"), *case.kind.beside())
    samples = case.checked()
    expected = made(case.name).answer(samples, full=False)
    for one, two in zip(expected, fast.answer(samples, full=False), strict=True):
        assert one.exit == two.exit
        assert same(one.content, two.content)


def moves(case: Case) -> None:
    """It is put where the user says."""
    if case.name == "cascade":
        raise NatureError(1)
    if case.name == "ONNX stages":
        case.kind.runtime(case.policy, providers="cpu")
    else:
        case.kind.runtime(case.policy, device="cuda" if GPU else "cpu")


def exported(case: Case, place: Path) -> Path:
    from swiftsure import onnx

    if case.name == "cascade":
        raise NatureError(1)
    if not isinstance(case.kind, Network):
        raise NatureError(3)
    model = case.kind.model()
    policy = None if case.name == "ONNX stages" else case.policy
    onnx.export(model, policy, place, example=case.kind.batch(20), threads=1)
    if policy is None:
        onnx.save_policy(place, case.policy)
    return place


def exports(case: Case) -> None:
    if case.name == "ONNX stages":
        raise NatureError(4)
    with folder() as place:
        exported(case, place / "stages")


def exports_one_file(case: Case) -> None:
    """One ONNX file that exits by itself, checked against the stages."""
    from swiftsure import onnx

    with folder() as place:
        onnx.write_single_file(exported(case, place / "stages"), place / "one.onnx")


def completes(case: Case) -> None:
    """OpenAI's API, with a stream."""
    own = made(case.name)
    if not own.describe().completions:
        raise NatureError(5)
    with (
        start(create_app(own, Limits(timeout=60))) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        given = {"model": own.describe().name, "prompt": "w04 w05", "max_tokens": 4}
        whole = client.completions.create(**given).choices[0].text
        parts = [each.choices[0].text for each in client.completions.create(**given, stream=True)]
    assert "".join(parts) == whole


@contextmanager
def serving(case: Case):
    """A server that audits every request, its manager and a client."""
    with folder() as place:

        def watch(policy, _):
            return AuditLog(policy, monitored(policy), place)

        manager = PolicyManager(case.policy, watch=watch)
        app = create_app(
            made(case.name), Limits(timeout=60), manager=manager, audit_rate=1.0, token="key"
        )
        with start(app) as address:
            yield Client(address, "key"), manager, place
        made(case.name).install(case.policy)


def ask(case: Case, client: Client) -> list[Any]:
    found = at_once([partial(client.predict, each) for each in case.kind.samples])
    assert [status for status, _ in found] == [200] * len(found), found
    return [answer for _, answer in found]


def serves(case: Case) -> None:
    """Requests at once are answered as in process, and each is audited."""
    expected = made(case.name).answer(case.checked(), full=False)
    with serving(case) as (client, manager, place):
        answers = ask(case, client)
        wait_until(lambda: manager.audit_log.made == len(answers), 60)
        health, document = client.get("/health")[1], client.get("/openapi.json")[1]
        logged = lines(next(each for each in place.iterdir() if each.is_dir()))
    assert health["status"] == "ok"
    assert "/predict" in document["paths"]
    assert all(same(own.content, answer) for own, answer in zip(expected, answers, strict=True))
    assert all(each["loss"] <= manager.audit_log.monitor.largest_loss for each in logged)


def changes_policies(case: Case) -> None:
    """Another policy is installed while the server runs."""
    other = other_policy(case.policy)
    with serving(case) as (client, manager, place):
        ask(case, client)
        other.save(place / "other.json")
        body = (place / "other.json").read_bytes()
        kind = {"Content-Type": "application/json"}
        status, answer = client.send("POST", "/policy", body, **kind)
        assert (status, answer["number"]) == (200, 2), answer
        ask(case, client)
        assert made(case.name).policy == other
        wait_until(lambda: manager.audit_log.made == len(case.kind.samples), 60)


def alarms(case: Case) -> None:
    """After an alarm the full system answers."""
    with serving(case) as (client, manager, _):
        monitor = manager.audit_log.monitor
        while not monitor.alarm:
            monitor.update(monitor.largest_loss)
        wait_until(lambda: client.get("/health")[1]["status"] == "full model", 60)
        answers = ask(case, client)
    assert all(each["full_model"] for each in answers)
    assert all(each["exit"] == made(case.name).n_exits - 1 for each in answers)


def works_in_processes(case: Case) -> None:
    worker = WorkerEngine(partial(engine, case.name), 1)
    try:
        with start(create_app(worker, Limits(timeout=60))) as address:
            answers = ask(case, Client(address))
    finally:
        worker.close()
    expected = made(case.name).answer(case.checked(), full=False)
    for own, answer in zip(expected, answers, strict=True):
        assert answer["exit"] == own.exit
        assert same(own.content | {"id": 0}, answer)


def serves_on_ray(case: Case) -> None:
    import socket

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray Serve's own models
        from ray import serve

    from swiftsure.serve.ray_serve import ray_application

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        application = ray_application(partial(engine, case.name), Limits(timeout=60))
        serve.run(application, logging_config={"log_level": 40})
        answers = ask(case, Client(f"http://127.0.0.1:{port}"))
    finally:
        serve.shutdown()
    expected = made(case.name).answer(case.checked(), full=False)
    assert [each["exit"] for each in answers] == [each.exit for each in expected]


WAYS: dict[str, Callable[[Case], None]] = {
    "record": records,
    "resumed in shards": resumes,
    "collected on Ray": collects_on_ray,
    "calibrate": calibrates,
    "evaluate": evaluates,
    "policy file": reads_files,
    "other model refused": refuses_others,
    "run in process": runs,
    "slices in one batch": mixes_slices,
    "audits": audits,
    "monitor": monitors,
    "compiled or captured": is_fast,
    "device": moves,
    "ONNX stages": exports,
    "one ONNX file": exports_one_file,
    "OpenAI's API": completes,
    "served": serves,
    "policy changed": changes_policies,
    "alarm": alarms,
    "workers": works_in_processes,
    "Ray Serve": serves_on_ray,
}
SLOW = (
    "compiled or captured",
    "collected on Ray",
    "ONNX stages",
    "one ONNX file",
    "workers",
    "Ray Serve",
)


# ------------------------------------------------------------------------------------ the proxy


@contextmanager
def proxy(audit: str = "", slices: bool = False):
    """The models, a path of a configuration, and its policy."""
    with Models() as models, folder() as place:
        tail = '[slices]\nheader = "x-customer"\n' if slices else ""
        path = models.file(place, tail=tail + audit)
        promise = replace(STABLE, within="each slice") if slices else STABLE
        policy = models.policy(path, promise, slices=["ann", "bob"] if slices else None)
        yield models, path, policy


@contextmanager
def proxied(audit: str = "", **more: Any):
    with proxy(audit, **more) as (models, path, policy):
        app = create_proxy(ProxyConfig.load(path), token="key")
        with start(app) as address:
            yield SimpleNamespace(
                models=models, address=address, policy=policy, path=path, service=app.state.service
            )


def said(address: str, text: str, **header: str) -> tuple[str, str]:
    """Return the answer and the name of the model."""
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key="key", max_retries=0, default_headers=header
    ) as client:
        found = client.chat.completions.with_raw_response.create(
            model="cascade", messages=[{"role": "user", "content": text}]
        )
    return found.parse().choices[0].message.content, found.headers["x-swiftsure-model"]


def proxy_records() -> None:
    """Answers are kept, and the same call asks nobody again."""
    with proxy() as (models, path, _), folder() as place:
        inputs = [f"Is it odd? {k}" for k in range(60)]
        cascade = ProxyConfig.load(path).cascade()
        first = cascade.collect(inputs, folder=place, progress=False)
        models.small.bodies.clear()
        again = cascade.collect(inputs, folder=place, progress=False)
        assert models.small.bodies == []
    assert np.array_equal(first.confidences["confidence"], again.confidences["confidence"])


def proxy_calibrates() -> None:
    with proxy() as (_, path, policy):
        assert not policy.runs_full_model
        assert ss.Policy.load(path.parent / "policy.json") == policy
        cascade = ProxyConfig.load(path).cascade()
        record = cascade.collect([f"Is it odd? {k}" for k in range(60)], progress=False)
        assert np.isfinite(policy.evaluate(record).risk)
        text = path.read_text().replace('model = "small"', 'model = "other"')
        path.write_text(text)
        with pytest.raises(ValueError, match="other"):
            create_proxy(ProxyConfig.load(path))


def proxy_in_process() -> None:
    with proxy() as (_, path, policy):
        out = ProxyConfig.load(path).cascade().run(policy)(["Is it odd? 7", "Is it odd? 900"])
    assert [each.exit for each in out.decisions] == [0, 1]


def proxy_slices() -> None:
    with proxied(slices=True) as given:
        found = [
            said(given.address, "Is it odd? 7", **{"X-Customer": k})[1] for k in ("ann", "eve")
        ]
    assert found == ["small", "large"]


def proxy_serves() -> None:
    """Answers are audited, watched, and given by the large model after an alarm."""
    with proxied("[audit]\nrate = 1.0\n") as given:
        assert said(given.address, "Is it odd? 7") == ("odd", "small")
        manager, client = given.service.manager, Client(given.address, "key")
        monitor = manager.audit_log.monitor
        wait_until(lambda: manager.audit_log.made == 1)
        assert "/v1/chat/completions" in client.get("/openapi.json")[1]["paths"]
        while not monitor.alarm:
            monitor.update(monitor.largest_loss)
        wait_until(lambda: client.get("/health")[1]["status"] == "full model", 60)
        assert said(given.address, "Is it odd? 7") == ("odd", "large")


def proxy_changes_policies() -> None:
    with proxied() as given, folder() as place:
        other_policy(given.policy).save(place / "other.json")
        body, kind = (place / "other.json").read_bytes(), {"Content-Type": "application/json"}
        status, answer = Client(given.address, "key").send("POST", "/policy", body, **kind)
        assert (status, answer["number"]) == (200, 2), answer
        assert said(given.address, "Is it odd? 7") == ("odd", "small")


def nature(number: int) -> Callable[[], None]:
    def refused() -> None:
        raise NatureError(number)

    return refused


PROXY_WAYS: dict[str, Callable[[], None]] = {
    "record": proxy_records,
    "resumed in shards": proxy_records,
    "collected on Ray": nature(6),
    "calibrate": proxy_calibrates,
    "evaluate": proxy_calibrates,
    "policy file": proxy_calibrates,
    "other model refused": proxy_calibrates,
    "run in process": proxy_in_process,
    "slices in one batch": proxy_slices,
    "audits": proxy_serves,
    "monitor": proxy_serves,
    "compiled or captured": nature(1),
    "device": nature(1),
    "ONNX stages": nature(1),
    "one ONNX file": nature(1),
    "OpenAI's API": proxy_serves,
    "served": proxy_serves,
    "policy changed": proxy_changes_policies,
    "alarm": proxy_serves,
    "workers": nature(6),
    "Ray Serve": nature(6),
}


# ------------------------------------------------------------------------------------ the table


def cell(name: str, way: str) -> str:
    """Try a way; return "yes" or the number of the reason why not."""
    try:
        if name == PROXY:
            PROXY_WAYS[way]()
        else:
            WAYS[way](Case(name))
    except NatureError as error:
        return str(error.number)
    return "yes"


def table() -> str:
    """Return the table of the docs, with the reasons below it."""
    names = [*SYSTEMS, PROXY]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {way} | " + " | ".join(shown(name, way) for name in names) + " |" for way in WAYS]
    return "\n".join([*lines, "", *reasons()])


def shown(name: str, way: str) -> str:
    """Return a cell; as it is written already where this machine cannot try it."""
    try:
        return cell(name, way)
    except pytest.skip.Exception:
        return written()[name, way]


def reasons() -> list[str]:
    return [f"{number}. {sentence}" for number, sentence in REASONS.items()]


def written() -> dict[tuple[str, str], str]:
    """Return the cells of the table in the docs, by system and way."""
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \|$", text[text.index(BEGIN) : text.index(END)], re.MULTILINE)
    head, *rest = ([each.strip() for each in row.split("|")] for row in rows)
    assert head[1:] == [*SYSTEMS, PROXY]
    return {
        (name, row[0]): found for row in rest for name, found in zip(head[1:], row[1:], strict=True)
    }


def test_the_docs_have_every_cell_and_reason():
    text, found = DOCS.read_text(encoding="utf-8"), written()
    assert found.keys() == set(product([*SYSTEMS, PROXY], WAYS))
    assert "\n".join(reasons()) in text
    assert {each for each in found.values() if each != "yes"} == {str(k) for k in REASONS}


CELLS = [
    pytest.param(name, way, marks=[pytest.mark.slow] if way in SLOW and name != PROXY else [])
    for way, name in product(WAYS, [*SYSTEMS, PROXY])
]


@pytest.fixture
def ray_cluster(request):
    """A cluster where one is needed; its tests are about it, these use it."""
    pytest.importorskip("ray")
    import ray

    from tests.ray.builders import start as start_ray

    mine = not ray.is_initialized()
    if mine:
        start_ray()
    yield
    if mine:
        ray.shutdown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "way"), CELLS)
def test_a_cell_is_what_the_docs_say(name, way, request):
    expected = written()[name, way]
    if "Ray" in way and expected == "yes":
        request.getfixturevalue("ray_cluster")
    assert cell(name, way) == expected


if __name__ == "__main__":
    import ray

    from tests.ray.builders import start as start_ray

    start_ray()
    before, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    ray.shutdown()
