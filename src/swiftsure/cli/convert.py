"""`swiftsure convert`: write a record as Parquet, with what is known about the draw."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure._lib import checks
from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, print_json, print_text

__all__ = ["convert"]


def convert(
    source: options.RecordFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Record to write.")] = Path(
        "record.parquet"
    ),
    groups_average: Annotated[
        str | None,
        optional(
            "With groups, what has equal weight in the risk: group (the risk is the mean of the"
            " group means) or sample.",
            default="group",
        ),
    ] = None,
    max_group_size: Annotated[
        int | None,
        optional(
            "For --groups-average sample: the largest possible group size, declared beforehand."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        optional(
            "Weights of slices in production, SLICE=WEIGHT,SLICE=WEIGHT,…; and `,estimated` if"
            " they were estimated."
        ),
    ] = None,
    population: Annotated[
        int | None, optional("Size of the finite population that the samples came from.")
    ] = None,
    seed: Annotated[
        int | None, optional("Fixes the order of samples.", default="drawn at random, once")
    ] = None,
    json: options.Json = False,
) -> None:
    r"""Write a record as Parquet, with what is known about the draw.

    Promises are about the population that the samples were drawn from, so
    how they were drawn is part of the record. The file also keeps the
    random order in which samples are tested, which an npz file does not.

    [bold]Examples[/bold]

        swiftsure convert record.npz -o record.parquet

        swiftsure convert users.parquet -o counted.parquet \
            --groups-average sample --max-group-size 4
    """
    import swiftsure as ss

    check_outputs(output)
    record: Any = ss.load_record(source)
    if groups_average is not None or max_group_size is not None:
        if record.groups is None:
            raise ValueError("`--groups-average` and `--max-group-size` need a record with groups.")
        record = record.grouped(
            record.groups, average=groups_average or "group", max_size=max_group_size
        )
    if weights is not None:
        parts = weights.split(",")
        by_slice = _numbers("--weights", [each for each in parts if each != "estimated"])
        # Every weight that can occur is named, so the largest of them is known beforehand.
        largest = max(by_slice.values(), default=0.0)
        record = record.weighted(by_slice, max_weight=largest, estimated="estimated" in parts)
    if population is not None:
        record = record.drawn_from(population)
    if seed is not None:
        record = replace(record, order=checks.count("seed", seed, 0))
    record.save(output)
    if json:
        print_json({"samples": record.n, "seed": record.order.seed, "file": str(output)})
        return
    print_text(f"{record.n:,} samples, tested in the order of seed {record.order.seed}.")
    print_text(f"Wrote {output}")


def _numbers(option: str, texts: list[str]) -> dict[str, float]:
    """Parse NAME=VALUE."""
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"`{option}` must be NAME=NUMBER, but got {text!r}.")
    return found
