"""`swiftsure convert`: write a record as Parquet."""

from pathlib import Path
from typing import Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.output import check_outputs, print_json, print_text

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="A record (npz).", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "record.parquet"
    ),
    json: options.Json = False,
) -> None:
    """Write a record as Parquet, which keeps the order of its tests.

    [bold]Examples[/bold]

        swiftsure convert record.npz -o record.parquet
    """
    import swiftsure as ss

    check_outputs(output)
    record = ss.load_record(source)
    record.save(output)
    if json:
        print_json({"samples": record.n, "seed": record.order.seed, "file": str(output)})
        return
    print_text(f"{record.n:,} samples, tested in the order of seed {record.order.seed}.")
    print_text(f"Wrote {output}")
