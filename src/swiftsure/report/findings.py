"""Every number of a report, computed once for the page and for JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from swiftsure.control import setting
from swiftsure.paths import PathLike
from swiftsure.policy import Policy
from swiftsure.records import ExitRecord, ThresholdRecord
from swiftsure.report import levels as moving
from swiftsure.report.evidence import evidence_of
from swiftsure.report.levels import ByDelta, BySize, Levels, RiskAlong, Setting
from swiftsure.report.quality import ExitLoss, Reliability, exit_losses, reliability

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
    levels : tuple of Levels or None
        One per promise; None if a compute budget chose the setting.
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
    thresholds: tuple[moving.Threshold, ...]
    saved: dict[str, tuple[float, ...]]
    cost: str | None
    risks: tuple[RiskAlong, ...]
    levels: tuple[Levels, ...] | None
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
        numbers = asdict(self)
        return {
            "sentence": str(self.policy),
            **numbers,
            "policy": self.policy.model_dump(mode="json"),
        }


def findings(
    record: ExitRecord | ThresholdRecord,
    policy: Policy,
    path: PathLike = None,
    cost: str | None = None,
) -> Findings:
    """Compute the numbers of a report; see `policy_page` for the arguments."""
    evidence = evidence_of(record, policy, path)
    saved = moving.savings(evidence)
    name = moving.main_cost(saved, cost)
    main = None if name is None else saved[name]
    shown = moving.shown_settings(evidence, main)
    promises = range(len(evidence.curves))
    levels = by_delta = by_size = None
    if not policy.certificate.by_budget:
        levels = tuple(moving.levels(evidence, k) for k in promises)
        by_delta = moving.by_delta(evidence)
        by_size = moving.by_size(evidence, main)
    reached = {0, evidence.index}
    for moved in (*(levels or ()), by_delta, by_size):
        reached |= set(moved.settings if moved is not None else ())
    return Findings(
        policy=policy,
        chosen=evidence.index,
        shown=tuple(shown.tolist()),
        thresholds=tuple(setting(evidence.curves[0], int(k)) for k in shown),
        saved={each: tuple(share[shown].tolist()) for each, share in saved.items()},
        cost=name,
        risks=tuple(moving.risk_along(evidence, k, shown) for k in promises),
        levels=levels,
        settings={k: moving.setting_at(evidence, saved, k) for k in sorted(reached)},
        by_delta=by_delta,
        by_size=by_size,
        exit_losses=exit_losses(record) if isinstance(record, ExitRecord) else None,
        reliability=reliability(record) if isinstance(record, ExitRecord) else None,
    )
