"""The application: its commands and exit statuses."""

import io
import os
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

import swiftsure
from swiftsure.cli.calibrate import calibrate
from swiftsure.cli.collect import collect
from swiftsure.cli.commands import Group, Verb
from swiftsure.cli.compare import compare
from swiftsure.cli.convert import convert
from swiftsure.cli.demo import demo
from swiftsure.cli.evaluate import evaluate
from swiftsure.cli.export import export
from swiftsure.cli.label import label
from swiftsure.cli.monitor import monitor
from swiftsure.cli.output import check_outputs, one_line, printable
from swiftsure.cli.plan import plan
from swiftsure.cli.promises import PromiseError
from swiftsure.cli.record import record
from swiftsure.cli.report import report
from swiftsure.cli.serve import serve
from swiftsure.cli.simulate import simulate
from swiftsure.cli.translate import translate

__all__ = ["app", "main"]

BROKEN_PIPE_STATUS = 141
"""The status that a shell shows for a program killed by SIGPIPE: 128 + 13."""

SOFTWARE_ERROR_STATUS = 70
"""EX_SOFTWARE of sysexits.h: an unexpected error."""

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
    record,
    label,
    calibrate,
    compare,
    evaluate,
    report,
    plan,
    export,
    serve,
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

        swiftsure calibrate record.parquet --promise 'gap zero_one <= 0.02'

    Exit status: 0 success; 1 a promise cannot be kept;
    2 bad usage or bad input; 70 a bug in swiftsure.
    """


def main() -> None:
    """Run the command line.

    Errors raised by the library print one line and end with status 2. Any other error is a bug: it
    prints a traceback and ends with status 70, because 1 means that a promise cannot be kept.
    """
    for name in ("stdout", "stderr"):  # closed by whoever started this
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that are not UTF-8
    try:
        status = _run_app()
        sys.stdout.flush()  # raises BrokenPipeError here rather than at shutdown
    except BrokenPipeError:
        # `swiftsure ... | head -1` ends quietly, as other programs do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE_STATUS
    sys.exit(status)


def _run_app() -> str | int | None:
    warnings.showwarning = _show_warning
    check_outputs()
    try:
        app()
    except SystemExit as ended:
        # Rich and Typer exit with 1 on a broken pipe; here 1 means a promise that cannot be kept.
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        return ended.code
    except PromiseError as error:
        typer.echo(f"swiftsure: {printable(str(error))}", err=True)
        return 2
    except (ValueError, TypeError, ImportError, OSError) as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        typer.echo(f"swiftsure: {one_line(text)}", err=True)
        return 2
    except (MemoryError, RecursionError) as error:
        why = one_line(str(error)) or type(error).__name__
        typer.echo(f"swiftsure: the input is too large for this machine ({why}).", err=True)
        return 2
    except Exception:
        traceback.print_exc()
        typer.echo(
            "swiftsure: this is a bug in swiftsure; please report it with the lines above.",
            err=True,
        )
        return SOFTWARE_ERROR_STATUS
    return 0


def _show_warning(message: Warning | str, *_details: Any, **_more: Any) -> None:
    """Print a warning as one line, without the place in the code that raised it."""
    typer.echo(f"swiftsure: warning: {one_line(str(message))}", err=True)
