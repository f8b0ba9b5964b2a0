"""`swiftsure collect`: run a model on data and write a record."""

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, number, print_json, print_table, print_text
from swiftsure.cli.targets import call_target, import_from_current_folder, one_line_of

__all__ = ["collect"]


def collect(
    data: Annotated[str, optional("module:function that returns batches.")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder that `swiftsure export` wrote, in place of --model.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, optional("module:function that returns a staged model.")] = None,
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
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    workers: Annotated[int | None, optional("Ray actors.", default="the cluster's CPUs")] = None,
    batch_size: Annotated[
        int | None, optional("Rows of a Ray Dataset that run at once.", default="64")
    ] = None,
    json: options.Json = False,
) -> None:
    """Run a model on data and record every exit's losses and costs.

    The two functions take no arguments and may be in the current folder.
    The first returns a staged model in evaluation mode, the second an
    iterable of (inputs, labels), or a Ray Dataset. An exported folder runs
    in ONNX Runtime.

    [bold]Examples[/bold]

        swiftsure collect --model nets:build --data sets:calibration

        swiftsure collect exported/ --data sets:calibration
    """
    if folder is not None and engine != "local":
        raise ValueError("`--engine ray` is for PyTorch models, not for exported folders.")
    if (folder is None) == (model is None):
        raise ValueError("Pass either a folder that `swiftsure export` wrote, or --model.")
    try:
        from swiftsure.run import RunOptions
        from swiftsure.torch import collect as run
        from swiftsure.torch.collecting import InterruptedCollectionError
    except ImportError as error:
        raise ValueError(str(error)) from None

    check_outputs(output)  # fail before hours of collecting
    try:
        with import_from_current_folder():
            record = run(
                _exported(folder, device)
                if model is None
                else _to_device(call_target("--model", model), device),
                call_target("--data", data),
                losses=[name.strip() for name in losses.split(",")],
                scores=[name.strip() for name in scores.split(",")],
                dtype=dtype,
                device=None if model is None else device,
                seconds=seconds,
                batch_size=batch_size,
                run=RunOptions(
                    shards=shards,
                    shard_size=shard_size,
                    durable=durable,
                    engine=engine,  # type: ignore[arg-type]
                    workers=workers,
                    progress=False if json else None,
                ),
            )
    except InterruptedCollectionError as error:
        remedy = (
            "with --shards they would be kept"
            if shards is None
            else f"{error.n_saved:,} of them are kept in {shards}, where the same command resumes"
        )
        raise ValueError(
            f"Collecting stopped after {error.record.n:,} samples"
            f" ({one_line_of(error.__cause__)}); {remedy}."
        ) from None
    except (ValueError, TypeError, ImportError, OSError):
        raise  # their messages are clear already
    except Exception as error:  # raised by the user's model or data, not a bug here
        raise ValueError(
            f"Collecting stopped before anything was collected ({one_line_of(error)})."
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


def _exported(folder: Path | None, device: str | None) -> Any:
    """Return an exported folder as a staged model; its device is the execution provider."""
    from swiftsure.onnx import Stages
    from swiftsure.onnx.collecting import StagedFolder

    return StagedFolder(Stages.load(str(folder), providers=device))


def _to_device(model: Any, device: str | None) -> Any:
    if device is None or not hasattr(model, "to"):
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # PyTorch raises either for a missing device
        raise ValueError(f"`--device`: {device!r} cannot be used ({one_line_of(error)}).") from None
