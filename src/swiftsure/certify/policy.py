"""Policies: a threshold with its certificate, in one JSON file and one plain sentence."""

import json
import math
import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from swiftsure._lib import checks
from swiftsure._lib.files import json_checksum, read_json, validation_message, write_text
from swiftsure._lib.html import html_card
from swiftsure._lib.signing import proofs, refuse_unsigned
from swiftsure._version import __version__
from swiftsure.certify import wording
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.certificate import Certificate, Name, PromiseResult
from swiftsure.certify.tracking import log_to_mlflow
from swiftsure.curves import paths
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.dials import setting_key
from swiftsure.curves.paths import GIVEN_SETTINGS
from swiftsure.curves.pilots import without_pilots
from swiftsure.curves.risks import RISKS
from swiftsure.exits import ExitRule, exit_indices, threshold_array
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.records.checks import (
    COLDEST,
    DTYPES,
    HOTTEST,
    confidence_array,
)
from swiftsure.scores import LearnedScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Metadata", "Policy", "PolicyEvaluation"]

VERSION = 1
"""Version of the policy file; newer versions are refused."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _require(possible: bool, otherwise: str) -> None:
    if not possible:
        raise ValueError(otherwise)


Request = Annotated[
    Calibration,
    PlainValidator(
        lambda value: value if isinstance(value, Calibration) else Calibration.from_json(value)
    ),
    PlainSerializer(lambda value: value.to_json()),
]
"""A Calibration, as JSON in files."""


class Metadata(_Frozen):
    """Who made a policy, when, and with which version of the library."""

    name: str | None = None
    author: str | None = None
    notes: str | None = None
    date: str = Field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    swiftsure: str = __version__
    """Version of the library."""


class PolicyEvaluation(NamedTuple):
    """Risk and saving of a policy on samples other than the calibration samples.

    Attributes
    ----------
    risk : float
        Risk of the policy's first promise, as it is promised: a mean over samples or groups, a
        weighted mean, a tail, or the largest of the risks of the promise's slices.
    risks : tuple of float
        The same for each promise.
    saving : float
        Fraction of the full model's cost that is saved, negative if more is needed: FLOPs if the
        record has them; else the price of a cascade, against its last model alone (the first of
        `full_costs` besides FLOPs and seconds); else the record's first cost, seconds after others,
        or the exit number if it has no other. The library means this cost wherever none is named.
    savings : dict
        The same for every cost in the record.
    exit_shares : (n_exits,) or None
        Fraction of the samples that take each exit; None for systems without exits.
    n : int
    """

    risk: float
    risks: tuple[float, ...]
    saving: float
    savings: dict[str, float]
    exit_shares: NDArray[np.float64] | None
    n: int


class Policy(_Frozen):
    """A threshold, with a certificate of what it guarantees.

    `threshold=None` means that the full model always runs. `str(policy)` states the promise in one
    sentence; `policy.certificate` holds the numbers.
    """

    format: Literal["swiftsure-policy"] = "swiftsure-policy"
    version: int = Field(VERSION, ge=1, le=VERSION)
    threshold: float | tuple[float | None, ...] | None
    """One for all exits, or one per exit; None if the full model always runs.

    For several dials, the number of their setting in the record; its values are in `settings`.
    """
    score: Name | None
    n_exits: int | None = Field(ge=1, le=10_000)
    strict: bool = False
    min_exit: int = Field(0, ge=0, le=10_000)
    temperatures: tuple[Annotated[float, Field(ge=COLDEST, le=HOTTEST)], ...] | None = None
    dtype: Name | None = None
    settings: dict[str, Any]
    """Every dial by name; at its safe end if nothing was certified."""
    dials: tuple[Name, ...] | None = None
    """Names of the dials that were certified together, if there are several."""
    certificate: Certificate
    calibration: Request | None = None
    """The request that made the policy; with the level found, if a compute budget chose it."""
    metadata: Metadata = Field(default_factory=Metadata)

    def check(self, edited: bool = False) -> None:
        """Raise if the fields cannot belong together, as those of a damaged file."""
        certificate, n_exits, threshold = self.certificate, self.n_exits, self.threshold
        certificate.check(edited)
        _require(
            threshold is None or certificate.index is not None or certificate.guarantee == "none",
            "threshold must be null where no setting was certified",
        )
        _require(
            threshold is None or not certificate.costs.not_worth,
            "threshold must be null if the full model costs less",
        )
        for dial in self.dials or ():
            _require(dial in self.settings, f"settings must hold the dial {dial}")
        _require(self.dials is None or n_exits is None, "dials must be null for exits")
        _require(
            self.dtype is None or self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}"
        )
        if n_exits is None:
            _require(not isinstance(threshold, tuple), "threshold must be one number without exits")
        else:
            _require(
                not isinstance(threshold, tuple) or len(threshold) == n_exits - 1,
                "threshold must be one per exit but the last",
            )
            _require(
                self.settings == self.settings | self._exit_settings(),
                "settings must hold the threshold",
            )
            _require(self.min_exit < n_exits, "min_exit must be an exit")
            _require(bool(self.score), "score must be named")
            asked = None if self.calibration is None else self.calibration.rule
            _require(
                asked is None or not asked.is_learned or asked.score_name == self.score,
                "score must be the learned score of the calibration",
            )
            low, high = (0.0, 1.0) if certificate.path in paths.WITHIN_SCORES else (-3e38, 3e38)
            values = threshold if isinstance(threshold, tuple) else (threshold,)
            _require(
                all(each is None or low <= each <= high for each in values),
                f"threshold must lie in [{low:g}, {high:g}]",
            )
            for promise in certificate.promises:
                _require(promise.risk in RISKS, f"risk must be one of {', '.join(RISKS)}")
            shares = certificate.costs.exit_shares
            _require(shares is None or len(shares) == n_exits, "exit_shares must be one per exit")
            _require(
                not any((shares or ())[: self.min_exit]), "exit_shares must be 0 before min_exit"
            )
        _require(
            self.temperatures is None or len(self.temperatures) == n_exits,
            "temperatures must be one per exit",
        )

    def _exit_settings(self) -> dict[str, Any]:
        """Return the settings of a policy for exits, as JSON holds them."""
        several = isinstance(self.threshold, tuple)
        return {"threshold": list(self.threshold) if several else self.threshold}  # type: ignore[arg-type]

    @property
    def runs_full_model(self) -> bool:
        """Whether the full model always runs, because nothing faster was certified."""
        return self.threshold is None

    @property
    def thresholds(self) -> NDArray[np.float32] | None:
        """One threshold per exit except the last, infinity for never; None without exits."""
        if self.n_exits is None:
            return None
        values = threshold_array(self.threshold if self.threshold is not None else np.inf)
        return np.broadcast_to(values, (self.n_exits - 1,)).copy()

    @property
    def rule(self) -> ExitRule:
        """When samples exit under this policy: score, threshold, strict and min_exit."""
        return ExitRule(self._own_score, self.threshold, self.strict, self.min_exit)

    @property
    def _own_score(self) -> str | LearnedScore | None:
        """The score by name, or the learned score that the request holds."""
        asked = None if self.calibration is None else self.calibration.rule
        if asked is None or not asked.is_learned or asked.score_name != self.score:
            return self.score
        return asked.score

    def _exit_thresholds(self) -> NDArray[np.float32]:
        if self.thresholds is None:
            raise ValueError("This policy sets a threshold of a whole run, not of exits.")
        return self.thresholds

    def exits(self, confidences: ArrayLike) -> NDArray[np.int64]:
        """Return the exit that each sample takes under this policy.

        Parameters
        ----------
        confidences : (n, n_exits - 1)
        """
        thresholds = self._exit_thresholds()
        scores = checks.numbers("confidences", confidences)
        n_early = len(thresholds)
        if scores.ndim != 2 or scores.shape[1] != n_early:
            raise ValueError(
                f"`confidences` must have shape (n, {n_early}), one column per exit except the"
                f" last, but got {checks.shape_text(scores.shape)}."
            )
        scores = confidence_array("confidences", scores, None)
        return exit_indices(scores, thresholds, strict=self.strict, min_exit=self.min_exit)

    def leaves(self, exit_index: int, confidence: float) -> bool:
        """Return whether a request with this confidence exits here; `exit_index` starts at 0.

        This is the same rule as `exits`, for code that runs one request at a time: call it at each
        exit, and stop at the first True. At the last exit it is always True.
        """
        thresholds = self._exit_thresholds()
        checks.count("exit_index", exit_index, 0)
        if exit_index >= len(thresholds):
            return True
        one = confidence_array("confidence", [[confidence]], None)
        allowed = exit_index >= self.min_exit
        return bool(
            allowed and exit_indices(one, thresholds[exit_index], strict=self.strict)[0] == 0
        )

    def log_to_mlflow(self, *, prefix: str = "", artifact: str = "policy.json") -> str:
        """Log the policy to the active MLflow run, or to a new one; return the id of the run.

        What was fixed and chosen becomes parameters; risks, upper bounds, costs and savings become
        metrics; the promise in words and the fingerprints of model and data become tags; and the
        policy's file becomes an artifact, which `Policy.load` reads.

        Parameters
        ----------
        prefix : str
            Put before every name, if a run logs several policies.
        artifact : str
            Name of the policy's file among the artifacts of the run.

        Raises
        ------
        ImportError
            If MLflow is missing; the error gives the command that installs its client.
        """
        return log_to_mlflow(self, prefix=prefix, artifact=artifact)

    def evaluate(self, record: ExitRecord | ThresholdRecord | ShardedRecord) -> PolicyEvaluation:
        """Return risk, saving and exit shares of this policy on a record of other samples.

        These are estimates, not a guarantee, of what is promised: score, exit rule, averaging,
        slices and transformed losses are the policy's own. Of a promise about slices, only samples
        of these slices count, and the risk is that of the worst slice.

        If the promise is about weighted samples, the record must say its weights
        (`record.weighted`); samples drawn in production have the weight 1.

        Examples
        --------
        >>> import swiftsure as ss
        >>> sample = ss.simulate.Population().sample(3000, seed=0)
        >>> record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
        >>> calibration, rest = record.split(1000, seed=0)
        >>> policy = ss.calibrate(calibration, loss="zero_one", epsilon=0.05)
        >>> policy.evaluate(rest).risk < 0.08
        True
        """
        if isinstance(self.rule.score, LearnedScore):
            record = self.rule.score.left_out(record)
        record = without_pilots(record)
        record = self._counted(record)
        promises = self.certificate.promises
        curve = self._curve(record, promises[0])
        index = self._index(curve, record)
        alone = self._alone(record)
        risks = tuple(
            max(self._curve(each, promise).risk_at(index) for each in alone) for promise in promises
        )
        savings = {}
        for name in curve.costs:
            full = curve.full_cost(name)
            here = full if self.runs_full_model else float(curve.mean_cost(name)[index])
            savings[name] = 1 - here / full if full else 0.0
        first = curve.default_cost()
        return PolicyEvaluation(
            risk=risks[0],
            risks=risks,
            saving=savings[first] if first is not None else math.nan,
            savings=savings,
            exit_shares=curve.exit_shares()[index] if curve.has_exits else None,
            n=curve.n,
        )

    def _counted(self, record: Any) -> Any:
        """Return the samples that the promise is about, grouped as it counts them."""
        certificate = self.certificate
        slices = certificate.samples.slices
        if slices is not None:
            labels = getattr(record, "slices", None)
            if labels is None:
                raise ValueError(
                    f"`record` must hold the slice of each sample, because the promise is about"
                    f" {wording.slice_names(slices)}: record.sliced(...)."
                )
            inside = np.isin(labels.astype(str), list(slices))
            if not inside.any():
                raise ValueError(f"`record` must hold samples of {wording.slice_names(slices)}.")
            record = record if inside.all() else record.take(np.flatnonzero(inside))
            # In a slice the mean weight need not be 1.
            record = replace(record, sampling=replace(record.sampling, part=True))
        weighted = record.sampling.weights is not None
        if weighted != (certificate.samples.max_weight is not None):
            raise ValueError(
                "`record` must not have weights, because the promise is not about weighted samples."
                if weighted
                else "`record` must have weights, because the promise is about weighted samples:"
                " `record.weighted(...)`, with weights of 1 if it was drawn in production."
            )
        if isinstance(record, ShardedRecord):
            return record
        groups, sampling = record.groups, replace(record.sampling, population=None)
        if certificate.samples.unit == "samples":
            groups = None
        elif groups is None and certificate.samples.average == "group":
            raise ValueError(
                "`record` must have groups, because the promise is about the average of group"
                " averages: record.grouped(...)."
            )
        average, largest = None, None
        if groups is not None:
            average = certificate.samples.average
            largest = int(np.unique(groups, return_counts=True)[1].max())
        largest = largest if average == "sample" else None
        sampling = replace(sampling, average=average, max_size=largest)
        return replace(record, groups=groups, sampling=sampling)

    def _alone(self, record: Any) -> list[Any]:
        """Return the samples of each slice that the promise is about, or all samples."""
        if self.certificate.samples.slices is None:
            return [record]
        names = record.slices.astype(str)
        return [record.take(np.flatnonzero(names == name)) for name in np.unique(names)]

    def _curve(
        self,
        record: ExitRecord | ThresholdRecord | ShardedRecord,
        promise: PromiseResult,
    ) -> RiskCurve:
        """Return the curve of one promise on a record, along this policy's setting alone."""
        asked = promise.asked
        if isinstance(record, ThresholdRecord):
            self._check_settings(record)
            return asked.curve(record, ExitRule())
        if self.n_exits != record.n_exits:
            raise ValueError(
                f"`record` must have the policy's number of exits, {self.n_exits}, but has"
                f" {record.n_exits}."
            )
        path = paths.Path(np.full((1, record.n_exits - 1), np.inf), "the policy's setting")
        if self.thresholds is not None and not self.runs_full_model:
            path = paths.Path.family([self.thresholds])
        return asked.curve(record, replace(self.rule, threshold=None), path)

    def _check_settings(self, record: ThresholdRecord) -> None:
        """Raise if a record is of a system with other settings, such as another score."""
        for name, value in record.settings.items():
            if name not in self.settings or setting_key([self.settings[name]]) != setting_key(
                [value]
            ):
                raise ValueError(
                    f"`record` must be of the system that the policy is for, with {name} ="
                    f" {self.settings.get(name)}, but it was recorded with {name} = {value}."
                )

    def _index(self, curve: RiskCurve, record: ExitRecord | ThresholdRecord | ShardedRecord) -> int:
        """Return the setting of a curve that this policy runs at."""
        if self.runs_full_model:
            return 0
        if self.dials is not None:
            if not isinstance(record, ThresholdRecord) or set(record.dials) != set(self.dials):
                raise ValueError(f"`record` must have the policy's dials, {', '.join(self.dials)}.")
            return record.number_of(self.settings)
        if curve.path_kind != GIVEN_SETTINGS:  # made for this policy, after the full model
            return 1
        found = np.flatnonzero(curve.thresholds == self.threshold)
        if not found.size:
            raise ValueError(
                f"`record` must hold the policy's setting, {self.threshold}, among its thresholds."
            )
        return int(found[0])

    def plot(self, record: ExitRecord | ThresholdRecord) -> "Figure":
        """Plot a record's risk and saving along its default path, averaged as promised."""
        from swiftsure.report import policy_figure

        promise = self.certificate.promises[0]
        if self.certificate.samples.max_weight is not None:
            raise ValueError("`plot` cannot show a promise about weighted samples.")
        record = self._counted(record)
        if len(self._alone(record)) > 1:
            raise ValueError(
                "`plot` shows the risk of one slice, but the promise is about each of several: pass"
                " the samples of one, with `record.take`."
            )
        rule = replace(self.rule, threshold=None)
        if not isinstance(record, ExitRecord):
            self._check_settings(record)
            rule = ExitRule()
        return policy_figure(promise.asked.curve(record, rule), self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as JSON with a checksum, atomically.

        With a key in the environment (`SWIFTSURE_POLICY_KEY`, or a file with it in
        `SWIFTSURE_POLICY_KEY_FILE`), the file is also signed.

        Raises
        ------
        ValueError
            If `load` would refuse the file, because the policy was edited to what no calibration
            can have certified.
        """
        try:
            self.check()
        except ValueError as error:
            raise ValueError(
                f"This policy could not be loaded again: {error}. Was it edited? Calibrate again."
            ) from None
        content = self.model_dump(mode="json")
        write_text(path, json.dumps(content | proofs(content), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, accept_edited: bool = False) -> "Policy":
        """Read a policy; every field is checked.

        Parameters
        ----------
        accept_edited : bool
            Accept a file that was changed after it was written, so that its checksum does not
            match. The certificate then describes the policy before the change. Saving the policy
            writes a new checksum. A signature is never waived.

        Raises
        ------
        ValueError
            If the file is not a policy, was edited, is damaged, or comes from a newer version; if
            there is a key in the environment (see `save`) and the file is not signed with it.
        """
        content = read_json(path, "a Swiftsure policy", "swiftsure-policy", VERSION)
        checksum, signature = content.pop("checksum", None), content.pop("signature", None)
        try:
            policy = cls.model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise ValueError(f"{path} is a damaged policy: {validation_message(error)}.") from None
        edited = checksum != json_checksum(content)
        if edited and not accept_edited:
            raise ValueError(
                f"{path} was changed after it was written: its checksum does not match, so its"
                " certificate may not be about this setting. Calibrate again, or accept the change"
                " with `accept_edited=True` (--accept-edited)."
            )
        refuse_unsigned(path, content, signature)
        if edited and policy.n_exits is not None:  # the threshold was edited where it stands first
            settings = policy.settings | policy._exit_settings()
            policy = policy.model_copy(update={"settings": settings})
        try:
            policy.check(edited)
        except ValueError as error:
            raise ValueError(f"{path} is a damaged policy: {error}.") from None
        return policy

    @property
    def sentence(self) -> str:
        """What the policy promises and what runs, on one line."""
        return wording.headline(self)

    def __str__(self) -> str:
        """Return what it promises, what runs, what voids it, and what is not promised."""
        return "".join(wording.statement(self))

    def __repr__(self) -> str:
        """Return a one-line summary of the policy."""
        promises = ", ".join(f"{p.name} ≤ {p.epsilon:g}" for p in self.certificate.promises)
        return f"Policy({self._dial_text()}, {promises})"

    def _dial_text(self) -> str:
        """Return the threshold, or the value of each dial if there are several."""
        if self.dials is None:
            return f"threshold={wording.number(self.threshold)}"
        return ", ".join(f"{name}={wording.dial(self.settings[name])}" for name in self.dials)

    def _repr_html_(self) -> str:
        certificate = self.certificate
        names = self.dials or ("threshold",)
        facts = {
            **{name: wording.dial(self.settings.get(name, self.threshold)) for name in names},
            **{f"{p.name} at most": f"{p.epsilon:g}" for p in certificate.promises},
            "calibrated on": f"{certificate.samples.n:,} {certificate.samples.unit}",
            **{
                f"{name} saved": wording.percent(1 - here / full)
                for name, (full, here) in certificate.costs.means.items()
                if full
            },
        }
        return html_card("Policy", facts, str(self))
