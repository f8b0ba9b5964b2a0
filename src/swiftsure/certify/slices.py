"""Slices: promises that hold in every group of samples at once, and policies with one setting each.

The samples of a slice (a class, a language, a tenant, a device) are draws of its own distribution,
so each slice is tested on its own samples.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftsure._lib import checks
from swiftsure._lib.files import json_checksum, read_json, validation_message, write_text
from swiftsure._lib.signing import proofs, refuse_unsigned
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.policy import Metadata, Policy, PolicyEvaluation
from swiftsure.certify.promise import Promise, slice_rows
from swiftsure.curves.paths import Path
from swiftsure.curves.pilots import PilotPath

__all__ = [
    "AnyPolicy",
    "SlicedPolicy",
    "about_slice",
    "any_part",
    "joined_datasets",
    "load_policy",
    "slice_by_slice",
    "sliced_policies",
]

FORMAT: Literal["swiftsure-sliced-policy"] = "swiftsure-sliced-policy"
VERSION = 1


class SlicedPolicy(BaseModel):
    """A policy for each slice of samples, where the slice of a sample is known at run time.

    `policy["night"]` is the policy of one slice, which every runtime accepts. Slices that are not
    listed run the full model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal["swiftsure-sliced-policy"] = FORMAT
    version: int = Field(VERSION, ge=1, le=VERSION)
    policies: dict[str, Policy] = Field(min_length=1)
    delta: float = Field(gt=0, lt=1)
    """The failure probability of all promises together."""

    def __getitem__(self, name: Any) -> Policy:
        """Return the policy of one slice."""
        return self.policies[checks.choice("slice", str(name), self.policies)]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self.policies)

    def __len__(self) -> int:
        return len(self.policies)

    @property
    def in_full(self) -> tuple[str, ...]:
        """Slices that run the full model, because nothing faster was certified for them."""
        return tuple(name for name, each in self.policies.items() if each.runs_full_model)

    @property
    def runs_full_model(self) -> bool:
        """Whether the full model always runs, in every slice."""
        return len(self.in_full) == len(self.policies)

    def exits(self, confidences: ArrayLike, slices: ArrayLike) -> NDArray[np.int64]:
        """Return the exit that each sample takes, (n,).

        Parameters
        ----------
        confidences : (n, n_exits - 1)
        slices : (n,)
            The slice of each sample; those of unknown slices take the last exit.
        """
        scores = checks.numbers("confidences", confidences)
        names = np.asarray(slices).astype(str)
        checks.of_shape("slices", names, {"n": len(scores)})
        exits = np.full(len(scores), scores.shape[1])
        for name, policy in self.policies.items():
            rows = names == name
            if rows.any():
                exits[rows] = policy.exits(scores[rows])
        return exits

    def leaves(self, exit_index: int, confidence: float, slice_name: Any) -> bool:
        """Return whether a request of a slice exits here, as `Policy.leaves`."""
        policy = self.policies.get(str(slice_name))
        if policy is None:
            policy = next(iter(self.policies.values()))
            return exit_index >= (policy.n_exits or 1) - 1
        return policy.leaves(exit_index, confidence)

    def evaluate(self, record: Any) -> dict[str, PolicyEvaluation]:
        """Return risk, saving and exit shares in each slice, on a record of other samples."""
        found = {}
        for name, rows in slice_rows(record).items():
            if name in self.policies:
                found[name] = self.policies[name].evaluate(record.take(rows))
        if not found:
            raise ValueError(
                f"`record` must have samples of the slices {', '.join(self.policies)}."
            )
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policies as JSON with a checksum, signed as `Policy.save` does, atomically."""
        content = self.model_dump(mode="json")
        write_text(path, json.dumps(content | proofs(content), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SlicedPolicy":
        """Read what `save` wrote; every field is checked, and an edited file is refused."""
        content = read_json(path, "a Swiftsure policy of slices", FORMAT, VERSION)
        checksum, signature = content.pop("checksum", None), content.pop("signature", None)
        try:
            found = cls.model_validate_json(json.dumps(content), strict=True)
            if checksum != json_checksum(content):
                raise ValueError("it was changed after it was written")
            found.check()
        except ValidationError as error:
            raise ValueError(f"{path} is damaged: {validation_message(error)}.") from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}.") from None
        refuse_unsigned(path, content, signature)
        return found

    def check(self) -> None:
        """Raise if the policies cannot belong together, as those of a damaged file."""
        chances = {}
        for name, policy in self.policies.items():
            policy.check()
            certificate = policy.certificate
            if name not in (certificate.samples.slices or {}):
                raise ValueError(f"the policy of {name} must be about that slice")
            if not policy.runs_full_model:
                chances[tuple(certificate.samples.slices or {})] = certificate.delta or 1.0
        if sum(chances.values()) > self.delta * (1 + 1e-9):
            raise ValueError("delta must cover those of all slices")

    def __str__(self) -> str:
        """Return what is promised, and the sentence of each slice."""
        surety = f"{100 * (1 - self.delta):.12g} %"  # rounding must not promise more
        lines = [
            f"By slice; all of these promises hold at once with probability at least {surety}, and"
            " samples of other slices run the full model."
        ]
        lines += [f"{name}: {policy.sentence}" for name, policy in self.policies.items()]
        lines.append(
            "What voids this, and the exact terms, are those of each policy: policy[name]."
        )
        return "\n".join(lines)


AnyPolicy = Policy | SlicedPolicy


def load_policy(path: str | os.PathLike[str]) -> AnyPolicy:
    """Return the policy in a file, of whichever kind, with its checksum and signature checked."""
    try:
        sliced = json.loads(pathlib.Path(path).read_bytes())["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        sliced = False  # `Policy.load` says what is wrong
    return SlicedPolicy.load(path) if sliced else Policy.load(path)


def any_part(policy: AnyPolicy) -> Policy:
    """Return the policy, or that of one slice, for what all slices have in common."""
    return next(iter(policy.policies.values())) if isinstance(policy, SlicedPolicy) else policy


def sliced_policies(
    request: Calibration, record: Any, metadata: Metadata | Mapping[str, str] | None = None
) -> SlicedPolicy:
    """Return the policy of each slice, tested on its own samples at δ divided by their number.

    **Guarantee**: with probability at least 1 − δ over the draw of the calibration samples, the
    promises hold in every slice at once, and so in every mixture of the slices, whatever their
    shares in production. Slices with too few samples run the full model, and `in_full` names them.
    """
    if isinstance(request.path, PilotPath):
        raise ValueError(
            "`Path.learn` would learn another path in each slice: set a pilot aside with"
            " `record.split`, and give the path that `Path.pareto` learns on it to all slices."
        )
    alone, parts = slice_by_slice(request, record)
    missing, policies = request.missing, {}
    left = missing.shared() if isinstance(missing, Ask) else lambda: missing
    for name, part in parts.items():
        alone = replace(alone, missing=left())
        policies[name] = about_slice(alone.run(part, metadata=metadata), name, part.n, request)
    return SlicedPolicy(policies=policies, delta=request.delta)


def slice_by_slice(
    request: Calibration, record: Any, shares: int = 1
) -> tuple[Calibration, dict[str, Any]]:
    """Return the request that each slice runs with its share of δ, and the samples of each.

    δ has at least `shares` shares, if the record has the samples of fewer slices.
    """
    promises = tuple(
        replace(each, within=None) if isinstance(each, Promise) else each
        for each in request.promises
    )
    parts = {}
    for name, rows in slice_rows(record).items():
        part = record.take(rows)
        parts[name] = replace(part, sampling=replace(part.sampling, part=True))
    return replace(request, promises=promises, delta=request.delta / max(shares, len(parts))), parts


def about_slice(policy: Any, name: str, n: int, request: Calibration) -> Policy:
    """Return a policy whose certificate is about one slice."""
    certificate = policy.certificate
    samples = certificate.samples.model_copy(update={"slices": {name: n}})
    changed = certificate.model_copy(update={"samples": samples})
    found: Policy = policy.model_copy(update={"certificate": changed, "calibration": request})
    return found


def joined_datasets(records: Mapping[str, Any], path: Path | None = None) -> Any:
    """Return one record of several datasets, each of them a slice.

    Joining renames their samples, so a path learned on some of them no longer recognises them:
    give it as `path`, and these are refused here.

    Examples
    --------
    >>> from swiftsure.records import ExitRecord
    >>> day = ExitRecord([[0.9], [0.4]], losses={"zero_one": [[0, 0], [1, 0]]})
    >>> joined_datasets({"day": day, "night": day}).slices.tolist()
    ['day', 'day', 'night', 'night']
    """
    if not records:
        raise ValueError("`records` must hold at least one dataset.")
    if len({str(name) for name in records}) < len(records):
        raise ValueError("`records` must name its datasets differently, as text too.")
    first = next(iter(records.values()))
    named = []
    for name, record in records.items():
        if not isinstance(record, type(first)) or not hasattr(record, "slices"):
            raise TypeError("`records` must map names to records, all of one class.")
        if path is not None:
            path.refuse(record)
        ids = np.asarray([f"{name}/{each}" for each in record.ids.tolist()])
        named.append(replace(record, ids=ids, slices=np.full(record.n, str(name))))
    return type(first).concatenate(named)
