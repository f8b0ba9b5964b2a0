"""The application: verbs, and how errors end."""

import sys
from typing import Annotated

import typer

import swiftsure
from swiftsure.cli.calibrate import calibrate
from swiftsure.cli.collect import collect
from swiftsure.cli.demo import demo
from swiftsure.cli.evaluate import evaluate
from swiftsure.cli.plan import plan
from swiftsure.cli.reproduce import reproduce

__all__ = ["app", "main"]

app = typer.Typer(
    name="swiftsure",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (demo, collect, calibrate, evaluate, plan):
    app.command()(verb)
app.add_typer(reproduce, name="reproduce")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swiftsure {swiftsure.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fast inference with a guarantee: set an early-exit threshold by risk control.

    Exit status: 0 all is well; 1 a promise cannot be kept; 2 bad usage or bad input.
    """


def main() -> None:
    """Run the command line; what the library refuses is one line and exit status 2."""
    try:
        app()
    except (ValueError, TypeError, ImportError, OSError) as error:
        typer.echo(f"swiftsure: {error}", err=True)
        sys.exit(2)
