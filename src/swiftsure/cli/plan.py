"""`swiftsure plan`: how many samples a promise needs, and what a budget can promise."""

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import (
    check_outputs,
    number,
    print_drawn_seed,
    print_json,
    print_policy,
    print_table,
    print_text,
)

__all__ = ["plan"]


def plan(
    context: typer.Context,
    record: Annotated[
        Path | None,
        typer.Argument(
            help="Pilot record, or with --saving the record to calibrate on.", show_default=False
        ),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Largest risk allowed.")] = 0.05,
    delta: options.Delta = 0.1,
    true_risk: Annotated[
        float | None, optional("True risk of the setting you hope to certify.", default="0")
    ] = None,
    max_loss: Annotated[
        float | None, optional("Largest loss, B (2 for Brier).", default="1")
    ] = None,
    disagreement: Annotated[
        float | None, optional("For gaps: how often the setting differs from the full model.")
    ] = None,
    power: Annotated[float, typer.Option(help="Probability of certifying that setting.")] = 0.9,
    saving: Annotated[
        float | None, optional("Fraction of the cost to save; finds the lowest ε.")
    ] = None,
    labels: Annotated[
        int | None, optional("Budget of labels: finds how many unlabelled samples to take.")
    ] = None,
    target: Annotated[
        float | None, optional("Saving to reach, in %; adds a column to the table.")
    ] = None,
    cost: Annotated[str | None, optional("Which cost, if the record has several.")] = None,
    risk: options.Risk = "gap",
    loss: options.Loss = None,
    score: options.Score = None,
    bound: options.Bound = "auto",
    average: options.Average = None,
    max_group_size: options.MaxGroupSize = None,
    seed: options.OrderSeed = None,
    output: Annotated[
        Path | None, optional("With --saving: write the policy to this file.", "--output", "-o")
    ] = None,
    json: options.Json = False,
) -> None:
    r"""Compute how many samples a promise needs, or what a budget allows.

    Without a record, it prints how many samples the promise needs. With
    a pilot record, it prints what calibration sets of several sizes would
    save; with --labels, what that many labels would save among pools of
    several sizes. With a record and --saving, it finds the lowest ε that
    can be certified for that saving.

    [bold]Examples[/bold]

        swiftsure plan --epsilon 0.01 --delta 0.1

        swiftsure plan pilot.parquet --loss zero_one --epsilon 0.02

        swiftsure plan pilot.parquet --labels 100 --epsilon 0.02

        swiftsure plan record.parquet --loss zero_one --saving 0.4 \
            -o policy.json
    """
    counted: dict[str, Any] = {"average": average, "max_group_size": max_group_size}
    shared: dict[str, Any]
    groups, alone = "--average --max-group-size", "--true-risk --max-loss --disagreement"
    if record is None:
        pilots = "--saving --output --target --labels --cost --risk --loss --score --seed"
        _refuse(context, pilots, "needs a record")
        _refuse(context, groups, "needs a record with groups")
        bound_b = 1.0 if max_loss is None else max_loss
        _plan_promise(epsilon, delta, true_risk or 0.0, bound_b, disagreement, power, bound, json)
    elif labels is not None:
        unused = f"{alone} --saving --output --target {groups} --risk --bound --power"
        _refuse(context, unused, "does not go with --labels")
        shared = {"loss": loss or "zero_one", "score": score, "cost": cost, "seed": seed or 0}
        _plan_pool(record, labels, epsilon, delta, shared, json)
    elif saving is None:
        _refuse(context, f"{alone} --bound", "is for planning without a record")
        _refuse(context, "--output", "needs --saving")
        shared = {"risk": risk, "loss": loss, "score": score, "cost": cost}
        _plan_sizes(record, epsilon, delta, target, power, seed or 0, shared | counted, json)
    else:
        _refuse(context, alone, "is for planning without a record")
        _refuse(context, "--target --epsilon --power", "does not go with --saving")
        shared = {"risk": risk, "loss": loss, "score": score, "cost": cost, "bound": bound}
        _plan_budget(record, saving, delta, seed, shared | counted, output, json)


def _refuse(context: typer.Context, options: str, why: str) -> None:
    """Raise if one of these options was given, also with the value that it has by default."""
    for option in options.split():
        source = context.get_parameter_source(option.removeprefix("--").replace("-", "_"))
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"`{option}` {why}.")


def _plan_promise(
    epsilon: float,
    delta: float,
    risk: float,
    max_loss: float,
    disagreement: float | None,
    power: float,
    bound: str,
    json: bool,
) -> None:
    from swiftsure.losses import LossRange
    from swiftsure.study.planning import samples_needed

    low = 0.0 if disagreement is None else -max_loss
    declared = LossRange(low, max_loss, whole=max_loss == 1.0)
    found = samples_needed(
        epsilon,
        delta,
        risk=risk,
        power=power,
        loss_range=declared,
        disagreement=disagreement,
        bound=bound,
    )
    if json:
        print_json(vars(found))
        return
    print_text(
        f"{found.n:,} calibration samples certify a risk of at most {epsilon:g} (δ = {delta:g}),"
        f" with at least {100 * power:g} % chance for a setting whose true risk is {risk:g}."
    )
    assumed = f"0 or {max_loss:g}"
    if disagreement is not None:
        assumed = f"{low:g}, 0 or {max_loss:g}, not 0 for {disagreement:g} of the samples"
    print_text(
        f"This assumes losses of {assumed} and the {found.bound} test; other losses may need more"
        " or fewer, which a pilot record shows."
    )
    if found.floor is None:
        return
    print_text(
        f"Even if every loss were 0, the tests here would need {found.floor:,} samples. For gaps,"
        " which can be negative, use --disagreement."
    )


