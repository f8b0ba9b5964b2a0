"""What a router before the small model saves: `python -m experiments.router.compare`, 10 minutes.

From the records that `experiments.router.record` made. In each of 60 draws a random half of the
3,080 questions calibrates; costs and risks are those of the other half. Costs are shares of the
large classifier's. Beside the cascade alone and with a router stand two oracles:

- *no question twice* skips the small model exactly where the cascade would pass its answer on;
- *knows failures* skips it exactly where its answer differs from the large one's, and keeps all of
  its other answers. No confidence is needed then, so this is a ceiling of both dials.
"""

from typing import Any

import numpy as np

import swiftsure as ss
from experiments.router.record import RESULTS, SMALL
from experiments.tables import print_rows, write_all

__all__ = ["main"]

DRAWS = 60
PRICES = (0.1, 0.25, 0.4)
"""Costs of the small classifier, as shares of the large one's."""
ROUTER_PRICE = 0.002
EPSILONS = (0.02, 0.05)
PROMISES = {"differs": "consistency", "accuracy lost": "gap"}


def main() -> None:
    """Print the table."""
    rows = [
        compared(name, price, epsilon, risk)
        for name in SMALL
        for price in PRICES
        for risk in PROMISES
        for epsilon in EPSILONS
    ]
    print_rows("A router before the small model", rows)
    write_all(RESULTS, {"gains.csv": rows})


def compared(name: str, price: float, epsilon: float, promised: str) -> dict[str, Any]:
    """Return the mean costs of one setting, and how often a promise did not hold."""
    record = ss.load_record(RESULTS / f"{name}.parquet")
    plain = ss.ExitRecord(
        {"top1": record.confidences["top1"]},
        losses=record.losses,
        inconsistencies=record.inconsistencies,
        costs={"price": [price, 1 + price]},
        full_costs={"price": 1.0},
        ids=record.ids,
    )
    both = plain.routed(record.confidences["hopeless"][:, 0], cost={"price": ROUTER_PRICE})
    promise = ss.Promise("zero_one", risk=PROMISES[promised], epsilon=epsilon)
    found = np.asarray([drawn(plain, both, promise, price, draw) for draw in range(DRAWS)])
    alone, routed, twice, failures = found[:, :4].mean(axis=0)
    risks = found[:, 4:]
    return {
        "small": name,
        "price": price,
        "promised": f"{promised} at most {100 * epsilon:g} %",
        "cascade": alone,
        "with router": routed,
        "oracle: no question twice": twice,
        "oracle: knows failures": failures,
        "share of the first oracle's gain": (alone - routed) / (alone - twice or np.nan),
        "share of the second's": (alone - routed) / (alone - failures or np.nan),
        "risk of the cascade": risks[:, 0].mean(),
        "risk with router": risks[:, 1].mean(),
        "halves above ε, cascade": int((risks[:, 0] > epsilon).sum()),
        "halves above ε, router": int((risks[:, 1] > epsilon).sum()),
    }


def drawn(plain: Any, both: Any, promise: ss.Promise, price: float, seed: int) -> list[float]:
    """Return costs and risks on the half that did not calibrate."""
    rows = np.random.default_rng(seed).permutation(plain.n)
    half = plain.n // 2
    cost, rest = [], rows[half:]
    risks = []
    for record, path in ((plain, None), (both, ss.Path.learn(0.25))):
        policy = ss.Calibration(promise, path=path, rule="top1").run(record.take(rows[:half]))
        test = policy.evaluate(record.take(rest))
        cost.append(1 - test.savings["price"])
        risks.append(test.risk)
        if path is None:
            level = np.inf if policy.threshold is None else policy.threshold
    kept = (plain.confidences["top1"][rest, 0] >= level).mean()
    apart = (plain.inconsistencies["zero_one"][rest, 0] > 0).mean()
    # An oracle alone costs no more than the cascade, which may run the large model alone.
    twice = min(price * kept + 1 - kept, cost[0])
    return [*cost, twice, price * (1 - apart) + apart, *risks]


if __name__ == "__main__":
    main()
