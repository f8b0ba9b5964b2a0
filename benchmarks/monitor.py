"""The monitor: false alarms, delays after a change, and the cost of an observation.

Compared with an e-process of the same stakes that starts once and, if it is installed (`pip install
mapie`), with MAPIE's `RiskMonitoring` at the same α and ε on the same streams.
"""

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
from measure import Result, best_times, peak_bytes

from swiftsure import Monitor
from swiftsure.monitor import _evidence

TITLE = "monitor: 0/1 losses, ε = 0.05; α = 0.01 for delays, which are medians of 101 streams"

EPSILON, ALPHA = 0.05, 0.01
FINE = 0.04
"""The risk before a change."""

CHANGES = (0, 1_000, 20_000, 200_000)
AFTER = (0.06, 0.10, 0.30)
HORIZON = 20_000
"""Losses to wait for an alarm after a change."""

DRAWS, MAPIE_DRAWS, MAPIE_LONGEST = 101, 5, 20_000
"""Streams per median; MAPIE is slow, so it gets the first few, and no long histories."""

NULL_DRAWS, NULL_LENGTH, NULL_ALPHA = 500, 200_000, 0.1
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
PIECE = 10_000

Detector = Callable[[np.ndarray], float]
"""Maps a stream of losses to their number at the alarm; infinite without an alarm."""


def run() -> list[Result]:
    return [*false_alarms(), *delays(), *times(), *memory(), *mapie_times()]


# -------------------------------------------------------------------------------------- detectors


def restarting(losses: np.ndarray, alpha: float = ALPHA) -> float:
    """Return the alarm of the library's monitor."""
    monitor = Monitor(EPSILON, alpha)
    monitor.update_many(losses)
    return monitor.alarm_at or np.inf


def single_start(losses: np.ndarray, alpha: float = ALPHA) -> float:
    """Return the alarm of the same stakes, mixed with equal weights, from one start."""
    stakes = _evidence.stakes(EPSILON, 0.0)
    logs = np.cumsum(np.log1p(stakes * (losses[:, None] - EPSILON)), axis=0)
    largest = logs.max(axis=1)
    wealth = largest + np.log(np.exp(logs - largest[:, None]).mean(axis=1))
    return first(wealth >= -np.log(alpha))


def mapie(losses: np.ndarray) -> float:
    """Return the alarm of MAPIE's lower bound of the mean of all losses so far, at α."""
    monitor = mapie_monitor()
    monitor.update(losses.astype(int), np.zeros(len(losses), int))
    return first(monitor.online_risk_lower_bound_sequence_history > EPSILON)


def mapie_monitor():
    from mapie.exchangeability_testing import RiskMonitoring

    # Half of its α is for a reference set, which is not needed with a given threshold.
    return RiskMonitoring(risk="accuracy", test_level=2 * ALPHA, threshold=EPSILON, warn=False)


def first(alarms: np.ndarray) -> float:
    where = np.flatnonzero(alarms)
    return where[0] + 1 if where.size else np.inf


# ------------------------------------------------------------------------------------------ power


