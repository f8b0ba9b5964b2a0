"""Promises as text: the grammar of `--promise` and of request files.

| text | value |
|---|---|
| `gap zero_one <= 0.01` | `Promise("zero_one", epsilon=0.01)` |
| `consistency brier <= 0.05` | `Promise("brier", risk="consistency", epsilon=0.05)` |
| `zero-bounded gap brier <= 0.05` | `Promise("brier", risk="zero-bounded gap", epsilon=0.05)` |
| `P(gap brier > 0.1) <= 5%` | `Promise("brier", above=0.1, epsilon=0.05)` |
| `worst 10% of gap brier <= 0.3` | `Promise("brier", worst=0.1, epsilon=0.3)` |
| `gap zero_one among exits <= 0.08` | `Promise("zero_one", among="exits", epsilon=0.08)` |
| `gap zero_one within slices <= 0.05` | `Promise("zero_one", within="slices", epsilon=0.05)` |
| `cost flops <= 3e9` | `CostPromise("flops", at_most=3e9)` |
"""

import re
from dataclasses import fields
from typing import Any, NoReturn

from swiftsure.certify.promise import CostPromise, Promise
from swiftsure.certify.wording import WORDS
from swiftsure.curves.measures import Measure
from swiftsure.curves.risks import RISKS

__all__ = ["PromiseError", "parse_promise", "promise_text"]

GRAMMAR = """A promise is one of
  RISK [LOSS]                  the mean
  P(RISK [LOSS] > NUMBER)      the probability of a loss above a limit
  worst SHARE of RISK [LOSS] [above NUMBER]
                               the mean of the worst share
  cost NAME                    a mean cost
then [among exits] [within slices | within each slice], except for a cost,
then <= NUMBER. RISK is gap or consistency, or zero-bounded before them.
Examples: "gap zero_one <= 0.01", "P(gap brier > 0.1) <= 5%",
"worst 10% of gap brier within slices <= 0.3", "cost flops <= 3e9"."""

TOKENS = re.compile(r'\s*("[^"]*"|<=|≤|[()>]|[^\s()<>≤"]+|\S)')
ZERO_BOUNDED = "zero-bounded"
KEYWORDS = {"P", "worst", "of", "cost", "among", "exits", "within", "slices", "each", "slice"}
KEYWORDS |= {"above", "with", ZERO_BOUNDED}
MEASURES = [each.name for each in fields(Measure)]
"""What may be asked of a loss, as NAME=NUMBER after `with`."""


class PromiseError(ValueError):
    """A promise that cannot be read; the message has several lines, with a mark at the place."""


def parse_promise(text: str) -> Promise | CostPromise:
    """Return the promise that a text states.

    Raises
    ------
    PromiseError
        It marks the place that was not understood, and shows the grammar.

    Examples
    --------
    >>> print(parse_promise("worst 10% of gap brier within slices <= 0.3"))
    mean of the worst 0.1 of brier gap in all slices ≤ 0.3
    >>> parse_promise("cost flops <= 3e9")
    CostPromise(cost='flops', at_most=3000000000.0)
    """
    return _Reader(text).promise()


def promise_text(promise: Promise | CostPromise) -> str:
    """Return the text that `parse_promise` reads as this promise.

    Examples
    --------
    >>> promise_text(Promise("brier", epsilon=0.05, above=0.1, among="exits"))
    'P(gap brier > 0.1) among exits <= 0.05'
    """
    if isinstance(promise, CostPromise):
        return f"cost {_quoted(promise.cost)} <= {promise.at_most!r}"
    text = promise.risk + (f" {_quoted(promise.loss)}" if promise.loss is not None else "")
    text = WORDS[promise.kind].request(promise, text)
    text += " among exits" * (promise.among == "exits")
    text += f" within {promise.within}" if promise.within is not None else ""
    return f"{text} <= {promise.epsilon!r}"


