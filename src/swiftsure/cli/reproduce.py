"""`swiftsure reproduce`: the paper's experiments, one command each."""

from pathlib import Path
from typing import Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.commands import Group, Verb
from swiftsure.cli.output import print_json, print_table, print_text

__all__ = ["reproduce"]

reproduce = typer.Typer(cls=Group, no_args_is_help=True)


@reproduce.callback()
def experiments() -> None:
    """Repeat an experiment of the paper."""


@reproduce.command("calm-cnndm", cls=Verb)
def calm_cnndm(
    data: Annotated[
        Path,
        typer.Option(help="npz with thresholds, mean_layers and rouge_l.", show_default=False),
    ],
    splits: Annotated[int, typer.Option(help="Random splits.")] = 400,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for figure and tables.")
    ] = Path("results/calm_cnndm"),
    json: options.Json = False,
) -> None:
    """Text summarisation with CALM on CNN/DM (Fig. 2 of the paper).

    [bold]Example[/bold]

        swiftsure reproduce calm-cnndm --data calm_cnndm.npz -o results
    """
    from swiftsure.reproduce import calm_cnndm as experiment

    result = experiment(
        data, splits=splits, delta=delta, seed=seed, progress=False if json else None
    )
    files = result.write(output)
    table = result.table()
    if json:
        print_json({"table": table, "files": [str(file) for file in files]})
        return
    levels = [key for key in table[0] if key.startswith("ε")]
    print_table(
        f"Mean decoder layers per token over {splits} splits",
        ["control", "n", *levels],
        [[row["control"], f"{row['n']:,}", *(f"{row[k]:.2f}" for k in levels)] for row in table],
    )
    for file in files:
        print_text(f"Wrote {file}")