def false_alarms() -> list[Result]:
    """Measure false alarms on streams whose risk is exactly ε, the largest allowed."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(NULL_DRAWS):
        losses = (rng.random(NULL_LENGTH) < EPSILON).astype(float)
        alarms += restarting(losses, NULL_ALPHA) < np.inf
    return [
        Result(
            f"false alarms within {NULL_LENGTH:,}, risk = ε, α = {NULL_ALPHA:g}",
            100 * alarms / NULL_DRAWS,
            "%",
            at_most=100 * NULL_ALPHA,
            note=f"{NULL_DRAWS} streams",
        )
    ]


def delays() -> list[Result]:
    """Measure the median delay after a change, and what restarts save against a single start."""
    return [delay(change, after) for change in CHANGES for after in AFTER]


def delay(change: int, after: float) -> Result:
    rng = np.random.default_rng(change)
    streams = [
        np.concatenate([rng.random(change) < FINE, rng.random(HORIZON) < after]).astype(float)
        for _ in range(DRAWS)
    ]
    ours = median_delay(restarting, streams, change)
    single = median_delay(single_start, streams, change)
    note = f"single start {shown(single)}"
    if find_spec("mapie") is None:
        note += "; MAPIE is not installed"
    elif change <= MAPIE_LONGEST:
        theirs = median_delay(mapie, streams[:MAPIE_DRAWS], change)
        note += f"; MAPIE {shown(theirs)} (of {MAPIE_DRAWS})"
    else:
        note += "; MAPIE not tried: too long a history"
    what = f"delay, {FINE:.2f} → {after:.2f} after {change:,}"
    return Result(what, ours, "losses", note=note)


def median_delay(detector: Detector, streams: list[np.ndarray], change: int) -> float:
    """Return the median delay; the rare false alarms before the change count as 0."""
    return float(np.median([max(0.0, detector(stream) - change) for stream in streams]))


def shown(losses: float) -> str:
    return f"{losses:,.0f}" if losses < np.inf else f"none within {HORIZON:,}"


# ------------------------------------------------------------------------------- time and memory


def times() -> list[Result]:
    """Time an observation, after histories of any length."""
    losses = (np.random.default_rng(0).random(SIZES[-1]) < EPSILON).astype(float)
    runs = {str(n): lambda n=n: Monitor(EPSILON).update_many(losses[:n]) for n in SIZES}
    each = [seconds / n for n, seconds in zip(SIZES, best_times(runs, 3).values(), strict=True)]
    note = ", ".join(f"{n:.0e}: {1e9 * s:.1f}" for n, s in zip(SIZES, each, strict=True))
    old = Monitor(EPSILON)
    old.update_many(losses)
    few = losses[:1000].tolist()
    single = best_times({"new": one_by_one(Monitor(EPSILON), few), "old": one_by_one(old, few)}, 5)
    return [
        Result("`update_many`, millions a second", 1e-6 / each[-1], "M/s", at_least=10),
        Result(
            "`update_many`, an observation: 10 million against 10,000",
            each[-1] / each[0],
            at_most=1.5,
            note=f"ns: {note}",
        ),
        Result(
            "`update`, after 10 million against after none",
            single["old"] / single["new"],
            at_most=1.5,
            note=f"{1e6 * single['old'] / len(few):.2f} µs a loss",
        ),
    ]


def one_by_one(monitor: Monitor, losses: list[float]) -> Callable[[], None]:
    def update() -> None:
        for loss in losses:
            monitor.update(loss)

    return update


def memory() -> list[Result]:
    """Measure memory beyond the current chunk of losses, over a hundred chunks."""
    losses = (np.random.default_rng(0).random(PIECE) < EPSILON).astype(float)

    def watched(pieces: int) -> Callable[[], None]:
        def watch() -> None:
            monitor = Monitor(EPSILON)
            for _ in range(pieces):
                monitor.update_many(losses)

        return watch

    few, many = (peak_bytes(watched(n // PIECE)) for n in (SIZES[1], SIZES[-1]))
    return [
        Result(
            "memory, 10 million against 100,000",
            many / few,
            at_most=1.1,
            note=f"{few / 1024:.1f} and {many / 1024:.1f} KiB at most",
        )
    ]


def mapie_times() -> list[Result]:
    """Measure the time of one more loss in MAPIE after a history."""
    if find_spec("mapie") is None:
        return []
    results, zero = [], np.zeros(1, int)
    for n in (1_000, 10_000):
        monitor = mapie_monitor()
        monitor.update(np.zeros(n, int), np.zeros(n, int))
        seconds = best_times({"one": lambda m=monitor: m.update(zero, zero)}, 2)["one"]
        results.append(Result(f"MAPIE: one more loss after {n:,}", 1e3 * seconds, "ms"))
    return results
