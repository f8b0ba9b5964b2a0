"""Requests as text: what `--request` files hold, and the options that say the same.

A policy's file holds the request that made it. A TOML file has the fields of
`swiftsure.Calibration`, each spelled as its option:

    promises = ["gap zero_one <= 0.01", "cost flops <= 3e9"]
    delta = 0.1
    control = "ucb:bound=star"
    path = "learn:200"
    rule = "top1:strict:min_exit=1"
    missing = "raise"
    cost = "flops"
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.promises import parse_promise, promise_text

if TYPE_CHECKING:
    from swiftsure.certify.calibration import Calibration

__all__ = ["RequestText", "given", "request_of"]

OPTIONS = (
    *("promise", "loss", "epsilon", "risk"),
    *("delta", "control", "path", "rule", "missing", "cost"),
)
"""Options that a request file takes the place of."""

LEARN = "learn:"


@dataclass(frozen=True)
class RequestText:
    """A `Calibration` as text, field by field."""

    promises: tuple[str, ...]
    delta: float = 0.1
    control: str = "ucb"
    path: str | None = None
    rule: str | None = None
    missing: str = "raise"
    cost: str | None = None

    @classmethod
    def load(cls, file: Path) -> "RequestText":
        """Read a TOML file."""
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a TOML file: {error}.") from None
        try:
            return cls(**_checked(content))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def calibration(self, records: Sequence[Path] = ()) -> "Calibration":
        """Return the request; `records` are those to calibrate on, which no pilot may be."""
        import swiftsure as ss

        promises = tuple(parse_promise(text) for text in self.promises)
        control, rule = options.parse_control(self.control), options.parse_rule(self.rule)
        route: Any = self.path
        if self.path is not None and self.path.startswith(LEARN):
            route = ss.Path.learn(_count_or_share(self.path.removeprefix(LEARN)), cost=self.cost)
        elif self.path is not None and _is_file(self.path):
            first = next((each for each in promises if isinstance(each, ss.Promise)), None)
            route = _learned(Path(self.path), records, first, self.cost)
        else:
            route = options.parse_path(self.path)
        return ss.Calibration(
            promises,
            delta=self.delta,
            control=control,
            path=route,
            rule=rule,
            missing=self.missing,  # type: ignore[arg-type]
            cost=self.cost,
        )


def given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given, also with the value that it has by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def request_of(
    context: typer.Context,
    records: Sequence[Path] = (),
    loss: str | None = None,
    epsilon: float | None = None,
) -> "Calibration":
    """Return the request of a command: its `--request` file, or what its other options say.

    `records` are those to calibrate on, which no pilot may be. `loss` and `epsilon` take the place
    of options that were not given.
    """
    options_given = context.params
    if options_given["request"] is None:
        return _text_of_options(context, loss, epsilon).calibration(records)
    for name in OPTIONS:
        if given(context, name):
            raise ValueError(f"`--{name}` is in the file of --request; change it there.")
    file = Path(options_given["request"])
    if file.suffix.lower() != ".json":
        return RequestText.load(file).calibration(records)
    from swiftsure.certify.slices import any_part, load_policy

    found = any_part(load_policy(file)).calibration
    if found is None:
        raise ValueError(f"{file} does not say how it was calibrated.")
    return found


def _text_of_options(
    context: typer.Context, loss: str | None, epsilon: float | None
) -> RequestText:
    options_given = context.params
    promises = options_given["promise"]
    if not promises:
        loss = loss if options_given.get("loss") is None else options_given["loss"]
        epsilon = epsilon if options_given.get("epsilon") is None else options_given["epsilon"]
        promises = [_one_promise(loss, epsilon, options_given.get("risk", "gap"))]
    else:
        for name in ("loss", "epsilon", "risk"):
            if given(context, name):
                raise ValueError(f"`--{name}` is each --promise's own; leave it out.")
    others = {each.name for each in fields(RequestText)} & options_given.keys()
    return RequestText(tuple(promises), **{name: options_given[name] for name in others})


def _one_promise(loss: str | None, epsilon: float | None, risk: str) -> str:
    from swiftsure.certify.promise import Promise

    if epsilon is None:
        raise ValueError(
            "`--epsilon` must be given: the largest risk that is allowed, like --epsilon 0.01. Or"
            " give whole promises, like --promise 'gap zero_one <= 0.01'."
        )
    return promise_text(Promise(loss, epsilon=epsilon, risk=risk))


def _checked(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request file; raise for others, and for other types."""
    from swiftsure._lib import checks

    found: dict[str, Any] = {}
    for name, value in content.items():
        checks.choice("field", name, [each.name for each in fields(RequestText)])
        texts = value if name == "promises" and isinstance(value, list) else [value]
        kind = int | float if name == "delta" else str
        if not all(isinstance(each, kind) and not isinstance(each, bool) for each in texts):
            what = {"promises": "a list of texts", "delta": "a number"}.get(name, "a text")
            raise ValueError(f"`{name}` must be {what}, but is {value!r}.")
        found[name] = tuple(texts) if name == "promises" else value
    if not found.get("promises"):
        raise ValueError('`promises` must be given, like promises = ["gap zero_one <= 0.01"].')
    return found


def _count_or_share(text: str) -> float:
    """Return a number of pilot samples, or their share."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(
            f"`--path` must be learn:NUMBER, of samples or a share of them, but got learn:{text}."
        ) from None
    return int(value) if value.is_integer() else value


def _is_file(text: str) -> bool:
    return Path(text).suffix.lower() in (".parquet", ".npz") or Path(text).exists()


def _learned(pilot: Path, records: Sequence[Path], promise: Any, cost: str | None) -> Any:
    """Return the path learned on a record of other samples."""
    import swiftsure as ss

    if pilot.exists() and any(each.exists() and pilot.samefile(each) for each in records):
        raise ValueError("`--path` must name other samples than the record, not the same file.")
    others = ss.load_record(pilot)
    loss = None if promise is None else promise.loss
    return ss.Path.pareto(others, None if promise is None else promise.risk, loss, cost=cost)
