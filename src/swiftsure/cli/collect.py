"""`swiftsure collect`: run a model on data and write a record."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, number, print_json, print_table, print_text

__all__ = ["collect"]


def collect(
    model: Annotated[str, optional("module:function that returns a staged model.")],
    data: Annotated[str, optional("module:function that returns batches.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Record to write.")] = Path(
        "record.parquet"
    ),
    losses: Annotated[str, typer.Option(help="Losses, comma-separated.")] = "zero_one,brier",
    scores: Annotated[str, typer.Option(help="Scores, comma-separated.")] = "top1",
    dtype: Annotated[str | None, optional("float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, optional("Device, such as cuda.", default="the model's")] = None,
    seconds: Annotated[bool, typer.Option(help="Also measure the time to each exit.")] = False,
    shards: Annotated[Path | None, optional("Folder for shards, to resume a killed run.")] = None,
    shard_size: Annotated[
        int, typer.Option(help="Samples per shard; a shard is also written every minute.")
    ] = 1_000,
    durable: Annotated[
        bool, typer.Option(help="Wait until each shard is on disk, to survive power failures.")
    ] = True,
    json: options.Json = False,
) -> None:
    """Run a model on data and record every exit's losses and costs.

    The two functions take no arguments and may be in the current folder.
    The first returns a staged model in evaluation mode, the second an
    iterable of (inputs, labels).

    [bold]Example[/bold]

        swiftsure collect --model nets:build --data sets:calibration
    """
    try:
        from swiftsure.torch import collect as run
        from swiftsure.torch.collecting import InterruptedCollectionError
    except ImportError as error:
        raise ValueError(str(error)) from None

    check_outputs(output)  # fail before hours of collecting
    try:
        with _import_from_current_folder():
            record = run(
                _to_device(_call_target("--model", model), device),
                _call_target("--data", data),
                losses=[name.strip() for name in losses.split(",")],
                scores=[name.strip() for name in scores.split(",")],
                dtype=dtype,
                device=device,
                seconds=seconds,
                shards=shards,
                shard_size=shard_size,
                durable=durable,
                progress=False if json else None,
            )
    except InterruptedCollectionError as error:
        remedy = (
            "with --shards they would be kept"
            if shards is None
            else f"{error.n_saved:,} of them are kept in {shards}, where the same command resumes"
        )
        raise ValueError(
            f"Collecting stopped after {error.record.n:,} samples"
            f" ({_one_line(error.__cause__)}); {remedy}."
        ) from None
    except (ValueError, TypeError, ImportError, OSError):
        raise  # their messages are clear already
    except Exception as error:  # raised by the user's model or data, not a bug here
        raise ValueError(
            f"Collecting stopped before anything was collected ({_one_line(error)})."
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
def _import_from_current_folder() -> Iterator[None]:
    """Allow imports from the current folder, also while batches are made."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _call_target(option: str, target: str) -> Any:
    """Call the function named by module:function and return its result."""
    module, _, name = target.partition(":")
    if not (module and name):
        raise ValueError(f"`{option}` must be module:function, but got {target!r}.")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"`{option}`: cannot import {module!r} ({_one_line(error)}).") from error
    if not hasattr(found, name):
        raise ValueError(f"`{option}`: {module!r} has no function {name!r}.")
    function = getattr(found, name)
    if not callable(function):
        raise ValueError(
            f"`{option}` must name a function, but {target!r} is of type {type(function).__name__}."
        )
    return function()


def _to_device(model: Any, device: str | None) -> Any:
    if device is None or not hasattr(model, "to"):
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # PyTorch raises either for a missing device
        raise ValueError(f"`--device`: {device!r} cannot be used ({_one_line(error)}).") from None


def _one_line(error: BaseException | None) -> str:
    first = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
