"""`swiftsure evaluate`: test controls on repeated splits of a record."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import (
    check_outputs,
    is_terminal,
    number,
    print_json,
    print_table,
    print_text,
    rate,
)
from swiftsure.cli.requests import given, request_of

if TYPE_CHECKING:
    from swiftsure.certify.calibration import Calibration
    from swiftsure.certify.control import Control
    from swiftsure.study.requests import RequestStudy

__all__ = ["evaluate"]

LEVELS = "0.01,0.02,0.05,0.1"
CONTROLS = "crc,ucb"


def evaluate(
    context: typer.Context,
    record: options.RecordFile,
    promise: options.Promises = None,
    loss: options.Loss = None,
    risk: options.Risk = "gap",
    epsilons: Annotated[
        str | None, optional("Levels, comma-separated.", default=f"the promise's, or {LEVELS}")
    ] = None,
    delta: options.Delta = 0.1,
    path: options.Route = None,
    rule: options.Rule = None,
    missing: options.Missing = "raise",
    cost: options.Cost = None,
    request: options.Request = None,
    controls: Annotated[
        str | None,
        optional(
            "Controls, comma-separated, with options as in calibrate.",
            default=f"{CONTROLS}; ucb for several promises",
        ),
    ] = None,
    n_calibration: Annotated[
        float, typer.Option("--n-calibration", "-n", help="Samples, or a fraction below 1.")
    ] = 100,
    labels: Annotated[
        int | None,
        optional("Budget of labels for each calibration set; compares ways to spend it."),
    ] = None,
    splits: Annotated[int, typer.Option(help="Number of random splits.")] = 100,
    draws: Annotated[
        int | None, optional("Number of calibration sets for the violation rate.", default="splits")
    ] = None,
    seed: options.Seed = 0,
    figure: Annotated[Path | None, optional("Draw risk and efficiency here.")] = None,
    json: options.Json = False,
) -> None:
    r"""Calibrate on random parts of a record and test on the rest.

    "test > ε" is the fraction of test parts whose risk is above ε, which
    includes their noise. "violations" is the fraction of newly drawn
    calibration sets whose choice has a risk above ε on the whole record,
    with a 95 % interval. δ bounds it for ucb and ltt; crc promises only
    the mean risk. Of several promises, slices and costs, each calibration
    set runs the whole request.

    Of a folder of Parquet files, at most a million samples are drawn.

    [bold]Examples[/bold]

        swiftsure evaluate record.parquet --loss zero_one -n 500 \
            --figure study.png

        swiftsure evaluate record.parquet -n 300 \
            --promise 'gap zero_one <= 0.05' \
            --promise 'consistency zero_one <= 0.1'

        swiftsure evaluate record.parquet --loss brier \
            --controls crc,crc:method=ucb,ucb:bound=wsr

        swiftsure evaluate record.parquet --loss zero_one --controls ucb \
            --labels 100 -n 300 --cost flops
    """
    from swiftsure.records import open_record

    check_outputs(figure)
    whole = promise is not None or request is not None
    levels = None if epsilons is None and whole else options.parse_levels(epsilons or LEVELS)
    # The level of the one promise that --loss and --risk make; those studied take its place.
    level = None if whole or levels is None else levels[0]
    asked = request_of(context, [record], epsilon=level)
    loaded = open_record(record)
    sizes: dict[str, Any] = {
        "n_calibration": int(n_calibration) if n_calibration.is_integer() else n_calibration,
        "splits": splits,
        "draws": draws,
        "seed": seed,
        "progress": False if json else None,
    }
    together = len(asked.promises) > 1 or asked.risks[0].within is not None
    if together or asked.missing == "stop" or hasattr(asked.path, "share"):
        for name in ("epsilons", "labels", "figure"):
            if given(context, name):
                raise ValueError(f"`--{name}` is for one promise over all samples.")
        _study_together(loaded, asked, _controls(controls, asked.control), sizes, json)
        return
    usual = [asked.control] if request is not None else _controls(CONTROLS, asked.control)
    compared = usual if controls is None else _controls(controls, asked.control)
    _study(loaded, asked, compared, levels, labels, sizes, figure, json)


def _controls(text: str | None, own: "Control") -> "list[Control]":
    """Return the controls to compare; that of the request if none are named."""
    return [own] if text is None else [options.parse_control(each) for each in text.split(",")]


def _study(
    record: Any,
    asked: "Calibration",
    controls: "list[Control]",
    levels: list[float] | None,
    labels: int | None,
    sizes: dict[str, Any],
    figure: Path | None,
    json: bool,
) -> None:
    """Study one promise over all samples, at several levels."""
    import swiftsure as ss
    from swiftsure import Repeats
    from swiftsure.certify.wording import average_words, percent

    if labels is not None:
        asked = replace(asked, missing=ss.Ask(None, labels))
    study = ss.evaluate(
        record,
        risk=asked,
        controls=controls,
        epsilons=levels,
        n_calibration=sizes["n_calibration"],
        splits=Repeats(sizes["splits"], sizes["draws"], sizes["progress"]),
        seed=sizes["seed"],
    )
    if figure is not None:
        ss.report.study_figure(study, figure)
    if json:
        print_json(study.summary())
        return
    about, delta = study.about, asked.delta
    units = f" {about.unit}" if about.unit != "samples" else ""
    title = f"{about}, n = {study.n_calibration:,} of {study.n_pool:,}{units}, δ = {delta:g}" + (
        f", {labels:,} labels" if labels is not None else ""
    )
    how = average_words(about.unit, about.average)
    risk = f"test risk ({how})" if how else "test risk"
    columns = ["control", "ε", risk, "± sd", "test > ε", "violations"]
    print_table(title, [*columns, f"mean {study.cost or 'cost'}", "saved %"], _rows(study))
    if is_terminal():  # a pipe gets only the table
        text = (
            f"\nviolations: choices whose true risk is above ε (95 % interval). At most"
            f" {percent(delta)} for ucb and ltt; crc promises only the mean risk."
        )
        bare = [label for label, control in study.controls.items() if control.guarantee == "none"]
        print_text(text + f" No promise: {', '.join(bare)}." * bool(bare), "dim")
    if figure is not None:
        print_text(f"Wrote {figure}")


def _study_together(
    record: Any,
    asked: "Calibration",
    controls: "list[Control]",
    sizes: dict[str, Any],
    json: bool,
) -> None:
    """Study all that a request promises, as each calibration set would run it."""
    studies: dict[str, RequestStudy] = {
        each.label: replace(asked, control=each, bound=each.bound).evaluate(record, **sizes)
        for each in controls
    }
    rows = [{"control": label, **row} for label, each in studies.items() for row in each.summary()]
    if json:
        print_json(rows)
        return
    first = next(iter(studies.values()))
    saved = [name for name in rows[0] if name.startswith("saved ")]
    print_table(
        f"{first.request}, n = {first.n_calibration:,} of {first.n_pool:,} {first.unit}",
        ["control", "promise", "test risk", "± sd", "test > ε", "violations", "certified", *saved],
        [
            [
                row["control"],
                row["promise"],
                f"{row['test_risk']:.4f}",
                f"{row['test_risk_sd']:.4f}",
                f"{100 * row['test_exceedance']:.0f} %",
                rate(row["violations"], row["violations_low"], row["violations_high"]),
                f"{100 * row['certified']:.0f} %",
                *(f"{100 * row[name]:.1f} %" for name in saved),
            ]
            for row in rows
        ],
        left=2,
    )


def _rows(study: Any) -> list[list[str]]:
    return [
        [
            row["control"],
            f"{row['epsilon']:g}",
            f"{row['test_risk']:.4f}",
            f"{row['test_risk_sd']:.4f}",
            f"{100 * row['test_exceedance']:.0f} %",
            rate(row["violations"], row["violations_low"], row["violations_high"]),
            number(row["mean_cost"], 3),
            "–" if study.cost is None else f"{row['gain']:.1f}",
        ]
        for row in study.summary()
    ]
