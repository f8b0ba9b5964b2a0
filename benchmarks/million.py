"""Calibration with a million samples, five exits, 1000 settings, against one sum of the arrays."""

import data
from measure import Result, best_times

from swiftsure import calibrate
from swiftsure.certify import controls
from swiftsure.records import ExitRecord

TITLE = "million: n = 1,000,000, 5 exits, K = 1000, in sums over confidences and losses"

N, N_SETTINGS = 1_000_000, 1_000
EPSILON = 0.05
ROUNDS = 7
GROWTH = (250_000, 500_000, 1_000_000)
CASES = (
    ("gap", "brier", "wsr"),
    ("gap", "brier", "star"),
    ("consistency", "brier", "star"),
    ("consistency", "zero_one", "binomial"),
)


def run() -> list[Result]:
    results = [controlled(*case) for case in CASES]
    return [*results, *preparation(), *growth()]


def controlled(risk: str, loss: str, bound: str) -> Result:
    record = data.record(N, risk, loss)
    curve = record.curve(risk, loss, path=data.path(N_SETTINGS)).shuffled(0)
    times = best_times(
        {"sum": sum_of(record), "ucb": lambda: controls.ucb(curve, EPSILON, bound=bound)}, ROUNDS
    )
    chosen = controls.ucb(curve, EPSILON, bound=bound).index
    note = f"setting {chosen}; {times['ucb'] * 1e3:.0f} ms, the sum {times['sum'] * 1e3:.1f} ms"
    return Result(
        f"`ucb`, {bound}, {loss} {risk}", times["ucb"] / times["sum"], at_most=30, note=note
    )


def preparation() -> list[Result]:
    """Measure the rest of a calibration: checks, curve, sample order, hash, and the whole."""
    record = data.record(N, "gap", "brier")
    confidences, losses = record.confidences["top1"], record.losses["brier"]
    path = data.path(N_SETTINGS)
    curve = record.curve("gap", "brier", path=path)
    steps = {
        "sum": sum_of(record),
        "checks (`ExitRecord(...)`)": lambda: ExitRecord(confidences, losses={"brier": losses}),
        "`record.curve(...)`": lambda: record.curve("gap", "brier", path=path),
        "`curve.shuffled(seed)`": lambda: curve.shuffled(0),
        "`curve.fingerprint()`": curve.fingerprint,
        "`curve.risk()`": curve.risk,
        "`calibrate(record, ...)`, all in all": lambda: calibrate(
            record, loss="brier", epsilon=EPSILON, path=path
        ),
    }
    times = best_times(steps, ROUNDS)
    least = times.pop("sum")
    return [
        Result(name, seconds / least, note=f"{seconds * 1e3:.0f} ms")
        for name, seconds in times.items()
    ]


def growth() -> list[Result]:
    """Measure how time grows from a quarter of the samples to all: 4 is linear."""
    results = []
    for risk, loss, bound in CASES:
        runs = {}
        for n in GROWTH:
            record = data.record(n, risk, loss, total=N)
            curve = record.curve(risk, loss, path=data.path(N_SETTINGS)).shuffled(0)
            runs[str(n)] = lambda curve=curve, bound=bound: controls.ucb(
                curve, EPSILON, bound=bound
            )
        times = list(best_times(runs, 3).values())
        results.append(
            Result(
                f"1M against 250k, `ucb`, {bound}, {loss} {risk}",
                times[-1] / times[0],
                at_most=5,
                note="250k, 500k, 1M: " + ", ".join(f"{t * 1e3:.0f}" for t in times) + " ms",
            )
        )
    return results


def sum_of(record: ExitRecord):
    """Return a function that passes once over the record's arrays."""
    arrays = [*record.confidences.values(), *record.losses.values()]
    arrays += record.inconsistencies.values()
    return lambda: [array.sum() for array in arrays]
