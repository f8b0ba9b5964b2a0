"""Several dials against one, at the same number of samples: a study of one record."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from swiftsure import Path, ThresholdRecord
from swiftsure.control import Control
from swiftsure.pareto import pareto_order, upper_estimates

__all__ = ["compare"]


def compare(
    record: ThresholdRecord,
    *,
    along: str,
    one: Mapping[str, Any],
    cost: str,
    epsilon: float,
    risk: str = "gap",
    loss: str | None = None,
    n: int = 1000,
    pilots: Iterable[int] = (100, 200, 300),
    delta: float = 0.1,
    draws: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the mean cost and risk of each way to set the dials, and how often it exceeds ε.

    The record is the population: n samples are drawn from it with replacement, of which a pilot
    takes its part, so the risk and cost of what was chosen are known.

    Parameters
    ----------
    record : ThresholdRecord
        Of several dials.
    along : str
        The one dial that is set today.
    one : mapping
        The values at which the other dials are frozen today.
    cost : str
        The cost to save.
    """
    curve = record.curve(risk, loss)
    losses, risks = curve.losses(), curve.risk()
    costs = np.broadcast_to(record.costs[cost], losses.shape)
    branches = record.branches(along)
    ways: dict[str, Any] = {f"{along} alone, today": None}
    for branch in branches:
        others = {k: v for k, v in record.setting(branch[0]).items() if k != along}
        name = ", ".join(f"{k} {v}" for k, v in others.items())
        title = f"{along} alone" + (", today" if others == dict(one) else f", {name}")
        ways[title] = Path.settings(branch, record)
    ways["branches, Bonferroni"] = Path.branching(branches, record, flow=False, cost=cost)
    ways["branches, δ flows"] = Path.branching(branches, record, cost=cost)
    ways |= {f"pilot of {size}": size for size in pilots}
    rng, control, level = np.random.default_rng(seed), Control("ucb"), np.asarray([epsilon])
    found: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(draws):
        drawn = rng.integers(record.n, size=n)
        for name, way in ways.items():
            rows, path = drawn, way
            if isinstance(way, int):
                pilot, rows = drawn[:way], drawn[way:]
                order = pareto_order(upper_estimates(losses[pilot]), costs[pilot].mean(axis=0))
                path = Path.settings(order.tolist(), record)
            index = control.indices(record.curve(risk, loss, path=path), level, delta, rows)[0]
            found[name].append(0 if index < 0 else path.columns[index])
    means = {name: costs[:, chosen].mean() for name, chosen in found.items()}
    first = next(iter(means.values()))
    return [
        {
            "way": name,
            cost: means[name],
            "saved against today, %": 100 * (1 - means[name] / first),
            "risk": risks[chosen].mean(),
            "above ε, %": 100 * float((risks[chosen] > epsilon).mean()),
        }
        for name, chosen in found.items()
    ]
