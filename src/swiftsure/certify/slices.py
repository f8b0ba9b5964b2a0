"""Slices: promises that hold in every group of samples at once, and policies with one setting each.

The samples of a slice (a class, a language, a tenant, a device) are draws of its own distribution,
so each slice is tested on its own samples.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftsure._lib import checks
from swiftsure._lib.files import json_checksum, read_json, validation_message, write_text
from swiftsure._lib.signing import proofs, refuse_unsigned
from swiftsure.certify.bounds import minimum_samples
from swiftsure.certify.calibration import calibrate
from swiftsure.certify.certificate import make_policy
from swiftsure.certify.control import Control, ControlResult
from swiftsure.certify.policy import Certificate, Policy
from swiftsure.curves.paths import BREAKPOINTS, Path, PathLike
from swiftsure.losses import LossRange
from swiftsure.records import ExitRecord, ThresholdRecord

__all__ = ["SlicedPolicy", "calibrate_slices"]

FORMAT: Literal["swiftsure-sliced-policy"] = "swiftsure-sliced-policy"
VERSION = 1

DRAWS_OF_SLICES = (
    "calibration and production samples of each slice are independent draws of the slice's own"
    " distribution"
)
"""What slices assume in place of one distribution: their shares may change."""


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
    together: bool
    """Whether all promises hold at once with probability 1 − δ, or each one alone."""

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
            if certificate.slices is None or name not in certificate.slices:
                raise ValueError(f"the policy of {name} must be about that slice")
            if not policy.runs_full_model:
                chances[tuple(certificate.slices)] = certificate.delta or 1.0
        wrong = sum(chances.values()) if self.together else max(chances.values(), default=0.0)
        if wrong > self.delta * (1 + 1e-9):
            raise ValueError("delta must cover those of all slices")

    def __str__(self) -> str:
        """Return what is promised, and the sentence of each slice."""
        surety = f"{100 * (1 - self.delta):.12g} %"  # rounding must not promise more
        promise = f"all of these promises hold at once with probability at least {surety}"
        if not self.together:
            promise = f"each of these promises alone holds with probability at least {surety}"
        lines = [f"By slice; {promise}, and samples of other slices run the full model."]
        lines += [f"{name}: {policy}" for name, policy in self.policies.items()]
        return "\n".join(lines)


def calibrate_slices(
    record: ExitRecord | ThresholdRecord | Mapping[str, Any],
    *,
    slices: ArrayLike | None = None,
    own: bool = False,
    together: bool = True,
    delta: float = 0.1,
    **options: Any,
) -> SlicedPolicy:
    """Find the fastest settings whose risk is at most ε in every slice.

    **Guarantee**: with probability at least 1 − δ over the draw of the calibration samples, the
    risk is at most ε in every slice at once, and so in every mixture of the slices, whatever their
    shares in production. With `own=True` and `together=False`, the risk in each slice alone is at
    most ε with probability at least 1 − δ.

    Parameters
    ----------
    record : ExitRecord or ThresholdRecord, or a mapping of names to records
        The calibration samples. A mapping holds several datasets, each of them a slice. (To pool
        datasets instead, use `concatenate` and `calibrate`.)
    slices : (n,), optional
        The slice of each sample (class, language, tenant, device); by default the record's own.
    own : bool
        Choose a setting for each slice, instead of one for all. The slice of a sample must then be
        known at run time.
    together : bool
        With `own`: whether all promises hold at once (each slice is tested at δ divided by the
        number of slices), or each one alone.
    delta, **options
        As in `calibrate`.

    Returns
    -------
    policy : SlicedPolicy
        One setting for all slices, or one for each. Slices with too few samples to certify
        anything, even if all their losses were 0, run the full model, and `in_full` names them.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> day, night = Population().sample(600, seed=0), Population().sample(300, seed=1)
    >>> records = {
    ...     "day": ExitRecord.from_logits(day.logits, day.labels),
    ...     "night": ExitRecord.from_logits(night.logits, night.labels),
    ... }
    >>> policy = calibrate_slices(records, loss="zero_one", epsilon=0.05)
    >>> policy["day"].threshold == policy["night"].threshold
    True
    """
    if isinstance(record, Mapping):
        if slices is not None:
            raise ValueError("`slices` are the datasets themselves here; leave them out.")
        return calibrate_slices(
            joined_datasets(record, options.get("path")),
            own=own,
            together=together,
            delta=delta,
            **options,
        )
    _refuse_options(options, own, together)
    checks.failure_probability(delta)
    rows = slice_rows(record, slices)
    chance = delta / len(rows) if own and together else delta
    alone = {
        name: calibrate(record.take(each), delta=chance, **options) for name, each in rows.items()
    }
    sizes = {name: len(each) for name, each in rows.items()}
    if own:
        policies = {name: _about(policy, {name: sizes[name]}) for name, policy in alone.items()}
        return SlicedPolicy(policies=policies, delta=delta, together=together)
    first = next(iter(alone.values())).certificate
    if first.path == BREAKPOINTS:
        raise ValueError("`path` must be fixed beforehand for one setting in all slices.")
    if any(promise.selective for promise in first.promises):
        raise ValueError("`risk` of the samples that exit needs `own=True`.")
    large = [name for name, policy in alone.items() if not _too_small(policy.certificate)]
    if not large:
        raise ValueError(
            f"`slices` must have more samples: none of {', '.join(rows)} has enough to certify"
            " anything, even if all losses were 0."
        )
    safest = min((alone[name] for name in large), key=lambda each: each.certificate.index or 0)
    pooled = record.take(np.concatenate([rows[name] for name in large]))
    # The promise rests on the tests of all these slices, so on the conditions of each.
    rests = dict.fromkeys(
        text for name in large for text in alone[name].certificate.assumptions[1:]
    )
    safest = _about(safest, {name: sizes[name] for name in large}, (DRAWS_OF_SLICES, *rests))
    shared = _at(safest, pooled, options)
    policies = {
        name: shared if name in large else _in_full(alone[name], {name: sizes[name]}, record)
        for name in rows
    }
    return SlicedPolicy(policies=policies, delta=delta, together=True)


def _refuse_options(options: Mapping[str, Any], own: bool, together: bool) -> None:
    """Raise for what does not go with slices."""
    if not together and not own:
        raise ValueError(
            "`together=False` needs `own=True`: one setting for all slices keeps all promises at"
            " once."
        )
    for name in ("pool", "labeller", "max_costs", "weights", "average", "max_group_size"):
        if options.get(name) is not None:
            raise ValueError(f"`{name}` does not go with slices.")
    if options.get("split") is not None:  # each slice would learn another path
        raise ValueError(
            "`split` does not go with slices: set a pilot aside with `record.split`, and give the"
            " path that `Path.pareto` learns on it to all slices."
        )
    if getattr(options.get("path"), "branches", None) is not None and not own:
        raise ValueError(
            "`path` with branches has no safest setting for all slices: calibrate with `own=True`."
        )
    if options.get("control", "ucb") not in ("ucb", "ltt") or "correction" in options:
        raise ValueError("`control` must be ucb, or ltt in fixed sequence, with slices.")


def _about(
    policy: Policy,
    slices: Mapping[str, int],
    assumptions: tuple[str, ...] | None = None,
    **changes: Any,
) -> Policy:
    """Return a policy whose certificate is about these slices."""
    if assumptions is None:
        assumptions = (DRAWS_OF_SLICES, *policy.certificate.assumptions[1:])
    changes = {"slices": dict(slices), "assumptions": assumptions} | changes
    return policy.model_copy(update={"certificate": policy.certificate.model_copy(update=changes)})


def _in_full(
    policy: Policy, slices: Mapping[str, int], record: ExitRecord | ThresholdRecord
) -> Policy:
    """Return the policy of a slice that is too small: it runs the full model."""
    full: dict[str, Any] = {"index": None, "not_worth": False, "dearer_costs": {}}
    certificate = policy.certificate
    costs = {name: (full_cost, full_cost) for name, (full_cost, _) in certificate.costs.items()}
    shares = certificate.exit_shares and (*[0.0] * (len(certificate.exit_shares) - 1), 1.0)
    named = _about(policy, slices, costs=costs, exit_shares=shares, **full)
    safe = record.setting(0) if isinstance(record, ThresholdRecord) else {"threshold": None}
    settings = dict(policy.settings) | safe
    return named.model_copy(update={"threshold": None, "settings": settings})


def _at(
    policy: Policy,
    record: ExitRecord | ThresholdRecord,
    options: Mapping[str, Any],
) -> Policy:
    """Return the policy with its setting, but with the risks and costs of a larger record."""
    certificate = policy.certificate
    exits = {name: options[name] for name in ("missing",) if name in options}
    if isinstance(record, ExitRecord):
        exits |= {"strict": policy.strict, "min_exit": policy.min_exit, "score": policy.score}
    curves, results = [], []
    for promise in certificate.promises:
        curve = record.curve(promise.risk, promise.loss, path=options.get("path"), **exits)
        curve = curve.transformed(promise.above, promise.worst)
        curves.append(curve)
        results.append(
            ControlResult(
                index=certificate.index,
                threshold=policy.threshold,
                guarantee="probability",
                epsilon=promise.epsilon,
                delta=certificate.delta,
                control=certificate.control,
                bound=promise.bound,
                n=curve.n,
                seed=certificate.seed,
                seed_drawn=certificate.seed_drawn,
                assumptions=certificate.assumptions,
            )
        )
    return make_policy(
        record,
        Control(certificate.control, **certificate.options),
        curves,
        results,
        results[0],
        score=policy.score,
        slices=certificate.slices,
        cost=options.get("cost"),
        metadata=policy.metadata,
    )


def _too_small(certificate: Certificate) -> bool:
    """Return whether a slice has too few samples to certify anything even if all losses are 0.

    It depends on the number of samples alone, never on their losses.
    """
    needed = (
        minimum_samples(each.epsilon, certificate.delta or 1.0, LossRange(0, each.loss_range[1]))
        for each in certificate.promises
    )
    return certificate.n < max(n or 0 for n in needed)


def slice_rows(
    record: ExitRecord | ThresholdRecord, slices: ArrayLike | None
) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each slice by name; None means the record's own slices."""
    if record.groups is not None:
        raise ValueError("`slices` do not go with groups of dependent samples.")
    labels = record.slices if slices is None else np.asarray(slices)
    if labels is None:
        raise ValueError("`slices` must be given: this record has none.")
    checks.of_shape("slices", labels, {"n": record.n})
    names, codes = np.unique(labels.astype(str), return_inverse=True)
    return {str(name): np.flatnonzero(codes == k) for k, name in enumerate(names)}


def joined_datasets(records: Mapping[str, Any], path: PathLike = None) -> Any:
    """Return one record of several datasets, each of them a slice.

    Joining renames their samples, so datasets with samples of a path's pilot are refused here.
    """
    if not records:
        raise ValueError("`record` must hold at least one dataset.")
    if len({str(name) for name in records}) < len(records):
        raise ValueError("`record` must name its datasets differently, as text too.")
    first = next(iter(records.values()))
    named = []
    for name, record in records.items():
        if not isinstance(record, type(first)) or not hasattr(record, "slices"):
            raise TypeError("`record` must map names to records, all of one class.")
        if isinstance(path, Path):
            path.refuse(record)
        ids = np.asarray([f"{name}/{each}" for each in record.ids.tolist()])
        named.append(replace(record, ids=ids, slices=np.full(record.n, str(name))))
    return type(first).concatenate(named)
