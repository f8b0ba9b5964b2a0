"""Bodies as JSON, npy and Arrow, with one or several samples, and mutants of them."""

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from swiftsure.serve import InvalidRequestError, Limits, create_app, start
from swiftsure.serve.request_body import ARROW, JSON, NPY, parse_body
from tests.serve.builders import Adder, Client, policy_of

KINDS = {"json": JSON, "npy": NPY[0], "arrow": ARROW}


def npy_of(array):
    file = io.BytesIO()
    np.save(file, np.asarray(array, np.float32))
    return file.getvalue()


def arrow_of(table, **options):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def lists(*rows):
    return pa.table({"inputs": pa.array(rows, pa.list_(pa.float32()))})


def tensors(array):
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
    return pa.table({"inputs": column})


@pytest.fixture(scope="module")
def client():
    limits = Limits(max_queue=64, max_body=20_000)
    with start(create_app(Adder(policy_of()), limits)) as address:
        yield Client(address)


def send(client, kind, body):
    return client.send("POST", "/predict", body, **{"Content-Type": KINDS[kind]})


GOOD = {
    "json": json.dumps({"samples": [[1, 2, 3], [4, 5, 6]]}).encode(),
    "npy": npy_of([[1, 2, 3], [4, 5, 6]]),
    "arrow": arrow_of(lists([1, 2, 3], [4, 5, 6])),
}


@pytest.mark.parametrize("kind", GOOD)
def test_several_samples_are_answered(client, kind):
    status, found = send(client, kind, GOOD[kind])
    assert status == 200
    assert [each["outputs"] for each in found["answers"]] == [6, 15]
    assert [each["id"] for each in found["answers"]] == [f"{found['id']}.{k}" for k in range(2)]


def test_tensor_columns_and_dicts_of_columns():
    table = tensors(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    first, second = parse_body(ARROW, arrow_of(table), 64).samples
    assert (first.shape, second[2, 3]) == ((3, 4), 23)
    table = pa.table({"ids": [[1, 2], [3]], "mask": [[1, 1], [1]]})
    second = parse_body(ARROW, arrow_of(table), 64).samples[1]
    assert {name: values.tolist() for name, values in second.items()} == {"ids": [3], "mask": [1]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        arrow_of(lists()),
        arrow_of(lists([1, 2, 3]), compression="zstd"),
        arrow_of(lists([1, 2, 3]), compression="lz4"),
        arrow_of(lists([1, 2, 3]))[:-30],
        arrow_of(pa.table([[1], [2]], ["a", "a"])),
        arrow_of(pa.table({f"c{k}": [1] for k in range(101)})),
    ],
)
def test_bad_tables_are_refused(body):
    with pytest.raises(InvalidRequestError):
        parse_body(ARROW, body, 64)


def test_a_bad_sample_of_a_request_fails_alone(client):
    samples = [[1, 2, 3], [1, 2], "x", [float("nan")] * 3, [-9, 0, 0], [666, 0, 0], [4, 5, 6]]
    status, found = send(client, "json", json.dumps({"samples": samples}))
    assert status == 200
    each = found["answers"]
    assert [answer.get("status") for answer in each] == [None, 422, 422, 422, 422, 500, None]
    assert (each[0]["outputs"], each[-1]["outputs"]) == (6, 15)


def test_more_samples_than_the_queue_holds_are_refused_together(client):
    status, content = send(client, "npy", npy_of(np.zeros((65, 3))))
    assert (status, content["error"]) == (413, "A request must have at most 64 samples.")
    assert send(client, "npy", npy_of(np.zeros((64, 3))))[0] == 200
    assert send(client, "json", b'{"samples": []}')[0] == 422
    assert send(client, "json", b'{"samples": [[1,2,3]], "inputs": [1,2,3]}')[0] == 422


def mutant(rng, body):
    """Change, remove or insert bytes."""
    found = bytearray(body)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, len(found)))
        match rng.integers(0, 4):
            case 0 | 1:
                found[place] = int(rng.integers(0, 256))
            case 2:
                del found[place : place + int(rng.integers(1, 9))]
            case 3:
                found[place:place] = rng.bytes(int(rng.integers(1, 9)))
        if not found:
            break
    return bytes(found)


@pytest.mark.parametrize("shape", ["(0, 4611686018427387904)", "(True,)", str((1,) * 65)])
def test_shapes_that_do_not_exist_are_refused(shape):
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    data = bytes(0 if shape.startswith("(0") else 4)
    with pytest.raises(InvalidRequestError):
        parse_body(NPY[0], b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data, 64)


def run_hostile(*arguments):
    """Run `hostile.py`; its memory pool of Arrow reserves nothing, so that its limit is sharp."""
    return subprocess.run(
        [sys.executable, "-m", "tests.serve.hostile", *arguments],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.parametrize(
    "arguments",
    [
        ["large"],
        ["all", "2000"],
        pytest.param(["arrow", "300000"], marks=pytest.mark.slow),
        pytest.param(["all", "300000"], marks=pytest.mark.slow),
    ],
)
def test_hostile_bodies_crash_nothing_and_take_little_memory(arguments):
    """A process with 200 MB to spare parses bodies of up to 8 MiB, and damaged ones."""
    found = run_hostile(*arguments)
    assert found.returncode == 0, found.stdout[-500:] + found.stderr[-2000:]


@pytest.mark.parametrize("n", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutants_harm_nobody(client, n):
    """Every mutant is answered or refused, while another client gets all its answers."""
    rng, stop, harmed = np.random.default_rng(0), threading.Event(), []

    def other():
        while not stop.is_set():
            status, found = client.predict([1, 2, 3])
            if (status, found.get("outputs")) != (200, 6):
                harmed.append((status, found))

    work = threading.Thread(target=other)
    work.start()
    seen = set()
    try:
        for k in range(n):
            kind = ("json", "npy", "arrow")[k % 3]
            body = mutant(rng, GOOD[kind])
            status, found = send(client, kind, body)
            assert status in (200, 422), (kind, body, found)
            answers = found.get("answers", [])
            assert all(each.get("status", 422) == 422 for each in answers)
            assert "Traceback" not in json.dumps(found)
            seen.add((kind, status))
    finally:
        stop.set()
        work.join()
    assert harmed == []
    assert seen == {(kind, status) for kind in GOOD for status in (200, 422)}
