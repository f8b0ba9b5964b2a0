"""`swiftsure plan`: how many samples a promise needs, and what a budget can promise."""

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.output import number, print_json, print_table, print_text

__all__ = ["plan"]


def plan(
    record: Annotated[
        Path | None,
        typer.Argument(help="A pilot record, if there is one.", show_default=False),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Largest risk allowed.")] = 0.05,
    delta: options.Delta = 0.1,
    true_risk: Annotated[
        float | None,
        typer.Option(help="Risk that a setting worth certifying really has.", show_default="0"),
    ] = None,
    loss_bound: Annotated[
        float | None, typer.Option(help="Largest loss, B (2 for Brier).", show_default="1")
    ] = None,
    power: Annotated[float, typer.Option(help="How sure to be that it is certified.")] = 0.9,
    saving: Annotated[
        float | None,
        typer.Option(help="Share of the cost to save: find the lowest ε.", show_default=False),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Saving in % to reach, for the table.", show_default="0"),
    ] = None,
    cost: Annotated[str | None, typer.Option(help="Which cost.", show_default=False)] = None,
    risk: options.Risk = "gap",
    loss: options.Loss = None,
    score: options.Score = None,
    bound: options.Bound = "auto",
    seed: options.Seed = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the budget's policy here.", show_default=False),
    ] = None,
    json: options.Json = False,
) -> None:
    """Say how many calibration samples a promise needs, or what a compute budget can promise.

    Without a record: from the promise alone. With a pilot record: the saving that calibration sets
    of several sizes would give. With a record and --saving: the lowest ε that can be certified.

    [bold]Examples[/bold]

        swiftsure plan --epsilon 0.01 --delta 0.1

        swiftsure plan pilot.parquet --loss zero_one --epsilon 0.02

        swiftsure plan record.parquet --loss zero_one --saving 0.4 -o policy.json
    """
    given = {"--saving": saving, "--output": output, "--target": target}
    given |= {"--true-risk": true_risk, "--loss-bound": loss_bound}
    if record is None:
        _refuse(given, ("--saving", "--output", "--target"), "needs a record")
        bound_b = 1.0 if loss_bound is None else loss_bound
        _promise(epsilon, delta, true_risk or 0.0, bound_b, power, json)
    elif saving is None:
        _refuse(given, ("--true-risk", "--loss-bound"), "is for planning without a record")
        _refuse(given, ("--output",), "needs --saving")
        shared: dict[str, Any] = {"risk": risk, "loss": loss, "score": score, "cost": cost}
        _sizes(record, epsilon, delta, target or 0.0, power, seed, shared, json)
    else:
        _refuse(given, ("--true-risk", "--loss-bound"), "is for planning without a record")
        _refuse(given, ("--target",), "does not go with --saving")
        shared = {"risk": risk, "loss": loss, "score": score, "cost": cost, "bound": bound}
        _budget(record, saving, delta, seed, shared, output, json)


def _refuse(given: dict[str, Any], options: tuple[str, ...], why: str) -> None:
    for option in options:
        if given[option] is not None:
            raise ValueError(f"`{option}` {why}.")


def _promise(
    epsilon: float, delta: float, risk: float, loss_bound: float, power: float, json: bool
) -> None:
    from swiftsure.planning import samples_needed

    found = samples_needed(epsilon, delta, risk=risk, power=power, loss_range=(0, loss_bound))
    if json:
        print_json(vars(found))
        return
    print_text(
        f"{found.n:,} calibration samples certify a risk of at most {epsilon:g} with probability"
        f" {1 - delta:g}, if the setting's true risk is {risk:g} (with {100 * power:g} % chance)."
    )
    print_text(f"Fewer than {found.floor:,} certify nothing, whatever the method.")


def _sizes(
    record: Path,
    epsilon: float,
    delta: float,
    target: float,
    power: float,
    seed: int,
    shared: dict[str, Any],
    json: bool,
) -> None:
    import swiftsure as ss

    found = ss.planning.gain_by_samples(
        ss.load_record(record),
        epsilon=epsilon,
        delta=delta,
        target=target,
        power=power,
        seed=seed,
        **shared,
    )
    if json:
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(found).items()}
        print_json({"n": found.n, **plain})
        return
    print_table(
        f"Calibration sets drawn from the pilot, ε = {epsilon:g}, δ = {delta:g}",
        ["samples", "mean gain %", "certify anything", f"save {target:g} %"],
        [
            [f"{n:,}", f"{gain:.1f}", f"{100 * some:.0f} %", f"{100 * enough:.0f} %"]
            for n, gain, some, enough in zip(
                found.sizes, found.gain, found.certified, found.reached, strict=True
            )
        ],
    )
    if target:
        reached = f"{found.n:,} samples reach" if found.n else "None of these sizes reaches"
        print_text(f"{reached} a saving of {target:g} % with {100 * power:g} % chance.")


def _budget(
    record: Path,
    saving: float,
    delta: float,
    seed: int,
    shared: dict[str, Any],
    output: Path | None,
    json: bool,
) -> None:
    import swiftsure as ss

    found = ss.planning.lowest_epsilon(
        ss.load_record(record), saving=saving, delta=delta, seed=seed, **shared
    )
    if output is not None:
        found.policy.save(output)
    if json:
        print_json(
            {
                **{k: v for k, v in vars(found).items() if k != "policy"},
                "sentence": str(found.policy),
            }
        )
    elif found.epsilon is None:
        print_text(f"No level can be certified for a saving of {100 * saving:g} %.")
    else:
        print_text(
            f"Saving {100 * (1 - found.cost / found.full_cost):.1f} %, the lowest certified level"
            f" is ε = {number(found.epsilon)} (threshold {number(found.threshold)})."
        )
        print_text(str(found.policy))
    if found.epsilon is None:
        raise typer.Exit(1)
