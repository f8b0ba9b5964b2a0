"""`swiftsure simulate`: check promises on a simulated network whose risk is known exactly."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from swiftsure.cli import options
from swiftsure.cli.output import number, print_json, print_policy, print_table, print_text, rate

__all__ = ["simulate"]

LEVELS = (0.01, 0.02, 0.05, 0.1)


def simulate(
    n: Annotated[int, typer.Option("--n", help="Number of calibration samples.")] = 1000,
    epsilon: Annotated[float, typer.Option(help="Largest risk allowed.")] = 0.05,
    delta: options.Delta = 0.1,
    draws: Annotated[
        int, typer.Option(help="Number of calibration sets drawn to test the promise.")
    ] = 300,
    seed: options.Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the policy and figure.")
    ] = Path("results/simulation"),
    json: options.Json = False,
) -> None:
    """Calibrate a simulated network and check the promise exactly.

    The network has five exits, and its risk at each threshold is known
    exactly. The tables show what is promised and saved, and how often
    each way of choosing the threshold exceeds ε.

    [bold]Example[/bold]

        swiftsure simulate --epsilon 0.02 --n 2000
    """
    import swiftsure as ss
    from swiftsure._lib import checks
    from swiftsure.certify.wording import percent
    from swiftsure.curves.sample_order import SampleOrder
    from swiftsure.study.simulate import Population

    checks.count("draws", draws)
    population = Population(overconfidence=3.0)
    sample = population.sample(n, seed)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"])
    record = replace(record, order=SampleOrder.of(seed))
    policy = ss.calibrate(record, loss="zero_one", epsilon=epsilon, delta=delta)
    curve = record.curve("gap", "zero_one")
    truth = population.risk(curve.thresholds)
    output.mkdir(parents=True, exist_ok=True)
    policy.save(output / "policy.json")
    ss.report.policy_figure(curve, policy, output / "policy.png")

    tradeoff = []
    for level in sorted({*LEVELS, epsilon}):
        each = ss.calibrate(record, loss="zero_one", epsilon=level, delta=delta)
        full, here = each.certificate.costs.means["exit"]
        risk = float(truth[each.certificate.index or 0])
        tradeoff.append(
            {
                "epsilon": level,
                "threshold": each.threshold,
                "saved": 100 * (1 - here / full),
                "true_risk": risk,
                "within_epsilon": risk <= level,
            }
        )
    risks = {"trust the confidence: threshold 1 − ε": population.risk([1 - epsilon])}
    risks |= _true_risks(population, curve.thresholds, truth, n, epsilon, delta, draws, seed)
    if json:
        print_json(
            {
                "sentence": str(policy),
                "threshold": policy.threshold,
                "tradeoff": tradeoff,
                "violations": {
                    rule: float((each > epsilon).mean()) for rule, each in risks.items()
                },
                "mean_risk": {rule: float(each.mean()) for rule, each in risks.items()},
            }
        )
        return
    accuracies = ", ".join(f"{100 * a:.0f}" for a in population.accuracies)
    print_text(f"A simulated network with 5 exits, accuracies {accuracies} %, {n:,} samples.\n")
    print_policy(policy)
    print_table(
        "Savings at each level",
        ["ε", "threshold", "saved %", "true risk", "≤ ε"],
        [
            [
                f"{row['epsilon']:g}",
                number(row["threshold"]),
                f"{row['saved']:.1f}",
                f"{row['true_risk']:.4f}",
                "yes" if row["within_epsilon"] else "no",
            ]
            for row in tradeoff
        ],
    )
    if not all(row["within_epsilon"] for row in tradeoff):
        print_text(
            f'"no": by bad luck with these {n:,} samples, the true risk is above ε. The promise'
            f" allows that for at most {percent(delta)} of calibration sets (δ = {delta:g})."
        )
    print_text("Each row's promise holds on its own, so fix ε before you look.")
    print_table(
        f"The same with {draws:,} other calibration sets, ε = {epsilon:g}",
        ["rule", "true risk > ε", "mean true risk"],
        [
            [rule, _format_rate(each > epsilon), f"{each.mean():.4f}"]
            for rule, each in risks.items()
        ],
    )
    print_text(
        "crc promises that the mean over sets is at most ε; ucb promises that at"
        f" most {percent(delta)} of the sets end above ε (δ = {delta:g}). The others promise"
        " nothing."
    )
    print_text(f"\nWrote {output / 'policy.json'} and {output / 'policy.png'}")


def _true_risks(
    population: "Population",  # type: ignore[name-defined]  # noqa: F821
    thresholds: np.ndarray,
    truth: np.ndarray,
    n: int,
    epsilon: float,
    delta: float,
    draws: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Return the true risk of each rule's choice, for many calibration sets."""
    import swiftsure as ss

    rules = {
        "empirical: calibration risk ≤ ε": ss.Control("empirical"),
        "crc: certified on average": ss.Control("crc"),
        "ucb: certified with probability 1 − δ": ss.Control("ucb"),
    }
    path = ss.Path(thresholds, "logit grid")
    risks = np.empty((len(rules), draws))
    for draw, source in enumerate(np.random.default_rng(seed).spawn(draws)):
        sample = population.sample(n, source)
        record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"])
        curve = record.curve("gap", "zero_one", path=path)
        for k, rule in enumerate(rules.values()):
            index = rule.indices(curve, np.asarray([epsilon]), delta)[0]
            risks[k, draw] = truth[max(index, 0)]
    return dict(zip(rules, risks, strict=True))


def _format_rate(broken: np.ndarray) -> str:
    """Format a rate with its interval; "always" or "never" for a rule without randomness."""
    from swiftsure.study.results import Rates

    if len(broken) == 1:
        return "always" if broken[0] else "never"
    found = Rates.of(broken.sum(), len(broken))
    return rate(float(found), float(found.low), float(found.high))
