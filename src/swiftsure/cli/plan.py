"""`swiftsure plan`: how many samples a promise needs, and what a budget can promise."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from swiftsure.cli.requests import given, request_of

if TYPE_CHECKING:
    from swiftsure.certify.calibration import Calibration

__all__ = ["plan"]

ALONE = "Without a record"
ASSUMED = "--true-risk --max-loss --disagreement"


def plan(
    context: typer.Context,
    record: Annotated[
        Path | None,
        typer.Argument(
            help="Pilot record, or with --saving the record to calibrate on.", show_default=False
        ),
    ] = None,
    promise: options.Promises = None,
    loss: options.Loss = None,
    epsilon: options.Epsilon = None,
    risk: options.Risk = "gap",
    delta: options.Delta = 0.1,
    control: options.Control = "ucb",
    path: options.Route = None,
    rule: options.Rule = None,
    cost: options.Cost = None,
    request: options.Request = None,
    seed: options.Seed = 0,
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
    true_risk: Annotated[
        float | None,
        optional("True risk of the setting you hope to certify.", default="0", panel=ALONE),
    ] = None,
    max_loss: Annotated[
        float | None, optional("Largest loss, B (2 for Brier).", default="1", panel=ALONE)
    ] = None,
    disagreement: Annotated[
        float | None,
        optional("For gaps: how often the setting differs from the full model.", panel=ALONE),
    ] = None,
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

        swiftsure plan pilot.parquet --promise 'gap zero_one <= 0.02'

        swiftsure plan pilot.parquet --labels 100 --epsilon 0.02

        swiftsure plan record.parquet --loss zero_one --saving 0.4 \
            -o policy.json
    """

    def asked(loss: str | None = None, epsilon: float | None = None) -> "Calibration":
        return request_of(context, [] if record is None else [record], loss, epsilon)

    if record is None:
        pilots = "--saving --output --target --labels --cost --risk --loss --path --rule --seed"
        _refuse(context, pilots, "needs a record")
        losses = (true_risk or 0.0, 1.0 if max_loss is None else max_loss, disagreement)
        _plan_promise(asked(), losses, power, json)
        return
    _refuse(context, ASSUMED, "is for planning without a record")
    import swiftsure as ss

    loaded = ss.load_record(record)
    if labels is not None:
        _refuse(context, "--saving --output --target --power", "is for a plan without --labels")
        _plan_pool(loaded, labels, asked(loss="zero_one"), seed, json)
    elif saving is None:
        _refuse(context, "--output", "needs --saving")
        _plan_sizes(loaded, asked(), target, power, seed, json)
    else:
        _refuse(context, "--target --epsilon --power --seed", "is for a plan without --saving")
        _refuse(context, "--promise --request", "states ε, which --saving finds")
        # A request needs some level; the one that is found takes its place.
        _plan_budget(record, loaded, saving, asked(epsilon=0.5), output, json)


def _refuse(context: typer.Context, options: str, why: str) -> None:
    """Raise if one of these options was given, also with the value that it has by default."""
    for option in options.split():
        if given(context, option.removeprefix("--").replace("-", "_")):
            raise ValueError(f"`{option}` {why}.")


def _plan_promise(
    asked: "Calibration",
    assumed: tuple[float, float, float | None],
    power: float,
    json: bool,
) -> None:
    from swiftsure.losses import LossRange
    from swiftsure.study.planning import samples_needed
    from swiftsure.study.pools import as_request

    epsilon, delta = as_request(asked).risks[0].epsilon, asked.delta
    risk, max_loss, disagreement = assumed
    low = 0.0 if disagreement is None else -max_loss
    declared = LossRange(low, max_loss, whole=max_loss == 1.0)
    found = samples_needed(
        epsilon,
        delta,
        risk=risk,
        power=power,
        loss_range=declared,
        disagreement=disagreement,
        bound=asked.bound,
    )
    if json:
        print_json(vars(found))
        return
    print_text(
        f"{found.n:,} calibration samples certify a risk of at most {epsilon:g} (δ = {delta:g}),"
        f" with at least {100 * power:g} % chance for a setting whose true risk is {risk:g}."
    )
    values = f"0 or {max_loss:g}"
    if disagreement is not None:
        values = f"{low:g}, 0 or {max_loss:g}, not 0 for {disagreement:g} of the samples"
    print_text(
        f"This assumes losses of {values} and the {found.bound} test; other losses may need more"
        " or fewer, which a pilot record shows."
    )
    if found.floor is None:
        return
    print_text(
        f"Even if every loss were 0, the tests here would need {found.floor:,} samples. For gaps,"
        " which can be negative, use --disagreement."
    )


def _plan_sizes(
    pilot: Any,
    asked: "Calibration",
    target: float | None,
    power: float,
    seed: int,
    json: bool,
) -> None:
    from swiftsure.certify.wording import average_sentence
    from swiftsure.study.planning import gain_by_samples

    if len(asked.promises) > 1 or asked.risks[0].within is not None or hasattr(asked.path, "share"):
        if target is not None:
            raise ValueError("`--target` is for one promise over all samples.")
        _plan_together(pilot, asked, power, seed, json)
        return
    found = gain_by_samples(pilot, asked, target=target or 0.0, power=power, seed=seed)
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
    epsilon = asked.risks[0].epsilon
    print_table(
        f"Calibration sets drawn from the pilot, ε = {epsilon:g}, δ = {asked.delta:g}",
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


def _plan_together(pilot: Any, asked: "Calibration", power: float, seed: int, json: bool) -> None:
    """Plan for all that a request promises."""
    found = asked.plan(pilot, power=power, seed=seed, progress=False if json else None)
    if json:
        print_json({k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(found).items()})
        return
    print_table(
        f"Calibration sets drawn from the pilot: {asked}",
        ["samples", "saved on average", "certify anything"],
        [
            [f"{n:,}", f"{100 * saved:.1f} %", f"{100 * share:.0f} %"]
            for n, saved, share in zip(found.sizes, found.saving, found.certified, strict=True)
        ],
    )
    enough = f"{found.n:,} certify" if found.n else "None of these sizes certifies"
    print_text(f"{enough} anything with {100 * power:g} % chance.")
    print_text("This estimate is only as good as the pilot. Calibrate on samples not in it.")


def _plan_pool(pilot: Any, labels: int, asked: "Calibration", seed: int, json: bool) -> None:
    import swiftsure as ss

    found = ss.planning.unlabelled_pool(labels, asked, pilot, seed=seed)
    if json:
        print_json({k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(found).items()})
        return
    print_table(
        f"{labels:,} labels among unlabelled samples, ε = {found.epsilon:g}, δ = {found.delta:g}",
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
    file: Path,
    record: Any,
    saving: float,
    asked: "Calibration",
    output: Path | None,
    json: bool,
) -> None:
    from swiftsure.study.budgets import Budget, lowest_epsilon

    check_outputs(output)
    if asked.control.name != "ucb" or asked.control.zero_bounded:
        raise ValueError("`--control` must be ucb, with any bound, for --saving.")
    promise = asked.risks[0]
    found = lowest_epsilon(
        record,
        Budget(saving=saving, cost=asked.cost),
        promise.risk,
        promise.loss,
        delta=asked.delta,
        bound=asked.bound,
        path=asked.path,  # type: ignore[arg-type]
        rule=asked.rule,
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
    else:
        _print_budget(found, saving)
        print_drawn_seed(file, found.policy)
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