def _plan_sizes(
    record: Path,
    epsilon: float,
    delta: float,
    target: float | None,
    power: float,
    seed: int,
    shared: dict[str, Any],
    json: bool,
) -> None:
    import swiftsure as ss
    from swiftsure.certify.wording import average_sentence

    found = ss.planning.gain_by_samples(
        ss.load_record(record),
        epsilon=epsilon,
        delta=delta,
        target=target or 0.0,
        power=power,
        seed=seed,
        **shared,
    )
    if json:
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(found).items()}
        print_json({"n": found.n, **plain})
        return
    columns = {
        found.unit: [f"{n:,}" for n in found.sizes],
        "saved on average": [f"{gain:.1f} %" for gain in found.gain],
        "certify anything": [f"{100 * share:.0f} %" for share in found.certified],
    }
    if target is not None:
        columns[f"save {target:g} %"] = [f"{100 * share:.0f} %" for share in found.reached]
    print_table(
        f"Calibration sets drawn from the pilot, ε = {epsilon:g}, δ = {delta:g}",
        list(columns),
        list(zip(*columns.values(), strict=True)),
    )
    if target is not None:
        reached = f"{found.n:,} {found.unit} reach" if found.n else "None of these sizes reaches"
        print_text(f"{reached} a saving of {target:g} % with {100 * power:g} % chance.")
    if found.unit != "samples":
        print_text(average_sentence(found.unit, found.average))
    print_text(
        f"This estimate is only as good as the pilot. Calibrate on {found.unit} that are not in it."
    )


def _plan_pool(
    record: Path, labels: int, epsilon: float, delta: float, shared: dict[str, Any], json: bool
) -> None:
    import swiftsure as ss

    pilot = ss.load_record(record)
    found = ss.planning.unlabelled_pool(labels, epsilon, pilot, delta=delta, **shared)  # type: ignore[arg-type]
    if json:
        print_json({k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(found).items()})
        return
    print_table(
        f"{labels:,} labels among unlabelled samples, ε = {epsilon:g}, δ = {delta:g}",
        ["samples", "saved on average", "certify anything"],
        [
            [f"{n:,}", f"{gain:.1f} %", f"{100 * share:.0f} %"]
            for n, gain, share in zip(found.sizes, found.gain, found.certified, strict=True)
        ],
    )
    print_text(f"Take {found.n:,} unlabelled samples that are not in the pilot.")
    if not found.labelled_pilot:
        print_text(
            "The pilot lacks labels: where an exit and the full model disagree, the full model was"
            " assumed to be right in half of the cases, and the exit in a quarter."
        )


def _plan_budget(
    record: Path,
    saving: float,
    delta: float,
    seed: int | None,
    shared: dict[str, Any],
    output: Path | None,
    json: bool,
) -> None:
    import swiftsure as ss

    check_outputs(output)
    loaded = ss.load_record(record)
    found = ss.planning.lowest_epsilon(loaded, saving=saving, delta=delta, seed=seed, **shared)
    if output is not None:
        found.policy.save(output)
    if json:
        print_json(
            {
                **{k: v for k, v in vars(found).items() if k != "policy"},
                "sentence": str(found.policy),
            }
        )
    else:
        _print_budget(found, saving)
        print_drawn_seed(record, found.policy)
        if output is not None:
            print_text(f"Wrote {output}")
    if found.epsilon is None:
        raise typer.Exit(1)


def _print_budget(found: Any, saving: float) -> None:
    from swiftsure.certify.wording import percent

    largest = found.policy.certificate.promises[0].loss_range[1]
    if found.epsilon is None:
        print_text(
            f"No level can be certified for a saving of {percent(saving)}: none below {largest:g},"
            " the largest loss. More samples may help."
        )
        return
    saved = 1 - found.cost / found.full_cost
    print_text(
        f"Saving {100 * saved:.1f} %, the lowest certified level is ε = {number(found.epsilon)}"
        f" (threshold {number(found.threshold)})."
    )
    if saved < saving - 0.0005:  # less, even after rounding for print
        unit = found.policy.certificate.samples.unit.removesuffix("s")
        others = f"1 {unit}" if found.n_choice == 1 else f"{found.n_choice:,} {unit}s"
        print_text(
            f"That is less than the {percent(saving)} asked for: the setting was chosen on"
            f" {others}, where it saves that much, and judged on {found.n_bound:,} others."
        )
    if found.epsilon > largest / 2:
        print_text(
            f"A level of {number(found.epsilon)} is hardly a promise: no loss exceeds {largest:g}"
            " anyway. More samples may lower it."
        )
    print_policy(found.policy)
