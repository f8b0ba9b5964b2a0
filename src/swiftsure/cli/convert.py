"""`swiftsure convert`: published logits to a file that the other commands read."""

from pathlib import Path
from typing import Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.output import print_json, print_text

__all__ = ["convert"]


def convert(
    source: Annotated[
        Path, typer.Argument(help="Pickle of (logits, targets).", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="npz to write.")] = Path(
        "logits.npz"
    ),
    json: options.Json = False,
) -> None:
    """Turn a pickle of logits and targets into npz.

    The logits published with the paper are pickles of arrays (exits,
    samples, classes). A pickle can run any code when it is read: this
    reads arrays and tensors, and refuses a file that asks for more.

    [bold]Example[/bold]

        swiftsure convert imagenet.p -o logits.npz
    """
    from swiftsure.files import writable
    from swiftsure.reproduce.published_logits import convert_logits

    writable(output)
    samples, exits, classes = convert_logits(source, output)
    if json:
        print_json({"samples": samples, "exits": exits, "classes": classes, "file": str(output)})
        return
    print_text(f"{samples:,} samples, {exits} exits, {classes:,} classes.")
    print_text(f"Wrote {output}")
