"""`swiftsure collect`: from a model and data to a record."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.output import number, print_json, print_table, print_text

__all__ = ["collect"]


def collect(
    model: Annotated[
        str, typer.Option(help="module:function that returns a staged model.", show_default=False)
    ],
    data: Annotated[
        str, typer.Option(help="module:function that returns batches.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Record to write.")] = Path(
        "record.parquet"
    ),
    losses: Annotated[str, typer.Option(help="Losses, with commas.")] = "zero_one,brier",
    scores: Annotated[str, typer.Option(help="Scores, with commas.")] = "top1",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cuda.", show_default="the model's")
    ] = None,
    seconds: Annotated[bool, typer.Option(help="Also measure the time to each exit.")] = False,
    shards: Annotated[
        Path | None,
        typer.Option(help="Folder for pieces, to resume a killed run from.", show_default=False),
    ] = None,
    json: options.Json = False,
) -> None:
    """Run a model on data and record what happens at every exit.

    The two functions take no arguments and are looked up in the current
    folder too. The first returns a staged model in evaluation mode, the
    second an iterable of (inputs, labels).

    [bold]Example[/bold]

        swiftsure collect --model nets:build --data sets:calibration
    """
    from swiftsure.files import writable

    try:
        from swiftsure.torch import collect as run
        from swiftsure.torch.collecting import InterruptedCollectionError
    except ImportError as error:
        raise ValueError(str(error)) from None

    writable(output)  # rather now than after hours of collecting
    try:
        with _current_folder():
            record = run(
                _moved(_called("--model", model), device),
                _called("--data", data),
                losses=[name.strip() for name in losses.split(",")],
                scores=[name.strip() for name in scores.split(",")],
                dtype=dtype,
                device=device,
                seconds=seconds,
                shards=shards,
                progress=False if json else None,
            )
    except InterruptedCollectionError as error:
        remedy = (
            "with --shards they would be kept"
            if shards is None
            else f"they are kept in {shards}, from where the same command goes on"
        )
        raise ValueError(
            f"Collecting broke off after {error.record.n:,} samples"
            f" ({_in_one_line(error.__cause__)}); {remedy}."
        ) from None
    except (ValueError, TypeError, ImportError, OSError):
        raise  # these say what is wrong
    except Exception as error:  # of the model or the data, which are not the library's
        raise ValueError(
            f"Collecting broke off before anything was collected ({_in_one_line(error)})."
        ) from error
    record.save(output)
    exits = [
        {
            "exit": k + 1,
            **{f"mean {name}": float(v[:, k].mean()) for name, v in record.losses.items()},
            **{f"{name}": float(v[k]) for name, v in record.costs.items() if name != "exit"},
        }
        for k in range(record.n_exits)
    ]
    if json:
        print_json({"samples": record.n, "exits": exits, "file": str(output)})
        return
    print_table(
        f"{record.n:,} samples",
        list(exits[0]),
        [[number(float(value)) for value in row.values()] for row in exits],
    )
    print_text(f"Wrote {output}")


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules be imported from the current folder, also while batches are made."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _called(option: str, target: str) -> Any:
    """Return what the function named by module:function returns."""
    module, _, name = target.partition(":")
    if not (module and name):
        raise ValueError(f"`{option}` must be module:function, but got {target!r}.")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"`{option}`: cannot import {module!r} ({_in_one_line(error)})."
        ) from error
    if not hasattr(found, name):
        raise ValueError(f"`{option}`: {module!r} has no function {name!r}.")
    function = getattr(found, name)
    if not callable(function):
        raise ValueError(
            f"`{option}` must name a function, but {target!r} is of type {type(function).__name__}."
        )
    return function()


def _moved(model: Any, device: str | None) -> Any:
    if device is None or not hasattr(model, "to"):
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # both are PyTorch's ways to say "no such"
        raise ValueError(f"`--device`: {device!r} is of no use ({_in_one_line(error)}).") from None


def _in_one_line(error: BaseException | None) -> str:
    first = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
