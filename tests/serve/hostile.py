"""Parses hostile bodies with little memory; a process of its own, so that a crash is seen.

python -m tests.serve.hostile large     bodies that once took gigabytes
python -m tests.serve.hostile arrow N   N mutants of tables with columns of each type
python -m tests.serve.hostile all N     N mutants of bodies of each kind
"""

import io
import json
import resource
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from swiftsure.serve.engine import InvalidRequestError
from swiftsure.serve.inputs import InputForm
from swiftsure.serve.request_body import ARROW, JSON, NPY, RefusedError, check_count, parse_body
from tests.faults.mutants import damaged_bytes

LARGEST = 8 << 20
"""Of a body, in bytes: the server's default."""
FORMS = [InputForm((shape, np.dtype(kind))) for shape, kind in (((3,), "f4"), ((3,), "i8"))]


def read(kind, body):
    """Parse a body and check its samples, as the server does; return how many are right."""
    right = 0
    for form in FORMS:
        try:
            parsed = parse_body(kind, body, 256)
            samples = form.samples(parsed.inputs) if parsed.samples is None else parsed.samples
            samples = [parsed.inputs] if samples is None else samples
            check_count(len(samples), 256)
        except (InvalidRequestError, RefusedError):
            continue
        for sample in samples:  # a view of the body each, until it is checked
            try:
                form.sample(sample)
                right += 1
            except InvalidRequestError:
                pass
    return right


def npy_head(shape, kind="|u1"):
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def arrow_of(table, **options):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def filled(part, head=b'{"inputs": [', tail=b"0]}"):
    """JSON as large as a body may be."""
    return head + part * ((LARGEST - len(head) - len(tail)) // len(part)) + tail


def large():
    """Yield the kinds and bytes of bodies that once took gigabytes, or many seconds."""
    yield NPY[0], npy_head("(20000000, 3, 28, 0)")
    yield NPY[0], npy_head(f"({LARGEST - 200}, 1)") + bytes(LARGEST - 200)
    yield NPY[0], npy_head(f"({LARGEST // 3 - 200}, 3)") + bytes(3 * (LARGEST // 3 - 200))
    n = 1 << 20
    empty = pa.array([], pa.int8())
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1 << 30], pa.int32()), pa.array([0.5]))
    offsets = (np.arange(n + 1) // 2).astype(np.int32)
    halves = pa.ListArray.from_arrays(offsets, np.zeros(n, np.int8))  # lists of 0 and 1 values
    for column in (
        pa.nulls(1 << 30),
        runs,
        pa.Array.from_buffers(pa.list_(pa.int8(), 0), 1 << 30, [None], children=[empty]),
        pa.ListViewArray.from_arrays(
            np.zeros(1000, np.int32), np.full(1000, n, np.int32), np.zeros(n, np.int8)
        ),
        pa.array([""] * n),
        pa.array(np.zeros(8 * n, np.int8)),
        pa.ListArray.from_arrays(np.zeros(n, np.int32), empty),
        pa.ListArray.from_arrays([0, n], halves),
        pa.array(np.zeros(8 * n, bool)),
    ):
        yield ARROW, arrow_of(pa.table({"inputs": column}))
    zeros = pa.array(np.zeros(n // 13, np.int8))
    yield ARROW, arrow_of(pa.table({f"c{k}": zeros for k in range(100)}))
    yield JSON, json.dumps({"inputs": ["x" * 100_000] + [""] * 50_000}).encode()
    for part in (b"[],", b"[0],", b"{},", b"0,", b"-9,", b'"",', b"[" * 60 + b"]" * 60 + b","):
        yield JSON, filled(part)
        yield JSON, filled(part, b'{"samples": [')
    for part, n in ((b"[0],", 90_000), (b"-9,", 490_000), (b"[" * 60 + b"]" * 60 + b",", 1_600)):
        yield JSON, b'{"inputs": [' + part * n + b"0]}"  # what is just allowed
    yield JSON, filled(b"[")
    yield JSON, filled(rb"\"", b'{"inputs": "', b'"}')
    yield JSON, filled(b"9", b'{"inputs": ', b"}")


def tables():
    """Yield tables with columns of each of Arrow's types."""
    numbers = [pa.array([1, 2, 3], kind) for kind in (pa.int8(), pa.uint64(), pa.int32())]
    numbers += [pa.array([1, 2, 3], kind) for kind in (pa.float32(), pa.float64())]
    numbers.append(pa.array(np.ones(3, np.float16)))
    lists = [
        pa.array([[1, 2, 3], [4, 5], []], kind(pa.float32())) for kind in (pa.list_, pa.large_list)
    ]
    lists.append(pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int64(), 3)))
    lists.append(pa.array([[[1, 2], [3, 4]], [[5], [6, 7]]], pa.list_(pa.list_(pa.int16()))))
    lists.append(pa.array([[[1, 2], [3, 4]]], pa.list_(pa.list_(pa.float64(), 2))))
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((3, 2, 2), np.float32))
    others = [
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array([["a"], ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        pa.array(["a", None, "ccc"]),
        pa.array(["a" * 20, None], pa.string_view()),
        pa.array([b"a", b"bb"], pa.large_binary()),
        pa.array([b"ab", b"cd"], pa.binary(2)),
        pa.array([True, False, None]),
        pa.nulls(3),
        pa.array([1, 2], pa.date32()),
        pa.array([1, 2], pa.timestamp("us", "UTC")),
        pa.array([1, 2], pa.duration("s")),
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.array([1, 2], pa.decimal128(10)),
        pa.array([{"a": 1, "b": "x"}, None]),
        pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())),
        pa.array([[1], [2, 3]], pa.list_view(pa.int32())),
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([0.5, 1.5])),
        pa.UnionArray.from_sparse(
            pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array([3, 4])]
        ),
        pa.UnionArray.from_dense(
            pa.array([0, 1], pa.int8()),
            pa.array([0, 0], pa.int32()),
            [pa.array([1]), pa.array(["x"])],
        ),
    ]
    for column in [*numbers, *lists, tensor, *others]:
        yield pa.table({"inputs": column})


def seeds(arrow_only):
    bodies = [(ARROW, arrow_of(table)) for table in tables()]
    if not arrow_only:
        for array in (np.ones(3, "f4"), np.ones((2, 3), "i8"), np.ones((3, 4, 5), ">f8")):
            file = io.BytesIO()
            np.save(file, array)
            bodies.append((NPY[0], file.getvalue()))
        bodies.append((JSON, b'{"inputs": [1, 2.5, 3e0], "id": "a"}'))
        bodies.append((JSON, b'{"samples": [[1, 2, 3], [4, 5, 6]], "id": null}'))
    return bodies


def limit_memory(more):
    """Let this process take so many bytes of address space more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(what, n="0"):
    if what == "large":
        bodies = list(large())
        limit_memory(200 << 20)
        for kind, body in bodies:
            assert len(body) <= LARGEST + 2_000_000, len(body)
            print(kind, len(body), read(kind, body), flush=True)
        return
    start = seeds(what == "arrow")
    assert sum(read(*each) for each in start) > 5
    limit_memory(200 << 20)
    rng, right = np.random.default_rng(0), 0
    for k in range(int(n)):
        kind, body = start[k % len(start)]
        right += read(kind, damaged_bytes(body, rng))
    print(n, "mutants,", right, "samples were right")


if __name__ == "__main__":
    main(*sys.argv[1:])
