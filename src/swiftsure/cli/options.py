"""Options that several commands share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

if TYPE_CHECKING:
    from swiftsure.certify.control import Control as Control_
    from swiftsure.exits import ExitRule

__all__ = [
    "AcceptEdited",
    "Control",
    "Cost",
    "Delta",
    "Epsilon",
    "Json",
    "Loss",
    "Missing",
    "Promises",
    "RecordFile",
    "Request",
    "Risk",
    "Route",
    "Rule",
    "Seed",
    "optional",
    "parse_control",
    "parse_levels",
    "parse_path",
    "parse_rule",
]


REQUEST = "The request"
"""A panel of the help."""


def optional(text: str, *names: str, default: str | bool = False, panel: str | None = None) -> Any:
    """Return an option with this help text; `default` describes its default, if shown at all."""
    return typer.Option(*names, help=text, show_default=default, rich_help_panel=panel)


RECORD_HELP = (
    "Record (.parquet), or a folder of such; or .npz with its arrays or with `logits` and `labels`."
)
RecordFile = Annotated[Path, typer.Argument(help=RECORD_HELP, show_default=False)]
Promises = Annotated[
    list[str] | None,
    typer.Option(
        "--promise",
        "-p",
        metavar="<str>",
        help="A promise, like 'gap zero_one <= 0.01'; repeatable.",
        rich_help_panel=REQUEST,
    ),
]
Loss = Annotated[
    str | None,
    optional("For one promise: name of the loss, if the record has several.", panel=REQUEST),
]
Epsilon = Annotated[
    float | None, optional("For one promise: the largest mean risk allowed.", panel=REQUEST)
]
Risk = Annotated[
    str,
    typer.Option(
        help="For one promise: gap (needs labels) or consistency.", rich_help_panel=REQUEST
    ),
]
Request = Annotated[
    Path | None,
    optional("Read all of these from a TOML file, or from a policy that they made.", panel=REQUEST),
]
Delta = Annotated[float, typer.Option(help="Failure probability.", rich_help_panel=REQUEST)]
Control = Annotated[
    str,
    typer.Option(help="ucb, ltt, crc or empirical, with options.", rich_help_panel=REQUEST),
]
Route = Annotated[
    str | None,
    optional(
        "Settings to choose from: logit, breakpoints, or thresholds such as 0.9,0.8,0.7; or learned"
        " on 200 of the samples (learn:200), or on a record of others (FILE).",
        "--path",
        default="logit",
        panel=REQUEST,
    ),
]
Rule = Annotated[
    str | None,
    optional(
        "When to exit: SCORE, then any of :strict (above the threshold, not at it) and :min_exit=1"
        " (the first exit that may be taken). SCORE may be a record of others (FILE.parquet), to"
        " learn one on.",
        default="top1 if available",
        panel=REQUEST,
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        help="If a needed label is missing: raise, worst (assume the worst loss), or stop"
        " (before the first setting that lacks a label).",
        rich_help_panel=REQUEST,
    ),
]
Cost = Annotated[
    str | None, optional("Which cost to save, if the record has several.", panel=REQUEST)
]
Seed = Annotated[int, typer.Option(help="Fixes all randomness.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AcceptEdited = Annotated[
    bool,
    typer.Option("--accept-edited", help="Accept a policy that was changed after it was written."),
]


def parse_path(text: str | None) -> str | list[float] | None:
    """Parse --path."""
    if text is None or text in ("logit", "breakpoints"):
        return text
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(
            "`--path` must be logit, breakpoints, comma-separated numbers, learn:NUMBER, or a"
            f" record, but got {text!r}."
        ) from None


def parse_control(text: str) -> "Control_":
    """Parse a control: NAME, then any :OPTION=VALUE."""
    from swiftsure._lib import checks
    from swiftsure.certify.control import OPTIONS, Control

    name, *given = text.strip().split(":")
    checks.choice("control", name, OPTIONS)
    known = OPTIONS[name] if name == "empirical" else ("bound", *OPTIONS[name])
    control = Control(name, **_parsed(name, given, known, get_type_hints(Control)))
    if control.bound != "auto" and not control.uses_bound:
        raise ValueError(f"`bound` is not used by {name} without its method=ucb; leave it out.")
    return control


def parse_rule(text: str | None) -> "ExitRule":
    """Parse an exit rule: SCORE, or nothing, then any :OPTION=VALUE.

    In place of a name, SCORE may be the file of a learned score, or of a record to learn one on.
    """
    from swiftsure.exits import ExitRule

    score, *given = (text or "").strip().split(":")
    kinds = {"strict": bool, "min_exit": int}
    chosen = _parsed("--rule", given, tuple(kinds), kinds)
    if score.endswith(".json"):
        from swiftsure.scores import LearnedScore

        return ExitRule(LearnedScore.load(score), **chosen)
    if score.endswith(".parquet"):
        from swiftsure.records import ExitRecord
        from swiftsure.scores import LearnedScore

        return ExitRule(LearnedScore.fit(ExitRecord.load(score)), **chosen)
    return ExitRule(score or None, **chosen)


def parse_levels(text: str) -> list[float]:
    """Parse --epsilons."""
    levels = []
    for each in text.split(","):
        try:
            levels.append(float(each))
        except ValueError:
            raise ValueError(
                f"`--epsilons` must be comma-separated numbers, but got {each!r}."
            ) from None
    return levels


def _parsed(
    name: str, given: list[str], known: Sequence[str], kinds: Mapping[str, Any]
) -> dict[str, Any]:
    """Parse OPTION=VALUE; a boolean option without a value is true."""
    from swiftsure._lib import checks

    chosen: dict[str, Any] = {}
    for each in given:
        option, _, value = each.partition("=")
        checks.choice(f"option of {name}", option, known)
        chosen[option] = _value(option, value, kinds[option])
    return chosen


def _value(option: str, text: str, kind: Any) -> bool | float | str:
    """Parse the value of an option; a boolean option without a value is true."""
    from swiftsure._lib import checks

    kinds = get_args(kind) or (kind,)  # the types in `float | None`
    if bool in kinds:
        return checks.choice(option, text or "true", ["true", "false"]) == "true"
    number = next((each for each in (int, float) if each in kinds), None)
    if number is None:
        return text
    try:
        return number(text)
    except ValueError:
        raise ValueError(f"`{option}` must be a number, but got {text!r}.") from None