def _quoted(name: str) -> str:
    """Return a name, in quotation marks if it would be read as something else."""
    plain = name not in KEYWORDS and TOKENS.fullmatch(name) and not re.match(r'[\s()<>≤"]', name)
    return name if plain else f'"{name}"'


class _Reader:
    """Reads one promise from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(each[1], each.start(1)) for each in TOKENS.finditer(text)]
        self.at = 0

    def promise(self) -> Promise | CostPromise:
        """Return the promise."""
        if self._skipped("cost"):
            name = self._name("the name of a cost")
            at_most = self._level()
            return self._made(CostPromise, name, at_most=at_most)
        about: dict[str, Any] = {}
        if self._skipped("P"):
            self._expect("(")
            about |= self._risk()
            self._expect(">")
            about["above"] = self._number()
            self._expect(")")
        elif self._skipped("worst"):
            about["worst"] = self._number()
            self._expect("of")
            about |= self._risk()
            if self._skipped("above"):
                about["above"] = self._number()
        else:
            about |= self._risk()
        if self._skipped("with"):
            about |= self._measure()
        if self._skipped("among"):
            self._expect("exits")
            about["among"] = "exits"
        if self._skipped("within"):
            if self._skipped("each"):
                self._expect("slice")
                about["within"] = "each slice"
            else:
                self._expect("slices", "slices, or each slice")
                about["within"] = "slices"
        return self._made(Promise, about.pop("loss", None), epsilon=self._level(), **about)

    def _risk(self) -> dict[str, Any]:
        bounded = f"{ZERO_BOUNDED} " * self._skipped(ZERO_BOUNDED)
        kinds = [name for name in RISKS if not name.startswith(ZERO_BOUNDED)]
        if self._next() not in kinds:
            self._fail(f"a risk ({' or '.join(kinds)})")
        found = {"risk": bounded + kinds[kinds.index(self._take())]}
        following = self._next()
        if following and following not in KEYWORDS and following not in ("<=", "≤", ">", ")"):
            found["loss"] = self._name("the name of a loss")
        return found

    def _measure(self) -> dict[str, float]:
        """Return any other measure, written as NAME=NUMBER."""
        found = re.fullmatch(r"(\w+)=(.+)", self._next())
        if found is None or found[1] not in MEASURES:
            self._fail(f"NAME=NUMBER, with NAME among {', '.join(MEASURES)}")
        try:
            value = float(found[2])
        except ValueError:
            self._fail("a number after =")
        self._take()
        return {found[1]: value}

    def _level(self) -> float:
        if not (self._skipped("<=") or self._skipped("≤")):
            self._fail("<=")
        level = self._number()
        if self.at < len(self.tokens):
            self._fail("nothing more")
        return level

    def _number(self) -> float:
        text = self._next()
        try:
            number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self._fail("a number")
        self._take()
        return number

    def _name(self, what: str) -> str:
        text = self._next()
        if not text or text in ("<=", "≤", "<", ">", "(", ")", '"'):
            self._fail(what)
        return self._take().strip('"')

    def _next(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][0]

    def _skipped(self, word: str) -> bool:
        """Return whether the next word is this one, and go past it."""
        found = self._next() == word
        self.at += found
        return found

    def _expect(self, word: str, what: str | None = None) -> None:
        if not self._skipped(word):
            self._fail(what or word)

    def _made(self, kind: Any, name: str | None, **values: Any) -> Promise | CostPromise:
        try:
            made: Promise | CostPromise = kind(name, **values)
        except ValueError as error:
            raise PromiseError(f"the promise {self.text!r} cannot be kept: {error}") from None
        return made

    def _fail(self, expected: str) -> NoReturn:
        place = self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)
        raise PromiseError(
            f"a promise cannot be read; expected {expected} at the mark:\n\n"
            f"  {self.text}\n  {' ' * place}^\n\n{GRAMMAR}"
        )
