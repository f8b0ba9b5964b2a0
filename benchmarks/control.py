"""One threshold from one calibration set, against the paper's algorithms."""

import data
import reference
from measure import Result, best_times

from swiftsure import RiskCurve
from swiftsure.certify import controls

TITLE = "control: `ucb`, times faster than Algorithms 1 and 2 written in NumPy"

EPSILON, DELTA = 0.05, 0.1
SIZES = ((1_000, 100, 30), (10_000, 1_000, 3))
"""Samples, settings, and rounds of measuring."""


def run() -> list[Result]:
    results = []
    for n, n_settings, rounds in SIZES:
        record = data.record(n, "gap", "brier")
        along = record.curve("gap", "brier", path=data.linear_path(n_settings))
        # What a user with arrays calls: a curve of losses, in the order of the file.
        curve = RiskCurve.from_losses(
            along.thresholds, along.losses(), loss_range=along.loss_range, order=0
        )
        max_loss = curve.loss_range.high
        losses = curve.losses(curve.rows_in_order(0))

        def paper(losses=losses, max_loss=max_loss) -> int:
            return reference.algorithm_1(losses, EPSILON, DELTA, max_loss)

        def wsr(curve=curve) -> int | None:
            return controls.ucb(curve, EPSILON, DELTA, bound="wsr").index

        def default(curve=curve) -> int | None:
            return controls.ucb(curve, EPSILON, DELTA).index

        assert (wsr() or 0) == paper(), "the library and the reference differ"
        times = best_times({"paper": paper, "wsr": wsr, "default": default}, rounds)
        slow = times["paper"]
        size = f"n = {n:,}, K = {n_settings:,}"
        results += [
            Result(
                f"{size}, WSR",
                slow / times["wsr"],
                at_least=300,
                note=f"same threshold (setting {wsr()}); reference {slow * 1e3:,.0f} ms",
            ),
            Result(
                f"{size}, default bound (STaR)",
                slow / times["default"],
                note=f"setting {default()}; {times['default'] * 1e3:.2g} ms",
            ),
        ]
    return results
