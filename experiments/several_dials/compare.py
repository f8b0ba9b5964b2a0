"""Two dials against one, at the same number of samples: a study of one record of several dials."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import Path, ThresholdRecord
from swiftsure.control import Control

__all__ = ["compare", "frozen"]

Rows = NDArray[np.int64]


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
    splits: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the mean cost and risk on test samples of each way to set the dials.

    Every way has n samples in all, of which a pilot takes its part; the others of the record test.

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
    losses, costs = curve.losses(), record.costs[cost]
    costs = np.broadcast_to(costs, losses.shape)
    branches = record.branches(along)
    ways: dict[str, Any] = {f"{along} alone": Path.settings(frozen(record, along, one), record)}
    for branch in branches:
        others = {k: v for k, v in record.setting(branch[0]).items() if k not in (along, *())}
        if others != dict(one):
            name = ", ".join(f"{k} = {v}" for k, v in others.items())
            ways[f"{along} alone, at {name}"] = Path.settings(branch, record)
    ways["branches, Bonferroni"] = Path.branching(branches, record, flow=False, cost=cost)
    ways["branches, δ flows"] = Path.branching(branches, record, cost=cost)
    ways |= {f"front of a pilot of {size}": size for size in pilots}
    rng, control = np.random.default_rng(seed), Control("ucb")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for split in range(splits):
        order = rng.permutation(record.n)
        drawn, test = order[:n], order[n:]
        for name, way in ways.items():
            rows, path = drawn, way
            if isinstance(way, int):
                pilot = record.take(drawn[:way])
                path, rows = Path.pareto(pilot, risk, loss, cost=cost), drawn[way:]
            result = control.run(record.take(rows).curve(risk, loss, path=path), epsilon, delta, split)
            column = 0 if result.index is None else path.columns[result.index]
            found[name].append((costs[test, column].mean(), losses[test, column].mean()))
    first = np.mean([pair[0] for pair in next(iter(found.values()))])
    return [
        {
            "way": name,
            cost: float(np.mean([pair[0] for pair in pairs])),
            "risk": float(np.mean([pair[1] for pair in pairs])),
            "saved against one dial, %": float(
                100 * (1 - np.mean([pair[0] for pair in pairs]) / first)
            ),
        }
        for name, pairs in found.items()
    ]


def frozen(record: ThresholdRecord, along: str, one: Mapping[str, Any]) -> list[int]:
    """Return the settings along one dial, with the others at these values."""
    for branch in record.branches(along):
        setting = record.setting(branch[0])
        if {name: value for name, value in setting.items() if name != along} == dict(one):
            return branch
    raise ValueError(f"`one` must be among the record's settings, but {dict(one)} is not.")
