"""`evaluate` over repeated splits, against a plain implementation."""

from collections.abc import Callable

import data
import numpy as np
import reference
from measure import Result, best_times

from swiftsure import Repeats, Study, evaluate
from swiftsure.certify.control import Control

TITLE = "evaluate: 100 splits and 100 draws, 50 levels, 3 controls, n = 1000, K = 100"

Ltt = Callable[[np.ndarray, np.ndarray, float, float], list[int]]

N, POOL, N_SETTINGS, SPLITS, DELTA = 1_000, 2_000, 100, 100, 0.1
EPSILONS = np.linspace(0.01, 0.5, 50)
REFERENCE_SPLITS = 2
"""Splits run by the reference, whose time is scaled up."""

CONTROLS = {
    "crc": Control("crc"),
    "ucb": Control("ucb", bound="wsr"),
    "ltt": Control("ltt", bound="hoeffding_bentkus"),
}


def run() -> list[Result]:
    record = data.record(POOL, "consistency", "brier")
    path = data.path(N_SETTINGS)
    curve = record.curve("consistency", "brier", path=path)
    losses, max_loss = curve.losses(), curve.loss_range.high
    exits = exits_of(record.confidences["top1"], curve.thresholds)

    def library(splits: int = SPLITS) -> Study:
        return evaluate(
            record,
            risk="consistency",
            loss="brier",
            controls=CONTROLS,
            epsilons=EPSILONS,
            delta=DELTA,
            n_calibration=N,
            splits=Repeats(splits, progress=False),
            path=path,
        )

    def loops() -> dict[str, np.ndarray]:
        return plainly(losses, exits, max_loss, reference.ltt)

    def vectorised() -> dict[str, np.ndarray]:
        return plainly(losses, exits, max_loss, reference.ltt_at_once)

    study = library(REFERENCE_SPLITS)
    for plain in (loops(), vectorised()):
        for control in CONTROLS:
            chosen = curve.thresholds[plain[control]]
            assert np.array_equal(study.thresholds[control], chosen), f"{control} differs"
    times = best_times({"library": library, "loops": loops, "vectorised": vectorised}, 4)
    fast, scale = times["library"], SPLITS / REFERENCE_SPLITS
    return [
        Result(
            "`evaluate`, times faster than plain NumPy and SciPy",
            times["loops"] * scale / fast,
            at_least=100,
            note=f"same thresholds; reference {times['loops'] * scale:.0f} s, scaled up from"
            f" {REFERENCE_SPLITS} of {SPLITS} splits and draws",
        ),
        Result(
            "the same, if the reference has no loop over settings in LTT",
            times["vectorised"] * scale / fast,
            note=f"reference {times['vectorised'] * scale:.1f} s, scaled up",
        ),
        Result("one split or draw, three controls, 50 levels", fast / (2 * SPLITS) * 1e3, "ms"),
    ]


def exits_of(confidences: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the exit that each sample takes at each setting, (n, K)."""
    last = np.ones((len(confidences), 1), bool)
    fires = [np.column_stack([confidences >= threshold, last]) for threshold in thresholds]
    return np.stack([each.argmax(axis=1) for each in fires], axis=1)


def plainly(
    losses: np.ndarray, exits: np.ndarray, max_loss: float, ltt: Ltt
) -> dict[str, np.ndarray]:
    """Do what `evaluate` does for a few splits and as many draws; return the chosen settings."""
    rng = np.random.default_rng(0)
    pool = len(losses)
    chosen: dict[str, list[list[int]]] = {control: [] for control in CONTROLS}
    found = []
    for _ in range(REFERENCE_SPLITS):
        order = rng.permutation(pool)
        test_losses, test_exits = losses[order[N:]], exits[order[N:]] + 1
        for control, settings in choices(losses[order[:N]], max_loss, ltt).items():
            chosen[control].append(settings)
            found += [(test_losses[:, k].mean(), test_exits[:, k].mean()) for k in settings]
    for _ in range(REFERENCE_SPLITS):
        for settings in choices(losses[rng.integers(0, pool, N)], max_loss, ltt).values():
            found += [losses[:, k].mean() for k in settings]
    return {control: np.array(settings) for control, settings in chosen.items()}


def choices(losses: np.ndarray, max_loss: float, ltt: Ltt) -> dict[str, list[int]]:
    """Return what each control chooses at each ε."""
    bounds = reference.upper_bounds(losses, DELTA, max_loss)
    return {
        "crc": reference.crc(losses, EPSILONS, max_loss),
        "ucb": [reference.last_before_failure(bounds < epsilon) for epsilon in EPSILONS],
        "ltt": ltt(losses, EPSILONS, DELTA, max_loss),
    }
