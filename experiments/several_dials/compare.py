"""Several dials against one, at the same number of samples and checked on others."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import ExitRecord, Path, ThresholdRecord, calibrate
from swiftsure.certify.control import Control
from swiftsure.curves.pareto import pareto_order, upper_estimates

__all__ = ["compare", "compare_exits"]

DELTA = 0.1


def compare(
    record: ThresholdRecord,
    *,
    along: str,
    one: Mapping[str, Any],
    cost: str,
    epsilon: float,
    loss: str,
    risk: str = "gap",
    n: int = 1000,
    pilots: tuple[int, ...] = (100, 200),
    draws: int = 100,
) -> list[dict[str, Any]]:
    """Return the cost and the risk on other samples of each way to set the dials.

    Each draw takes n samples to calibrate on, pilot included, and checks what they choose on
    others; see `drawn`. Ways to set the dials are one dial with the others as `one` has them, which
    is the first row; a pilot; branches; and one dial with the others fixed at the values that turn
    out best, which nobody knows beforehand.

    Parameters
    ----------
    along : str
        The one dial that is set today.
    one : mapping
        The values of the other dials today.
    """
    losses = record.curve(risk, loss).losses()
    costs = np.broadcast_to(record.costs[cost], losses.shape)
    branches = record.branches(along)
    today = {along: record.setting(0)[along], **one}
    alone = {}
    for branch in branches:
        others = {name: record.setting(branch[0])[name] for name in one}
        alone["one dial" if others == one else str(others)] = Path.settings(branch, record)
    ways: dict[str, Any] = {"one dial": alone.pop("one dial"), **alone}
    ways |= {f"pilot of {size}": size for size in pilots}
    ways["branches, δ flows"] = Path.branching(branches, record, cost=cost)
    if set(today) != set(record.setting(0)):
        raise ValueError("`one` must hold all dials but the one that is set.")
    curves = {
        name: (record.curve(risk, loss, path=way), way.columns)
        for name, way in ways.items()
        if isinstance(way, Path)
    }
    rng, control, level = np.random.default_rng(0), Control("ucb"), np.asarray([epsilon])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(draws):
        rows, test = drawn(record.n, n, rng)
        full = costs[test, 0].mean()
        for name, way in ways.items():
            part = rows
            if isinstance(way, int):
                pilot, part = rows[:way], rows[way:]
                order = pareto_order(upper_estimates(losses[pilot]), costs[pilot].mean(axis=0))
                path = Path.settings(order.tolist(), record)
                curve, columns = record.curve(risk, loss, path=path), path.columns
            else:
                curve, columns = curves[name]
            index = control.indices(curve, level, DELTA, part)[0]
            chosen = 0 if index < 0 else columns[index]
            found[name].append((costs[test, chosen].mean() / full, losses[test, chosen].mean()))
    best = min(("one dial", *alone), key=lambda name: np.mean(found[name], axis=0)[0])
    found["best in hindsight"] = found[best]
    return [_row(name, found[name], epsilon) for name in found if name not in alone]


def compare_exits(
    record: ExitRecord,
    *,
    epsilon: float,
    cost: str = "flops",
    n: int = 1000,
    pilots: tuple[int, ...] = (100, 300),
    draws: int = 20,
) -> list[dict[str, Any]]:
    """Return the same for exits: one shared threshold, or one per exit, found on a pilot."""
    rng = np.random.default_rng(0)
    ways = {"one dial": 0} | {f"pilot of {size}": size for size in pilots}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(draws):
        rows, test = drawn(record.n, n, rng)
        for name, size in ways.items():
            path = Path.pareto(record.take(rows[:size]), "gap", "zero_one") if size else None
            part = record.take(rows[size:])
            policy = calibrate(part, loss="zero_one", epsilon=epsilon, path=path)
            seen = policy.evaluate(record.take(test))
            found[name].append((1 - seen.savings[cost], seen.risk))
    return [_row(name, each, epsilon) for name, each in found.items()]


def drawn(
    size: int, n: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return n samples to calibrate on and others to check, as row numbers of a record.

    A record of fewer than 2 n samples is cut in half at random: n samples are drawn from one half
    with replacement, and the other half checks.
    """
    order = rng.permutation(size)
    if size >= 2 * n:
        return order[:n], order[n:]
    return rng.choice(order[: size // 2], n), order[size // 2 :]


def _row(name: str, found: list[tuple[float, float]], epsilon: float) -> dict[str, Any]:
    costs, risks = np.transpose(found)
    return {
        "way": name,
        "cost, %": 100 * float(costs.mean()),
        "risk": float(risks.mean()),
        "risk above ε, %": 100 * float((risks > epsilon).mean()),
    }
