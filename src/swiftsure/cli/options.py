"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

if TYPE_CHECKING:
    from swiftsure.certify.control import Control

__all__ = [
    "AcceptEdited",
    "Average",
    "Bound",
    "Delta",
    "Json",
    "Loss",
    "MaxGroupSize",
    "OrderSeed",
    "Path_",
    "RecordFile",
    "Risk",
    "Score",
    "Seed",
    "optional",
    "parse_control",
    "parse_path",
]


def optional(text: str, *names: str, default: str | bool = False) -> Any:
    """Return an option with this help text; `default` describes its default, if shown at all."""
    return typer.Option(*names, help=text, show_default=default)


RecordFile = Annotated[
    Path,
    typer.Argument(
        help="Record (.parquet), or a folder of such; or .npz with its arrays or with `logits` and"
        " `labels`.",
        show_default=False,
    ),
]
Risk = Annotated[str, typer.Option(help="gap (needs labels) or consistency.")]
Loss = Annotated[str | None, optional("Name of the loss, if the record has several.")]
Score = Annotated[str | None, optional("Confidence score; top1 if available.")]
Delta = Annotated[float, typer.Option(help="Failure probability.")]
Bound = Annotated[str, typer.Option(help="auto, star, wsr, binomial, trinomial, …")]
Seed = Annotated[int, typer.Option(help="Fixes all randomness.")]
OrderSeed = Annotated[
    int | None, optional("Fixes the order of samples.", "--seed", default="the record's own")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AcceptEdited = Annotated[
    bool,
    typer.Option("--accept-edited", help="Accept a policy that was changed after it was written."),
]
Average = Annotated[
    str | None,
    optional(
        "With groups, what has equal weight in the risk: group (the risk is the mean of the group"
        " means) or sample.",
        default="group",
    ),
]
MaxGroupSize = Annotated[
    int | None,
    optional("For --average sample: the largest possible group size, declared beforehand."),
]
Path_ = Annotated[
    str | None,
    optional(
        "Settings to choose from: logit, breakpoints, or thresholds such as 0.9,0.8,0.7.",
        "--path",
        default="logit",
    ),
]


def parse_path(text: str | None) -> str | list[float] | None:
    """Parse --path."""
    if text is None or text in ("logit", "breakpoints"):
        return text
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`--path` must be logit, breakpoints, or comma-separated numbers, but got {text!r}."
        ) from None


def parse_control(text: str, bound: str) -> "Control":
    """Parse a control: NAME, then any :OPTION=VALUE.

    `bound` applies if the control uses a bound and does not name one.
    """
    from dataclasses import replace

    from swiftsure._lib import checks
    from swiftsure.certify.control import OPTIONS, Control

    name, *given = text.strip().split(":")
    checks.choice("control", name, OPTIONS)
    known = OPTIONS[name] if name == "empirical" else ("bound", *OPTIONS[name])
    kinds = get_type_hints(Control)
    chosen: dict[str, Any] = {}
    for each in given:
        option, _, value = each.partition("=")
        checks.choice(f"option of {name}", option, known)
        chosen[option] = _value(option, value, kinds[option])
    control = Control(name, **{"bound": bound, **chosen})
    if control.uses_bound:
        return control
    if "bound" in chosen:
        raise ValueError(f"`bound` of {name} needs its method=ucb.")
    return replace(control, bound="auto")


def _value(option: str, text: str, kind: Any) -> bool | float | str:
    """Parse the value of an option; a boolean option without a value is true."""
    from swiftsure._lib import checks

    kinds = get_args(kind) or (kind,)  # the types in `float | None`
    if bool in kinds:
        return checks.choice(option, text or "true", ["true", "false"]) == "true"
    if float not in kinds:
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"`{option}` must be a number, but got {text!r}.") from None
