"""`PolicyBinding`: ties a policy to the model and settings that it was made for."""

from collections.abc import Callable, Mapping
from typing import Any

from swiftsure.certify.policy import Policy
from swiftsure.records.checks import check_dtype
from swiftsure.scores import LearnedScore

__all__ = ["SYSTEM", "PolicyBinding", "check_same"]

SYSTEM = "system"
"""The setting of a record and its policies that names the system they are for."""


class PolicyBinding:
    """Refuses to run a policy with anything other than what it was made for.

    A policy made from arrays alone names no system and no model, so neither is checked.

    Parameters
    ----------
    policy : Policy
    system : str
        Name of the system that is about to run, as in `Sweep.system`, such as "calm".
    record_from : str
        Name of the function that makes the records for such policies.

    Attributes
    ----------
    score, n_exits
        What the policy was made for; None if it does not say.

    Raises
    ------
    ValueError
        If the policy was made for another system.

    Examples
    --------
    >>> import swiftsure as ss
    >>> record = ss.ThresholdRecord([None, 0.5], inconsistencies={"mse": [[0.0, 0.0]] * 60})
    >>> policy = ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.1)
    >>> PolicyBinding(policy, "deediff", "swiftsure.diffusion.sweep").dial("threshold")
    0.5
    """

    def __init__(self, policy: Policy, system: str, record_from: str) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"`policy` must be a Policy, but got {type(policy).__name__}; Policy.load reads a"
                " file."
            )
        self.policy = policy
        self.system = system
        self.record_from = record_from
        # A policy for exits of a network has fields for these; other systems keep settings.
        self.score: str | None = policy.score or policy.settings.get("score")
        self.n_exits: int | None = policy.n_exits or policy.settings.get("n_exits")
        self._dtype: str | None = policy.dtype or policy.settings.get("dtype")
        if policy.settings.get(SYSTEM, system) != system:
            raise self.refusal()

    def refusal(self) -> ValueError:
        """Return the error to raise for a policy made for another kind of system."""
        other = self.policy.settings.get(SYSTEM, self.system)
        but = "" if other == self.system else f" but for {other}"
        return ValueError(
            f"`policy` was not made for {self.system}{but}: make its record with"
            f" {self.record_from}."
        )

    def dial(self, name: str) -> float | None:
        """Return the dial's value for a whole run; None for the full model."""
        if self.policy.n_exits is not None or name not in self.policy.settings:
            raise self.refusal()
        if self.policy.dials is not None:
            value: float | None = self.policy.settings[name]
            return None if self.policy.runs_full_model else value
        if isinstance(self.policy.threshold, tuple):
            raise ValueError("`policy` must have one threshold, not one per exit.")
        return self.policy.threshold

    def exit_thresholds(self, n_exits: int) -> list[float]:
        """Return the threshold of each of a network's exits but the last; infinity for never."""
        if self.policy.score is None and self.policy.certificate.costs.exit_shares is not None:
            raise ValueError(
                "`policy` was calibrated from a curve, which does not say of which score and model"
                " it is: calibrate from the record."
            )
        thresholds = self.policy.thresholds
        if thresholds is None or self.policy.score is None:
            raise self.refusal()
        self.check_exits(n_exits)
        levels: list[float] = thresholds.tolist()
        return levels

    def check_exits(self, n_exits: int) -> None:
        """Raise if the model has another number of exits."""
        if self.n_exits not in (None, n_exits):
            raise ValueError(
                f"`policy` was made for {self.n_exits} exits, but the model has {n_exits}."
            )

    def check_score(self, score: str | LearnedScore | None) -> None:
        """Raise if the system uses another score."""
        if score is not None and self.score is not None:
            check_same({"score": self.score}, {"score": getattr(score, "name", score)})

    def dtype(self, given: str | None) -> str | None:
        """Return the inference dtype, the policy's by default; raises if another one is given."""
        if check_dtype(given) is None:
            return self._dtype
        if self._dtype is not None or self.policy.certificate.provenance.model is not None:
            check_same({"dtype": self._dtype or "float32"}, {"dtype": given})
        return given

    def check_model(self, fingerprint: Callable[[], str]) -> None:
        """Raise if the model's fingerprint is not the policy's."""
        expected = self.policy.certificate.provenance.model
        if expected is None:
            return
        found = fingerprint()
        if found != expected:
            raise ValueError(
                "`policy` was made for another model, other weights or another configuration: its"
                f" fingerprint is {expected[:19]}…, but this model's is {found[:19]}…. Calibrate"
                " again."
            )


def check_same(expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise for the first setting that differs from the policy's.

    Examples
    --------
    >>> check_same({"n_steps": 50}, {"n_steps": 20})
    Traceback (most recent call last):
    ValueError: `policy` was made for n_steps=50, but got 20.
    """
    for name in {**expected, **given}:
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"`policy` was made for {name}={expected.get(name)!r}, but got {given.get(name)!r}."
            )
