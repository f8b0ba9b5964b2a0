"""The exported folder: ONNX files, the policy, and a manifest with the checksum of each file.

stage-1.onnx, head-1.onnx, …    one stage and one head per exit
policy.json                     the policy, if there is one
check.npz                       samples with the outputs and exits of the PyTorch model
runtime.json                    providers and threads; may be edited
manifest.json                   what the files are, and their checksums; written last
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftsure._lib.files import (
    atomic_write,
    json_checksum,
    read_json,
    validation_message,
    write_text,
)
from swiftsure.certify.policy import Policy
from swiftsure.onnx.trees import Form

__all__ = [
    "CHECK",
    "MANIFEST",
    "POLICY",
    "RUNTIME",
    "Check",
    "Manifest",
    "Part",
    "RuntimeConfig",
    "read_manifest",
    "save_policy",
    "write_folder",
]

FORMAT, VERSION = "swiftsure-onnx", 1
MANIFEST, POLICY, CHECK, RUNTIME = "manifest.json", "policy.json", "check.npz", "runtime.json"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Part(_Strict):
    """One stage and its head.

    Attributes
    ----------
    stage : str, optional
        Its file; None if the stage computes nothing.
    head : str
        The file of its head.
    state : list of int
        Where each array of the state comes from: output k of the stage, or, as −1 − k, array k of
        the state before, which the stage hands on.
    """

    stage: str | None
    head: str
    state: list[int]


class Check(_Strict):
    """How the exported model was compared with the PyTorch model.

    Attributes
    ----------
    samples : int
    largest_difference : float
        Between outputs, over all samples and exits.
    near_threshold : int
        Samples with a confidence within 1e-5 of a threshold, whose exits may differ.
    """

    samples: int = Field(ge=1)
    largest_difference: float
    near_threshold: int = Field(ge=0)


class Manifest(_Strict):
    """What an exported folder holds.

    Attributes
    ----------
    model : str
        Name of the model's class.
    network : str, optional
        Fingerprint of the PyTorch network. A policy bound to it is accepted if `check` says that
        the exported model gives the same answers.
    check : Check, optional
        None if the exported stages were quantised and need records and policies of their own.
    int8 : bool
        Whether matrix products were quantised.
    flops : (n_exits,)
        Operations per sample up to each exit, in the PyTorch network.
    files : dict
        SHA-256 of each file.
    """

    model: str
    parts: list[Part] = Field(min_length=2)
    inputs: Form
    outputs: Form
    scored: bool
    network: str | None
    check: Check | None
    int8: bool
    flops: list[float]
    files: dict[str, str]

    @property
    def n_exits(self) -> int:
        """Number of exits."""
        return len(self.parts)

    def fingerprint(self, temperatures: Sequence[float] | None = None) -> str:
        """Return the hash of the exported stages, to which records and policies are bound."""
        content = {
            "parts": [part.model_dump() for part in self.parts],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "files": {
                name: each for name, each in self.files.items() if name not in (POLICY, CHECK)
            },
            "temperatures": None if temperatures is None else list(temperatures),
        }
        return json_checksum(content)


class RuntimeConfig(_Strict):
    """Settings of the machine that runs the folder; not covered by checksums.

    Attributes
    ----------
    providers : list of str
        Execution providers of ONNX Runtime, the preferred one first.
    threads : int, optional
        Threads within an operator; the number of cores by default.
    """

    providers: list[str] = Field(default_factory=lambda: ["CPUExecutionProvider"], min_length=1)
    threads: int | None = Field(default=None, ge=1)


def read_manifest(folder: str | os.PathLike[str], *, check_files: bool = True) -> Manifest:
    """Return the manifest of an exported folder, after comparing all files with their checksums.

    Raises
    ------
    ValueError
        If the folder was not exported completely, or a file is missing or damaged.
    """
    place = Path(folder)
    if not (place / MANIFEST).is_file():
        raise ValueError(
            f"`folder` must be one that `swiftsure export` wrote, but {place} has no {MANIFEST}."
        )
    content = read_json(place / MANIFEST, "an exported model", FORMAT, VERSION)
    if content.pop("checksum", None) != json_checksum(content):
        raise ValueError(f"{place / MANIFEST} is damaged: its checksum differs. Export again.")
    described = {key: value for key, value in content.items() if key not in ("format", "version")}
    try:
        manifest = Manifest.model_validate(described)
    except ValidationError as error:
        raise ValueError(
            f"{place / MANIFEST} is not an exported model: {validation_message(error)}."
        ) from None
    for name, expected in manifest.files.items() if check_files else ():
        file = place / name
        if Path(name).name != name:
            raise ValueError(f"{place / MANIFEST} names {name!r:.200}, which is not in the folder.")
        if not file.is_file() or sha256(file) != expected:
            what = "damaged: its checksum differs" if file.is_file() else "missing"
            raise ValueError(f"{file} is {what}. Export again, or copy the whole folder again.")
    return manifest


def read_runtime(folder: str | os.PathLike[str]) -> RuntimeConfig:
    """Return the runtime settings of a folder; the defaults if it has none."""
    file = Path(folder) / RUNTIME
    if not file.is_file():
        return RuntimeConfig()
    try:
        return RuntimeConfig.model_validate(read_json(file, "runtime settings"))
    except ValidationError as error:
        raise ValueError(f"{file} is not valid: {validation_message(error)}.") from None


def write_folder(made: Path, target: Path, manifest: Manifest, config: RuntimeConfig) -> Manifest:
    """Move the files in `made` to a folder, and write the manifest last.

    A folder whose writing was interrupted lacks the manifest, or has one that does not fit.
    """
    target.mkdir(parents=True, exist_ok=True)
    before: set[str] = set()
    if (target / MANIFEST).is_file():
        before = set(read_manifest(target, check_files=False).files)
    hashes = {}
    for file in sorted(made.iterdir()):
        hashes[file.name] = sha256(file)
        with atomic_write(target / file.name) as temporary:
            shutil.copyfile(file, temporary)
    write_text(target / RUNTIME, json.dumps(config.model_dump(), indent=2) + "\n")
    complete = manifest.model_copy(update={"files": hashes})
    _write_manifest(target, complete)
    for name in before - set(hashes):  # of an earlier export
        (target / name).unlink(missing_ok=True)
    return complete


def save_policy(folder: str | os.PathLike[str], policy: Policy) -> None:
    """Put a policy into an exported folder, which `EarlyExit.load` then uses.

    Raises
    ------
    ValueError
        If the policy was made for another model.
    """
    from swiftsure.onnx.runtime import EarlyExit

    place = Path(folder)
    EarlyExit.load(place, policy)  # refuses policies of other models
    policy.save(place / POLICY)
    manifest = read_manifest(place, check_files=False)
    files = {**manifest.files, POLICY: sha256(place / POLICY)}
    _write_manifest(place, manifest.model_copy(update={"files": files}))


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, **manifest.model_dump()}
    whole = {**content, "checksum": json_checksum(content)}
    write_text(folder / MANIFEST, json.dumps(whole, indent=2) + "\n")


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
