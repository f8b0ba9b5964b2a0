"""All numbers of a report, computed once for both the page and JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from swiftsure.certify.policy import Policy
from swiftsure.records import ExitRecord
from swiftsure.report import sensitivity
from swiftsure.report.quality import ExitLoss, Reliability, exit_losses, reliability
from swiftsure.report.recalibration import recalibrate
from swiftsure.report.sensitivity import ByDelta, ByEpsilon, BySize, RiskAlong, Setting

__all__ = ["Findings", "findings"]


@dataclass(frozen=True)
class Findings:
    """The numbers of a report.

    Attributes
    ----------
    policy : Policy
    chosen : int
        The policy's setting along its path; 0 is the full model.
    shown : tuple of int
        Settings along which lines are drawn, safest first.
    thresholds : tuple
        Their thresholds.
    saved : dict
        Share of each cost that is saved, at these settings.
    cost : str or None
        The main cost; None if the record has none.
    risks : tuple of RiskAlong
        One per promise.
    by_epsilon : tuple of ByEpsilon or None
        One per promise; None if a compute budget chose the setting.
    separable : bool
        Whether the safest of the settings that each promise allows keeps them all; else the
        settings of `by_epsilon` are those with the others at their own levels.
    settings : dict
        Every setting that some level, δ or size chooses.
    by_delta, by_size
        None if they do not apply.
    exit_losses, reliability
        None if the record lacks the data.
    """

    policy: Policy
    chosen: int
    shown: tuple[int, ...]
    thresholds: tuple[sensitivity.Threshold, ...]
    saved: dict[str, tuple[float, ...]]
    cost: str | None
    risks: tuple[RiskAlong, ...]
    by_epsilon: tuple[ByEpsilon, ...] | None
    separable: bool
    settings: dict[int, Setting]
    by_delta: ByDelta | None
    by_size: BySize | None
    exit_losses: list[ExitLoss] | None
    reliability: list[Reliability] | None

    @property
    def setting(self) -> Setting:
        """The policy's own setting."""
        return self.settings[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        policy = self.policy.model_dump(mode="json")
        return {"sentence": str(self.policy), **asdict(self), "policy": policy}


def findings(record: Any, policy: Policy, cost: str | None = None) -> Findings:
    """Compute the numbers of a report; see `policy_page` for the arguments."""
    calibration = recalibrate(record, policy)
    record = calibration.record
    saved = sensitivity.savings(calibration)
    name = sensitivity.main_cost(calibration, saved, cost)
    main = None if name is None else saved[name]
    shown = sensitivity.shown_settings(calibration, main)
    promises = range(len(calibration.curves))
    by_epsilon = by_delta = by_size = None
    if not policy.certificate.by_budget:
        by_epsilon = tuple(sensitivity.by_epsilon(calibration, k) for k in promises)
        by_delta = sensitivity.by_delta(calibration)
        by_size = sensitivity.by_size(calibration, main)
    reached = {0, calibration.index}
    for moved in (*(by_epsilon or ()), by_delta, by_size):
        reached |= set(moved.settings if moved is not None else ())
    return Findings(
        policy=policy,
        chosen=calibration.index,
        shown=tuple(shown.tolist()),
        thresholds=tuple(sensitivity.threshold_of(calibration, int(k)) for k in shown),
        saved={each: tuple(share[shown].tolist()) for each, share in saved.items()},
        cost=name,
        risks=tuple(sensitivity.risk_along(calibration, k, shown) for k in promises),
        by_epsilon=by_epsilon,
        separable=calibration.separable,
        settings={k: sensitivity.setting_at(calibration, saved, k) for k in sorted(reached)},
        by_delta=by_delta,
        by_size=by_size,
        exit_losses=exit_losses(record) if isinstance(record, ExitRecord) else None,
        reliability=reliability(record) if isinstance(record, ExitRecord) else None,
    )
