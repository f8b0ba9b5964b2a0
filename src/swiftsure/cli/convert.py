"""`swiftsure convert`: convert other files to formats that the other commands read."""

from pathlib import Path
from typing import Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.output import check_outputs, print_json, print_text

__all__ = ["convert"]


def convert(
    source: Annotated[
        Path, typer.Argument(help="Pickle of (logits, targets), or a record.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "logits.npz"
    ),
    json: options.Json = False,
) -> None:
    """Turn a pickle of logits into npz, or a record into Parquet.

    The logits published with the paper are pickles of arrays (exits,
    samples, classes). Reading a pickle can run any code, so this command
    reads only arrays and tensors, and refuses any other content.

    A record (npz) is written as Parquet, which also keeps the random
    order in which its samples are tested.

    [bold]Examples[/bold]

        swiftsure convert imagenet.p -o logits.npz

        swiftsure convert record.npz -o record.parquet
    """
    from swiftsure.cli.pickled_logits import convert_logits

    check_outputs(output)
    if output.suffix.lower() == ".parquet":
        _convert_record(source, output, json)
        return
    samples, exits, classes = convert_logits(source, output)
    if json:
        print_json({"samples": samples, "exits": exits, "classes": classes, "file": str(output)})
        return
    print_text(f"{samples:,} samples, {exits} exits, {classes:,} classes.")
    print_text(f"Wrote {output}")


def _convert_record(source: Path, output: Path, json: bool) -> None:
    import swiftsure as ss

    record = ss.load_record(source)
    record.save(output)
    if json:
        print_json({"samples": record.n, "seed": record.order.seed, "file": str(output)})
        return
    print_text(f"{record.n:,} samples, tested in the order of seed {record.order.seed}.")
    print_text(f"Wrote {output}")
