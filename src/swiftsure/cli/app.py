"""The application: verbs, and how errors end."""

import os
import sys
import traceback
from typing import Annotated

import typer

import swiftsure
from swiftsure.cli.calibrate import calibrate
from swiftsure.cli.collect import collect
from swiftsure.cli.commands import Group, Verb
from swiftsure.cli.convert import convert
from swiftsure.cli.demo import demo
from swiftsure.cli.evaluate import evaluate
from swiftsure.cli.monitor import monitor
from swiftsure.cli.plan import plan
from swiftsure.cli.report import report
from swiftsure.cli.simulate import simulate
from swiftsure.cli.translate import translate

__all__ = ["app", "main"]

READER_GONE = 141
"""What a shell shows for a program ended by SIGPIPE: 128 + 13."""

FAULT = 70
"""EX_SOFTWARE of sysexits.h: an error that nobody foresaw."""

app = typer.Typer(
    name="swiftsure",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS = (
    demo,
    translate,
    collect,
    calibrate,
    evaluate,
    report,
    plan,
    monitor,
    simulate,
    convert,
)
for verb in VERBS:
    app.command(cls=Verb)(verb)


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
    """Fast inference with a guarantee: early exits set by risk control.

    [bold]Examples[/bold]

        swiftsure demo

        swiftsure calibrate record.parquet --loss zero_one --epsilon 0.02

    Exit status: 0 all is well; 1 a promise cannot be kept;
    2 bad usage or bad input; 70 a fault of swiftsure itself.
    """


def main() -> None:
    """Run the command line.

    What the library refuses is one line and exit status 2; any other error is a fault of its own,
    shown whole, and status 70. Python's 1 would say that a promise cannot be kept.
    """
    try:
        status = _status()
        sys.stdout.flush()  # or a reader that has gone would be noticed only at shutdown
    except BrokenPipeError:
        # `swiftsure ... | head -1` ends as quietly as other programs do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = READER_GONE
    sys.exit(status)


def _status() -> str | int | None:
    try:
        app()
    except SystemExit as ended:
        # Rich and Typer end with 1 where the reader has gone; here 1 is a promise not kept.
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        return ended.code
    except (ValueError, TypeError, ImportError, OSError) as error:
        typer.echo(f"swiftsure: {error}", err=True)
        return 2
    except Exception:
        traceback.print_exc()
        typer.echo(
            "swiftsure: this is a fault of swiftsure, not of yours; please report it with the"
            " lines above.",
            err=True,
        )
        return FAULT
    return 0
