"""Memory at a million samples, in copies of the input."""

import data
from measure import Result, peak_bytes

from swiftsure import calibrate
from swiftsure.certify import controls
from swiftsure.records import ExitRecord

TITLE = "memory: n = 1,000,000, 5 exits, K = 1000, in copies of confidences and losses"

N, N_SETTINGS, EPSILON = 1_000_000, 1_000, 0.05


def run() -> list[Result]:
    table = Result(
        "an (n, K) matrix of losses, which is never made",
        N_SETTINGS * 8 / (4 * 4 + 5 * 8),
        "copies",
    )
    return [*measured("gap", "brier"), *measured("consistency", "zero_one"), table]


def measured(risk: str, loss: str) -> list[Result]:
    record = data.record(N, risk, loss)
    kind = "losses" if risk == "gap" else "inconsistencies"
    confidences, losses = record.confidences["top1"], getattr(record, kind)[loss]
    size = confidences.nbytes + losses.nbytes
    path = data.path(N_SETTINGS)
    curve = record.curve(risk, loss, path=path)
    ordered = curve.shuffled(0)
    steps = {
        "checks (`ExitRecord(...)`)": lambda: ExitRecord(confidences, **{kind: {loss: losses}}),
        "`record.curve(...)`": lambda: record.curve(risk, loss, path=path),
        "`curve.shuffled(seed)`": lambda: curve.shuffled(0),
        "`curve.fingerprint()`": curve.fingerprint,
        "`ucb` of a shuffled curve": lambda: controls.ucb(ordered, EPSILON),
        "`calibrate(record, ...)`, all in all": lambda: calibrate(
            record, risk=risk, loss=loss, epsilon=EPSILON, path=path
        ),
    }
    results = []
    for name, step in steps.items():
        extra = peak_bytes(step)
        note = f"{extra / 2**20:.0f} MiB beside {size / 2**20:.0f} MiB of input"
        what = f"{name}, {loss} {risk}"
        results.append(Result(what, extra / size, "copies", at_most=2, note=note))
    return results
