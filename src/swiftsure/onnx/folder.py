"""The exported folder: ONNX files, a manifest with the checksum of each, and the policy.

stage-1.onnx, head-1.onnx, …    one stage and one head per exit
check.npz                       samples with the outputs and exits of the PyTorch model
manifest.json                   what these files are, and their checksums; written last
policy.json                     the policy, if there is one; it has a checksum of its own
runtime.json                    providers and threads; may be edited

With a key in the environment, the manifest and the policy are signed (see `Policy.save`).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from swiftsure._lib.files import (
    atomic_write,
    json_checksum,
    read_json,
    validation_message,
    write_text,
)
from swiftsure._lib.signing import proofs, refuse_unsigned
from swiftsure.certify.policy import Policy
from swiftsure.onnx.trees import Form, check_form, samples_of

__all__ = [
    "CHECK",
    "MANIFEST",
    "POLICY",
    "RUNTIME",
    "Check",
    "Manifest",
    "Part",
    "RuntimeConfig",
    "folder_policy",
    "read_manifest",
    "save_policy",
    "write_folder",
]

FORMAT, VERSION = "swiftsure-onnx", 1
MANIFEST, POLICY, CHECK, RUNTIME = "manifest.json", "policy.json", "check.npz", "runtime.json"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


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
    largest_difference: float = Field(ge=0)
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
        SHA-256 of each file of the model, and of `check.npz`.
    """

    model: str
    parts: list[Part] = Field(min_length=2)
    inputs: Annotated[Form, AfterValidator(check_form)]
    outputs: Annotated[Form, AfterValidator(check_form)]
    scored: bool
    network: str | None
    check: Check | None
    int8: bool
    flops: list[Annotated[float, Field(ge=0)]]
    files: dict[str, str]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Raise if no export writes such numbers."""
        if len(self.flops) != len(self.parts):
            raise ValueError(f"flops must be {len(self.parts)}, one for each exit")
        n_before = len(samples_of(self.inputs, 0))
        for k, part in enumerate(self.parts):
            handed_on = [-1 - place for place in part.state if place < 0]
            made = len(part.state) - len(handed_on)
            if max(handed_on, default=-1) >= n_before or (part.stage is None and made):
                raise ValueError(f"parts.{k}.state names an array that does not exist")
            n_before = len(part.state)
        return self

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

    The policy is not among these files: `Policy.load` checks it.

    Raises
    ------
    ValueError
        If the folder was not exported completely, or a file is missing or damaged; if there is a
        key in the environment and the manifest is not signed with it.
    """
    place = Path(folder)
    if not (place / MANIFEST).is_file():
        raise ValueError(
            f"`folder` must be one that `swiftsure export` wrote, but {place} has no {MANIFEST}."
        )
    content = read_json(place / MANIFEST, "an exported model", FORMAT, VERSION)
    checksum, signature = content.pop("checksum", None), content.pop("signature", None)
    if checksum != json_checksum(content):
        raise ValueError(f"{place / MANIFEST} is damaged: its checksum differs. Export again.")
    described = {key: value for key, value in content.items() if key not in ("format", "version")}
    try:
        manifest = Manifest.model_validate(described)
        _check_names(manifest)
    except ValidationError as error:
        raise ValueError(
            f"{place / MANIFEST} is not an exported model: {validation_message(error)}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{place / MANIFEST} is not an exported model: {error}.") from None
    refuse_unsigned(place / MANIFEST, content, signature)
    for name, expected in manifest.files.items() if check_files else ():
        file = place / name
        if name != POLICY and not (file.is_file() and sha256(file) == expected):
            what = "damaged: its checksum differs" if file.is_file() else "missing"
            raise ValueError(f"{file} is {what}. Export again, or copy the whole folder again.")
    return manifest


def _check_names(manifest: Manifest) -> None:
    """Raise if a file is outside the folder, or one that runs has no checksum."""
    for name in manifest.files:
        if Path(name).name != name or name == "..":
            raise ValueError(f"it names {name!r:.200}, which is not in the folder")
    for part in manifest.parts:
        for run in (part.stage, part.head):
            if run is not None and run not in manifest.files.keys() - {POLICY}:
                raise ValueError(f"it has no checksum of {run!r:.200}, which would run")


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

    Until then, an earlier manifest there does not fit the new files, so the folder is refused.
    Writing it again repairs it.
    """
    target.mkdir(parents=True, exist_ok=True)
    before: set[str] = set()
    with suppress(ValueError):  # there is none, it is damaged, or not signed
        before = set(read_manifest(target, check_files=False).files)
    parts = sorted(file for file in made.iterdir() if file.name != POLICY)
    hashes = {file.name: sha256(file) for file in parts}
    for file in parts:
        _replace(target / file.name, file)
    # After the model, so that no other model is ever found with this policy, or with the old one.
    if (made / POLICY).exists():
        _replace(target / POLICY, made / POLICY)
    else:
        (target / POLICY).unlink(missing_ok=True)
    write_text(target / RUNTIME, json.dumps(config.model_dump(), indent=2) + "\n")
    complete = manifest.model_copy(update={"files": hashes})
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, **complete.model_dump()}
    write_text(target / MANIFEST, json.dumps(content | proofs(content), indent=2) + "\n")
    for name in before - {POLICY, *hashes}:  # of an earlier export
        (target / name).unlink(missing_ok=True)
    return complete


def _replace(target: Path, source: Path) -> None:
    with atomic_write(target) as temporary:
        shutil.copyfile(source, temporary)


def folder_policy(folder: Path) -> Policy:
    """Return the policy in an exported folder; raise if it holds none."""
    if not (folder / POLICY).is_file():
        raise ValueError(
            f"`policy` must be given, since {folder} holds no {POLICY}: collect a record with"
            " `swiftsure collect`, calibrate, and pass the policy, or save it there with"
            " `swiftsure export FOLDER POLICY`."
        )
    return Policy.load(folder / POLICY)


def save_policy(folder: str | os.PathLike[str], policy: Policy) -> None:
    """Put a policy into an exported folder, which `EarlyExit.load` then uses.

    Raises
    ------
    ValueError
        If the policy was made for another model.
    """
    from swiftsure.onnx.runtime import EarlyExit

    EarlyExit.load(folder, policy)  # refuses policies of other models
    policy.save(Path(folder) / POLICY)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
