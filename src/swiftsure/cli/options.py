"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Bound",
    "Delta",
    "Json",
    "Loss",
    "Path_",
    "RecordFile",
    "Risk",
    "Score",
    "Seed",
    "path_of",
]

RecordFile = Annotated[
    Path,
    typer.Argument(
        help="Record (.parquet), or .npz with its arrays, or with `logits` and `labels`.",
        show_default=False,
    ),
]
Risk = Annotated[str, typer.Option(help="gap (needs labels) or consistency.")]
Loss = Annotated[
    str | None, typer.Option(help="Loss, if the record has several.", show_default=False)
]
Score = Annotated[
    str | None, typer.Option(help="Confidence score; top1 if there.", show_default=False)
]
Delta = Annotated[float, typer.Option(help="Failure probability.")]
Bound = Annotated[str, typer.Option(help="auto, star, wsr, binomial, …")]
Seed = Annotated[int, typer.Option(help="Fixes all randomness.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Path_ = Annotated[
    str | None,
    typer.Option(
        "--path",
        help="Settings to choose from: logit, breakpoints, or thresholds such as 0.9,0.8,0.7.",
        show_default="logit",
    ),
]


def path_of(text: str | None) -> str | list[float] | None:
    """Return a path from what was typed."""
    if text is None or text in ("logit", "breakpoints"):
        return text
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`--path` must be logit, breakpoints, or numbers with commas, but got {text!r}."
        ) from None
