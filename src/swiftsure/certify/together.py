"""Several promises at once: which settings of a common path keep all of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swiftsure.certify.control import Control, ControlResult
from swiftsure.curves.curve import RiskCurve

__all__ = ["certified_together"]


def certified_together(
    control: Control,
    curves: Sequence[RiskCurve],
    results: Sequence[ControlResult],
    delta: float,
    pool: int | None = None,
) -> NDArray[np.bool_]:
    """Return which settings keep several risks at once, (K,), given what each allows alone.

    **Guarantee**: all risks together, with probability 1 − δ, without a correction. On one path,
    the fixed sequence that needs every risk certified at each setting stops where the first of
    them fails; on branches, each setting is tested with the largest of the risks' p-values. In
    expectation, a running maximum of the loss only falls towards the safe end, so each risk stays
    within its level. The samples that exit early have a walk of their own, with its share of δ.
    """
    first = curves[0]
    if any(not np.array_equal(curve.thresholds, first.thresholds) for curve in curves):
        raise ValueError("`promises` must share one path.")
    pairs = list(zip(curves, results, strict=True))
    along = [(curve, result) for curve, result in pairs if not curve.statistic.selective]
    if len(pairs) > 1:
        _refuse_several(control, len(along) < len(pairs))
    mask = np.ones(first.n_settings, bool)
    mask[: 1 if first.full_model_first else 0] = False
    if first.branches is not None and along:
        passed = np.zeros_like(mask)
        passed[
            control.on_branches([c for c, _ in along], [r.epsilon for _, r in along], delta, pool)
        ] = True
        mask &= passed
    elif along:
        index = min(-1 if result.index is None else result.index for _, result in along)
        mask &= np.arange(len(mask)) <= index
    exiting = [(curve, result) for curve, result in pairs if curve.statistic.selective]
    if exiting:
        alone = np.zeros_like(mask)
        alone[_certified_exits(control, exiting, delta, pool)] = True
        mask &= alone
    return mask


def _certified_exits(
    control: Control,
    pairs: list[tuple[RiskCurve, ControlResult]],
    delta: float,
    pool: int | None,
) -> list[int]:
    """Return the settings that keep all risks of the samples that exit, which walk together.

    What each allows alone does not suffice: two risks may pass their bad settings in turn.
    """
    if len(pairs) == 1:
        return list(pairs[0][1].certified)
    curves, results = zip(*pairs, strict=True)
    return control.among_exits(curves, [each.epsilon for each in results], delta, pool)


def _refuse_several(control: Control, several_walks: bool) -> None:
    """Raise if a control cannot keep several risks at once."""
    if control.name == "crc" and not (control.method == "crc" and control.is_monotone):
        raise ValueError("`crc` of several promises at once needs `monotone=True`.")
    if control.name == "ltt" and control.correction != "fixed_sequence":
        raise ValueError("`ltt` of several promises at once needs `correction='fixed_sequence'`.")
    if several_walks and control.guarantee != "probability":
        raise ValueError(
            "`control` must be ucb, or ltt in fixed sequence, for the samples that exit early"
            " together with other promises: their walks share δ, and a mean over draws has none."
        )
