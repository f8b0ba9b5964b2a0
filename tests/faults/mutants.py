"""A seeded mutator of files: damage as disks do it, and as a hostile hand does."""

import copy
import json

import numpy as np

ODD_VALUES = (
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**70,
    1e308,
    -0.5,
    "",
    "x" * 3_000,
    "\x1b[31m\n",
    [],
    {},
    [[1.0]],
    {"a": {"b": None}},
)
"""What a JSON value is replaced by."""


def damaged_bytes(content, rng):
    """Return a copy with one fault: flipped, lost, repeated, inserted or overwritten bytes."""
    data = bytearray(content)
    start = int(rng.integers(len(data)))
    stop = min(len(data), start + int(rng.choice([1, 2, 8, 100, 5_000])))
    match rng.integers(6):
        case 0:
            data[start] ^= 1 << int(rng.integers(8))
        case 1:
            del data[start:]
        case 2:
            del data[start:stop]
        case 3:
            data[start:start] = data[start:stop]
        case 4:
            data[start:start] = rng.bytes(stop - start)
        case _:
            data[start:stop] = rng.bytes(stop - start)
    return bytes(data)


def damaged_json(content, rng):
    """Return JSON with one value replaced, removed, repeated or nested very deeply."""
    tree = json.loads(content)
    places = list(_places(tree))
    holder, key = places[int(rng.integers(len(places)))]
    text = None
    match rng.integers(8):
        case 0:
            del holder[key]
        case 1:
            holder[key] = [holder[key], holder[key]]
        case 2:
            holder[key] = "DEEP"
            text = json.dumps(tree).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
        case 3 if isinstance(key, str):
            text = json.dumps(tree).replace(
                f"{json.dumps(key)}:", f"{json.dumps(key)}: 0, {json.dumps(key)}:", 1
            )
        case 4:
            holder[key] = "NAN"
            text = json.dumps(tree).replace('"NAN"', str(rng.choice(["NaN", "Infinity", "1e999"])))
        case _:
            odd = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
            holder[key] = copy.deepcopy(odd)
    return (text or json.dumps(tree)).encode()


def mutants(content, n, seed, is_json=False):
    """Yield n damaged copies, each different from the original."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < n:
        mutant = (damaged_json if is_json and made % 2 else damaged_bytes)(content, rng)
        if mutant != content:
            made += 1
            yield mutant


def _places(tree):
    """Yield every (container, key) of nested JSON."""
    keys = tree if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])
