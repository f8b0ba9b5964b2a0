"""`swiftsure evaluate`: test controls on repeated splits of a record."""

from pathlib import Path
from typing import Annotated, Any

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

__all__ = ["evaluate"]


def evaluate(
    record: options.RecordFile,
    risk: options.Risk = "gap",
    loss: options.Loss = None,
    controls: Annotated[
        str, typer.Option(help="Controls, comma-separated, with options as in calibrate.")
    ] = "crc,ucb",
    bound: options.Bound = "auto",
    epsilons: Annotated[str, typer.Option(help="Levels, comma-separated.")] = "0.01,0.02,0.05,0.1",
    delta: options.Delta = 0.1,
    n_calibration: Annotated[
        float, typer.Option("--n-calibration", "-n", help="Samples, or a fraction below 1.")
    ] = 100,
    labels: Annotated[
        int | None,
        optional("Budget of labels for each calibration set; compares ways to spend it."),
    ] = None,
    pool: Annotated[
        int | None, optional("With --labels: unlabelled samples in each calibration set.")
    ] = None,
    splits: Annotated[int, typer.Option(help="Number of random splits.")] = 100,
    draws: Annotated[
        int | None, optional("Number of calibration sets for the violation rate.", default="splits")
    ] = None,
    score: options.Score = None,
    path: options.Path_ = None,
    average: options.Average = None,
    max_group_size: options.MaxGroupSize = None,
    cost: Annotated[str | None, optional("Cost to report, by name.")] = None,
    seed: options.Seed = 0,
    figure: Annotated[Path | None, optional("Draw risk and efficiency here.")] = None,
    json: options.Json = False,
) -> None:
    r"""Calibrate on random parts of a record and test on the rest.

    "test > ε" is the fraction of test parts whose risk is above ε, which
    includes their noise. "violations" is the fraction of newly drawn
    calibration sets whose choice has a risk above ε on the whole record,
    with a 95 % interval. δ bounds it for ucb and ltt; crc promises only
    the mean risk.

    Of a folder of Parquet files, at most a million samples are drawn.

    [bold]Examples[/bold]

        swiftsure evaluate record.parquet --loss zero_one -n 500 \
            --figure study.png

        swiftsure evaluate record.parquet --loss brier \
            --controls crc,crc:method=ucb,ucb:bound=wsr

        swiftsure evaluate record.parquet --loss zero_one --controls ucb \
            --labels 100 --pool 300 --cost flops
    """
    import swiftsure as ss
    from swiftsure.certify.wording import average_words, percent
    from swiftsure.records import open_record

    check_outputs(figure)
    if pool is not None:
        if labels is None:
            raise ValueError("`--pool` goes with --labels; without them, use --n-calibration.")
        n_calibration = float(pool)
    study = ss.evaluate(
        open_record(record),
        risk=risk,
        loss=loss,
        controls=[options.parse_control(text, bound) for text in controls.split(",")],
        epsilons=[_level(text) for text in epsilons.split(",")],
        delta=delta,
        n_calibration=int(n_calibration) if n_calibration.is_integer() else n_calibration,
        splits=splits,
        draws=draws,
        score=score,
        path=options.parse_path(path),
        seed=seed,
        average=average,  # type: ignore[arg-type]
        max_group_size=max_group_size,
        cost=cost,
        labels=labels,
        progress=False if json else None,
    )
    if figure is not None:
        ss.report.study_figure(study, figure)
    if json:
        print_json(study.summary())
        return
    units = f" {study.unit}" if study.unit != "samples" else ""
    title = (
        f"{study.risk_words}, n = {study.n_calibration:,} of {study.n_pool:,}{units}, δ = {delta:g}"
        + (f", {labels:,} labels" if labels is not None else "")
    )
    how = average_words(study.unit, study.average)
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


def _level(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"`--epsilons` must be comma-separated numbers, but got {text!r}."
        ) from None
