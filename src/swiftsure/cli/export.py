"""`swiftsure export`: write a model and its policy as ONNX files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import print_json, print_text
from swiftsure.cli.targets import call_target, import_from_current_folder

__all__ = ["export"]


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function that returns a staged model, or a folder that this wrote.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        Path | None,
        typer.Argument(help="Policy; without one, calibrate on the folder.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, optional("module:function that returns batches; the first is the example.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantise matrix products; needs a policy of its own.")
    ] = False,
    provider: Annotated[str, typer.Option(help="cpu, cuda, tensorrt or openvino.")] = "cpu",
    threads: Annotated[int | None, optional("Threads per operator.", default="all cores")] = None,
    triton: Annotated[
        Path | None, optional("Also write a Triton model repository to this folder.")
    ] = None,
    single_file: Annotated[
        Path | None,
        optional("Also write one ONNX file that exits by itself, for single samples."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a model as ONNX files that run without PyTorch.

    The exported model first runs the example and must take the same exits
    and give the same outputs as the PyTorch model. A folder that was
    exported without a policy, or with --int8, gets one later: collect a
    record from it, calibrate, and export the folder with the policy.

    [bold]Examples[/bold]

        swiftsure export nets:build policy.json --data sets:few -o exported/

        swiftsure export exported/ policy.json --single-file model.onnx
    """
    from swiftsure.certify.policy import Policy
    from swiftsure.onnx import save_policy
    from swiftsure.onnx.folder import read_manifest

    chosen = None if policy is None else Policy.load(policy)
    if Path(model).is_dir():
        if output not in (None, Path(model)) or data is not None or int8:
            raise ValueError(
                "An exported folder takes a policy, --triton and --single-file, and nothing else."
            )
        target = Path(model)
        if chosen is not None:
            save_policy(target, chosen)
    else:
        if output is None or data is None:
            raise ValueError("`--output` and `--data` must be given to export a model.")
        target = output
        _export(model, chosen, target, data, int8, provider, threads)
    manifest = read_manifest(target, check_files=False)
    if triton is not None:
        from swiftsure.onnx.triton import write_repository

        write_repository(target, triton)
    if single_file is not None:
        from swiftsure.onnx import write_single_file

        write_single_file(target, single_file)
    if json:
        print_json({"folder": str(target), **manifest.model_dump(include={"check", "int8"})})
        return
    print_text(_said(manifest))
    print_text(f"Wrote {' and '.join(str(each) for each in (target, triton, single_file) if each)}")


def _export(
    model: str,
    policy: Any,
    output: Path,
    data: str,
    int8: bool,
    provider: str,
    threads: int | None,
) -> None:
    from swiftsure.onnx import export as run
    from swiftsure.torch.batches import Batch

    with import_from_current_folder():
        network = call_target("MODEL", model)
        first = next(iter(call_target("--data", data)), None)
        if first is None:
            raise ValueError("`--data` must give at least one batch, but gave none.")
        run(
            network,
            policy,
            output,
            example=Batch.of(first).inputs,
            int8=int8,
            providers=[provider],
            threads=threads,
        )


def _said(manifest: Any) -> str:
    """Return in a sentence how the export was checked."""
    if manifest.check is None:
        return (
            f"{manifest.model} with {manifest.n_exits} exits, quantised to int8. It is another"
            " model than the PyTorch one: collect a record from the folder and calibrate on it."
        )
    return (
        f"{manifest.model} with {manifest.n_exits} exits. On {manifest.check.samples} samples its"
        " outputs differ from PyTorch's by at most"
        f" {manifest.check.largest_difference:.2g}, and its exits not at all."
    )
