"""`swiftsure demo`: the whole way, on a simulated network whose true risk is known."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from swiftsure.cli import options
from swiftsure.cli.output import number, print_json, print_table, print_text

__all__ = ["demo"]

LEVELS = (0.01, 0.02, 0.05, 0.1)


def demo(
    n: Annotated[int, typer.Option("--n", help="Calibration samples.")] = 1000,
    epsilon: Annotated[float, typer.Option(help="Largest risk allowed.")] = 0.05,
    delta: options.Delta = 0.1,
    draws: Annotated[int, typer.Option(help="Calibration sets drawn to test the promise.")] = 300,
    seed: options.Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for policy and figure.")
    ] = Path("results/demo"),
    json: options.Json = False,
) -> None:
    """Calibrate a simulated five-exit network, and check the promise against the truth.

    The network is a simulation whose risk at each threshold is known exactly, so one can see what
    is promised, what is saved, and how often each rule breaks its word.

    [bold]Example[/bold]

        swiftsure demo --epsilon 0.02 --n 2000
    """
    import swiftsure as ss
    from swiftsure import checks
    from swiftsure.simulate import Population

    checks.count("draws", draws)
    population = Population(overconfidence=3.0)
    sample = population.sample(n, seed)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"])
    policy = ss.calibrate(record, loss="zero_one", epsilon=epsilon, delta=delta, seed=seed)
    curve = record.curve("gap", "zero_one")
    truth = population.risk(curve.thresholds)
    output.mkdir(parents=True, exist_ok=True)
    policy.save(output / "policy.json")
    ss.report.policy_figure(curve, policy, output / "policy.png")

    tradeoff = []
    for level in sorted({*LEVELS, epsilon}):
        each = ss.calibrate(record, loss="zero_one", epsilon=level, delta=delta, seed=seed)
        full, here = each.certificate.costs["exit"]
        tradeoff.append(
            {
                "epsilon": level,
                "threshold": each.threshold,
                "saved": 100 * (1 - here / full),
                "true_risk": float(truth[each.certificate.index or 0]),
            }
        )
    rules = {
        "trust the confidence: threshold 1 − ε": None,
        "empirical: calibration risk ≤ ε": ss.Control("empirical"),
        "ucb: certified by Swiftsure": ss.Control("ucb"),
    }
    broken = {
        label: _violations(population, rule, curve.thresholds, truth, n, epsilon, delta, draws)
        for label, rule in rules.items()
    }
    if json:
        print_json(
            {
                "sentence": str(policy),
                "threshold": policy.threshold,
                "tradeoff": tradeoff,
                "violations": broken,
            }
        )
        return
    accuracies = ", ".join(f"{100 * a:.0f}" for a in population.accuracies)
    print_text(f"A simulated network with 5 exits, accuracies {accuracies} %, {n:,} samples.\n")
    print_text(str(policy) + "\n", "bold green")
    print_table(
        "What each level buys",
        ["ε", "threshold", "saved %", "true risk"],
        [
            [
                f"{row['epsilon']:g}",
                number(row["threshold"]),
                f"{row['saved']:.1f}",
                f"{row['true_risk']:.4f}",
            ]
            for row in tradeoff
        ],
    )
    print_text("Each row's promise holds by itself: fix ε before you look.\n")
    print_table(
        f"How often the true risk exceeds ε = {epsilon:g}, over {draws} calibration sets",
        ["rule", "broken"],
        [[label, f"{100 * share:.1f} %"] for label, share in broken.items()],
    )
    print_text(f"\nWrote {output / 'policy.json'} and {output / 'policy.png'}")


def _violations(
    population: "Population",  # type: ignore[name-defined]  # noqa: F821
    rule: "ss.Control | None",  # type: ignore[name-defined]  # noqa: F821
    thresholds: np.ndarray,
    truth: np.ndarray,
    n: int,
    epsilon: float,
    delta: float,
    draws: int,
) -> float:
    """Return how often a rule's choice truly exceeds ε."""
    import swiftsure as ss

    if rule is None:
        return float(population.risk([1 - epsilon])[0] > epsilon)
    broken = 0
    for draw in range(draws):
        sample = population.sample(n, 1000 + draw)
        record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"])
        curve = record.curve("gap", "zero_one", path=ss.Path(thresholds, "logit grid"))
        index = rule.indices(curve, np.asarray([epsilon]), delta)[0]
        broken += truth[max(index, 0)] > epsilon
    return broken / draws
