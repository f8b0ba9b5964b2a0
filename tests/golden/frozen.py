"""Frozen results: two JSON files per group, numbers and words, and how they are compared."""

import json
import math
from pathlib import Path

import numpy as np

__all__ = ["FOLDER", "Frozen", "differences", "digits", "parted", "plain", "written"]

FOLDER = Path(__file__).with_name("frozen")
RELATIVE, ABSOLUTE = 1e-9, 1e-12
LONGEST = 40
"""Longer lists of numbers are stored as a few numbers that any change of theirs changes."""


class Frozen:
    """The frozen results of one group of cases."""

    def __init__(self, group, folder=FOLDER):
        self.files = {
            "numbers": folder / f"{group}.json",
            "words": folder / f"{group}-words.json",
        }

    def load(self, part):
        file = self.files[part]
        return json.loads(file.read_text("utf-8")) if file.exists() else {}

    def save(self, part, content):
        if content:
            self.files[part].write_text(written(content) + "\n", "utf-8")
        else:
            self.files[part].unlink(missing_ok=True)

    def names(self):
        """Return the names of all cases that are frozen."""
        return set(self.load("numbers")) | set(self.load("words"))

    def differences(self, name, found):
        """Return by part, as lines of text, how a case differs from what is frozen."""
        parts = zip(self.files, parted(plain(found)), strict=True)
        return {
            part: lines
            for part, now in parts
            if (lines := list(differences(self.load(part).get(name), now, name)))
        }

    def freeze(self, name, found, which):
        """Store a case, and return how it differs from what was frozen."""
        changed = self.differences(name, found)
        for part, now in zip(self.files, parted(plain(found)), strict=True):
            if part in changed and which in (part, "all"):
                content = self.load(part) | {name: now}
                self.save(part, {key: each for key, each in content.items() if each is not None})
        return [line for part, lines in changed.items() if which in (part, "all") for line in lines]

    def keep_only(self, names):
        """Forget the cases that are no longer there, and return their names."""
        gone = self.names() - set(names)
        for part in self.files:
            self.save(part, {k: v for k, v in self.load(part).items() if k not in gone})
        return gone


# ------------------------------------------------------------------------------------- plain values


def plain(value):
    """Return JSON: arrays as lists, numbers with 12 digits, long lists of numbers in short."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if len(value) > LONGEST and all(isinstance(each, bool | int | float) for each in value):
            return in_short(value)
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        return float(f"{value:.12g}")
    return value


def in_short(values):
    """Return the number of values, their mean, and means with two sets of fixed weights."""
    numbers = np.nan_to_num(np.asarray(values, float), posinf=1e9, neginf=-1e9)
    waves = [np.cos(step * np.arange(len(numbers))) for step in (0.0, 0.7, 2.3)]
    return {"n": len(numbers), "means": plain([float((wave * numbers).mean()) for wave in waves])}


def digits(numbers):
    """Return whole numbers below 10 in one text, a digit for each."""
    values = np.asarray(numbers.tolist(), int)
    if values.size and not 0 <= values.min() <= values.max() < 10:
        raise ValueError(f"numbers must be digits, but got {values.tolist()}.")
    return "".join(map(str, values.tolist()))


def parted(value):
    """Return the numbers and the words of a value, each in its place; None for nothing.

    A text with a space is words. Everything else, also the name of a loss, is a number here.
    """
    if isinstance(value, str):
        return (None, value) if " " in value else (value, None)
    if isinstance(value, dict) and value:
        parts = {key: parted(each) for key, each in value.items()}
        numbers = {key: part[0] for key, part in parts.items() if not only_words(*part)}
        words = {key: part[1] for key, part in parts.items() if part[1] is not None}
        return numbers or None, words or None
    if isinstance(value, list) and value:
        parts = [parted(each) for each in value]
        numbers, words = ([part[k] for part in parts] for k in range(2))
        only = all(only_words(*part) for part in parts)
        return None if only else numbers, words if any(w is not None for w in words) else None
    return value, None


def only_words(numbers, words):
    return numbers is None and words is not None


def differences(frozen, found, where=""):
    """Yield a line for every place in which two values differ."""
    if isinstance(frozen, dict) and isinstance(found, dict):
        for key in sorted(frozen.keys() | found.keys()):
            here = f"{where}.{key}"
            if key not in found:
                yield f"{here}: gone, was {short(frozen[key])}"
            elif key not in frozen:
                yield f"{here}: new, {short(found[key])}"
            else:
                yield from differences(frozen[key], found[key], here)
    elif isinstance(frozen, list) and isinstance(found, list) and len(frozen) == len(found):
        for k, pair in enumerate(zip(frozen, found, strict=True)):
            yield from differences(*pair, f"{where}[{k}]")
    elif not same(frozen, found):
        yield f"{where}: {short(frozen)} -> {short(found)}"


def same(frozen, found):
    numbers = [
        isinstance(each, int | float) and not isinstance(each, bool) for each in (frozen, found)
    ]
    if all(numbers):
        return math.isclose(frozen, found, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(frozen) is type(found) and frozen == found


def short(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 500 else f"{text[:500]}…"


def written(value, indent=""):
    """Return JSON with sorted keys, a line for each value, and short lists on one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(k)}: {written(value[k], inner)}" for k in sorted(value)]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    line = json.dumps(value, ensure_ascii=False)
    scalars = isinstance(value, list) and not any(isinstance(v, dict | list) for v in value)
    if scalars and len(line) > 90 and not any(isinstance(each, str) for each in value):
        texts = [json.dumps(each) for each in value]
        lines = [inner + ", ".join(texts[k : k + 8]) for k in range(0, len(texts), 8)]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    if isinstance(value, list) and len(line) > 90:
        lines = [inner + written(each, inner) for each in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return line
