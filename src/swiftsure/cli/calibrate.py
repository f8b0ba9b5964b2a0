"""`swiftsure calibrate`: calibrate a policy on a record."""

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

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate
    from swiftsure.certify.control import Control
    from swiftsure.certify.policy import Policy
    from swiftsure.certify.slices import SlicedPolicy
    from swiftsure.curves.risks import Risk

__all__ = ["calibrate"]


def calibrate(
    record: options.RecordFile,
    risk: options.Risk = "gap",
    loss: options.Loss = None,
    epsilon: Annotated[float, typer.Option(help="Largest risk allowed.")] = 0.05,
    delta: options.Delta = 0.1,
    control: Annotated[str, typer.Option(help="ucb, ltt, crc or empirical, with options.")] = "ucb",
    bound: options.Bound = "auto",
    score: options.Score = None,
    path: options.Path_ = None,
    pilot: Annotated[
        Path | None, optional("Learn the path on this record of other samples, instead of --path.")
    ] = None,
    split: Annotated[
        float | None,
        optional("Learn it on this many of the record's samples, or fraction, drawn at random."),
    ] = None,
    cost: Annotated[str | None, optional("Which cost to save, if the record has several.")] = None,
    and_: Annotated[
        list[str] | None,
        typer.Option(
            "--and", metavar="<str>", help="Another risk to keep, RISK:LOSS:EPSILON; repeatable."
        ),
    ] = None,
    above: Annotated[
        float | None, optional("Bound the probability of a loss above this, not the mean loss.")
    ] = None,
    worst: Annotated[
        float | None, optional("Bound the mean loss of this share of the samples, the worst.")
    ] = None,
    max_cost: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Largest mean cost, NAME=VALUE; repeatable."),
    ] = None,
    slices: Annotated[
        bool, typer.Option("--slices", help="Keep the risk in every slice of the record at once.")
    ] = False,
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Another dataset, NAME=FILE: a slice; repeatable."),
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="With slices: choose a threshold for each.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="With --own: each promise alone holds, not all at once.")
    ] = False,
    weights: Annotated[
        str | None, optional("Weights of slices in production, SLICE=WEIGHT,SLICE=WEIGHT,…")
    ] = None,
    max_weight: Annotated[float | None, optional("The largest possible weight.")] = None,
    estimated_weights: Annotated[
        bool, typer.Option("--estimated-weights", help="The weights were estimated.")
    ] = False,
    pool: Annotated[int | None, optional("Size of the finite pool the samples came from.")] = None,
    missing: Annotated[
        str,
        typer.Option(
            help="If a needed label is missing: raise, worst (assume the worst loss), or stop"
            " (before the first setting that lacks a label)."
        ),
    ] = "raise",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit only above the threshold, not at it.")
    ] = False,
    min_exit: Annotated[
        int, typer.Option(help="First exit that may be taken, counted from 0.")
    ] = 0,
    average: options.Average = None,
    max_group_size: options.MaxGroupSize = None,
    seed: options.OrderSeed = None,
    state: Annotated[
        Path | None,
        optional("Calibration that grows: add the record to this file, and certify what it holds."),
    ] = None,
    horizon: Annotated[
        int | None,
        optional("With --state: samples that the bets are tuned for.", default="1000"),
    ] = None,
    output: Annotated[Path | None, optional("Write the policy here.", "--output", "-o")] = None,
    figure: Annotated[Path | None, optional("Draw the risk curve here.")] = None,
    json: options.Json = False,
) -> None:
    r"""Find the fastest setting whose risk is at most ε, and certify it.

    The exit status is 1 if nothing faster than the full model can be
    certified; the policy is still written, and runs the full model.

    With --state, the samples are added to those of earlier runs, and the
    promise holds at every moment, however often you look. All options
    must stay the same. Adding a record twice changes nothing.

    The record may be a folder of Parquet files with any number of
    samples. It is read a part at a time, with temporary files in the
    folder that the environment variable TMPDIR names.

    Write a control's options after its name, each after a colon:

        all        zero_bounded
        ucb, ltt   bound=NAME
        ltt        correction=bonferroni
        crc        method=ucb, with bound=NAME and delta_prime=NUMBER;
                   monotone=false; selection=contiguous or paper

    For a record of several dials, --split sets some samples aside as a
    pilot, which finds the settings to test; the others certify them.

    [bold]Examples[/bold]

        swiftsure calibrate record.parquet --loss zero_one \
            --epsilon 0.02 -o policy.json

        swiftsure calibrate dials.parquet --split 200 --risk consistency

        swiftsure calibrate record.parquet --loss brier \
            --control ltt:zero_bounded:bound=wsr --strict

        swiftsure calibrate users.parquet --loss zero_one \
            --average sample --max-group-size 4

        swiftsure calibrate record.parquet --loss zero_one \
            --state growing.state -o policy.json

        swiftsure calibrate tenants.parquet --loss zero_one --slices --own
    """
    import swiftsure as ss
    from swiftsure.records import open_record
    from swiftsure.report.figures import figure_kind

    check_outputs(output, figure)
    if figure is not None:
        figure_kind(figure)
    whole = state is not None or slices or dataset is not None or weights is not None
    read = ss.load_record if whole or path == "breakpoints" else open_record
    loaded: Any = read(record)
    exits: dict[str, Any] = {"missing": missing, "strict": strict, "min_exit": min_exit}
    counted: dict[str, Any] = {"average": average, "max_group_size": max_group_size}
    split = _count_or_share(split, path, pilot)
    route = _route(record, path, pilot, risk, loss, score, cost)
    promised: dict[str, Any] = {
        "max_costs": None if max_cost is None else _numbers("--max-cost", max_cost),
        "weights": None if weights is None else _numbers("--weights", weights.split(",")),
        "max_weight": max_weight,
        "estimated_weights": estimated_weights,
    }
    risks = [
        ss.Risk(risk, loss, epsilon, above, worst),
        *(_parse_risk(text) for text in and_ or []),
    ]
    if state is not None:
        given = {
            "--control": control != "ucb",
            "--bound": bound != "auto",
            "--pool": pool is not None,
            "--split": split is not None,
            "--cost": cost is not None,
            "--average": average not in (None, "group"),
            "--max-group-size": max_group_size is not None,
            "--seed": seed is not None,
            "--figure": figure is not None,
            "--max-cost": max_cost is not None,
            "--weights": weights is not None,
            "--max-weight": max_weight is not None,
            "--slices": slices or dataset is not None,
            "--own": own,
            "--alone": alone,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"`{name}` does not go with --state.")
        policy = _grown(record, loaded, state, horizon, risks, delta, score, route, exits)
        _show(record, policy, [output], json)
        return
    if slices or dataset is not None:
        for name, is_given in {
            "--max-cost": max_cost is not None,
            "--weights": weights is not None,
            "--pool": pool is not None,
            "--split": split is not None,
            "--cost": cost is not None,
            "--max-weight": max_weight is not None,
            "--average": average is not None,
            "--max-group-size": max_group_size is not None,
            "--figure": figure is not None,
            "--horizon": horizon is not None,
        }.items():
            if is_given:
                raise ValueError(f"`{name}` does not go with slices.")
        sliced = ss.calibrate_slices(
            _datasets(record, loaded, dataset) if dataset is not None else loaded,
            own=own,
            together=not alone,
            delta=delta,
            risks=risks,
            control=control,
            bound=bound,
            path=route,
            seed=seed,
            score=score,
            **(exits if isinstance(loaded, ss.ExitRecord) else {}),
        )
        _show_slices(sliced, output, json)
        return
    if own or alone:
        raise ValueError("`--own` and `--alone` need --slices or --dataset.")
    if horizon is not None:
        raise ValueError("`--horizon` goes with --state.")
    policy = ss.calibrate(
        loaded,
        risks=risks,
        control=_rule(control, bound),
        delta=delta,
        path=route,
        split=split,
        seed=seed,
        score=score,
        pool=pool,
        cost=cost,
        **exits,
        **counted,
        **promised,
    )
    if figure is not None:
        if policy.certificate.samples.max_weight is not None:
            raise ValueError("`--figure` cannot show a promise about weighted samples.")
        shown: dict[str, Any] = {"score": score, **counted}
        if not isinstance(loaded, ss.ThresholdRecord):
            shown |= exits
        curve = _curve(loaded, risks, route, split, seed, cost, shown)
        ss.report.policy_figure(curve.transformed(above, worst), policy, figure)
    _show(record, policy, [output, figure], json)


def _rule(control: str, bound: str) -> "Control":
    """Return the control; raise if it does not use the bound that is given for it."""
    rule = options.parse_control(control, bound)
    if bound != "auto" and not rule.uses_bound:
        raise ValueError(f"`--bound` is not used by {rule.name}; leave it out.")
    return rule


def _show(record: Path, policy: "Policy", targets: list[Path | None], json: bool) -> None:
    """Save and print a policy; the first target is its file."""
    if targets[0] is not None:
        policy.save(targets[0])
    if json:
        print_json(policy.model_dump(mode="json") | {"sentence": str(policy)})
    else:
        print_policy(policy)
        _print_tables(policy.certificate)
        print_drawn_seed(record, policy)
        for target in targets:
            if target is not None:
                print_text(f"Wrote {target}")
    if policy.runs_full_model:
        raise typer.Exit(1)


def _grown(
    file: Path,
    record: Any,
    state: Path,
    horizon: int | None,
    risks: "list[Risk]",
    delta: float,
    score: str | None,
    route: Any,
    exits: dict[str, Any],
) -> "Policy":
    """Add a record to a calibration that grows, unless it holds it already."""
    from swiftsure.certify.anytime.calibration import HORIZON, GrowingCalibration
    from swiftsure.certify.anytime.state import known_again
    from swiftsure.records.files import keeps_order

    if not keeps_order(file):
        raise ValueError(
            f"`record` must be a Parquet file for --state, so that adding it twice is noticed: run"
            f" swiftsure convert {file} -o record.parquet first."
        )
    if not known_again(record):
        raise ValueError(
            "`record` must have a seed that was drawn at random, or ids of its own, for --state:"
            " otherwise adding it twice is not noticed."
        )
    calibration = GrowingCalibration(
        risks=risks,
        delta=delta,
        horizon=HORIZON if horizon is None else horizon,
        path=route,
        score=score,
        state=state,
        **exits,
    )
    if calibration.has(record):
        typer.echo(f"swiftsure: {state} holds {file} already; nothing was added.", err=True)
    else:
        calibration.update(record)
    return calibration.policy()


def _count_or_share(split: float | None, path: str | None, pilot: Path | None) -> float | None:
    """Return a split as an integer if it is one: a number of samples, not a share of them."""
    if split is None:
        return None
    if path is not None or pilot is not None:
        raise ValueError("`--split` learns the path, so it does not go with --path or --pilot.")
    return int(split) if split.is_integer() else split


def _curve(
    record: Any,
    risks: list[Any],
    path: Any,
    split: float | None,
    seed: int | None,
    cost: str | None,
    options: dict[str, Any],
) -> Any:
    """Return the curve of the first risk, of the samples that calibrated."""
    from swiftsure.certify.calibration import set_aside

    if split is not None:
        record, path = set_aside(record, split, seed, risks, cost, options)
    return record.curve(risks[0].risk, risks[0].loss, path=path, **options)


def _route(
    record: Path,
    path: str | None,
    pilot: Path | None,
    risk: str,
    loss: str | None,
    score: str | None,
    cost: str | None,
) -> Any:
    """Return the path: given, or learned on a pilot."""
    import swiftsure as ss

    if pilot is None:
        return options.parse_path(path)
    if path is not None:
        raise ValueError("`--pilot` learns the path, so it does not go with --path.")
    if pilot.exists() and pilot.samefile(record):
        raise ValueError("`--pilot` must hold other samples than the record, not the same file.")
    others = ss.load_record(pilot)
    if isinstance(others, ss.ThresholdRecord):
        return ss.Path.pareto(others, risk, loss, cost=cost)
    return ss.Path.learned(others, loss, score=score, cost=cost)


def _numbers(option: str, texts: list[str]) -> dict[str, float]:
    """Parse NAME=VALUE."""
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"`{option}` must be NAME=NUMBER, but got {text!r}.")
    return found


def _datasets(file: Path, loaded: Any, given: list[str]) -> dict[str, Any]:
    """Return the record and the other datasets by name."""
    import swiftsure as ss

    found = {file.stem: loaded}
    for text in given:
        name, _, other = text.partition("=")
        if not other or name in found:
            raise ValueError(f"`--dataset` must be a new NAME=FILE, but got {text!r}.")
        found[name] = ss.load_record(Path(other))
    return found


def _show_slices(policy: "SlicedPolicy", output: Path | None, json: bool) -> None:
    """Save and print the policies of slices."""
    if output is not None:
        policy.save(output)
    if json:
        print_json(policy.model_dump(mode="json") | {"sentence": str(policy)})
    else:
        print_table(
            "Slices",
            ["slice", "samples", "threshold", "on calibration"],
            [
                [
                    name,
                    f"{each.certificate.samples.n:,}",
                    number(each.threshold),
                    number(each.certificate.promises[0].calibration_risk),
                ]
                for name, each in policy.policies.items()
            ],
        )
        print_text(str(policy))
        if output is not None:
            print_text(f"Wrote {output}")
    if policy.runs_full_model:
        raise typer.Exit(1)


def _print_tables(certificate: "Certificate") -> None:
    """Print tables of risks and costs and, for grouped samples, what they average over."""
    from swiftsure.certify.wording import average_sentence, average_words

    how = average_words(certificate.samples.unit, certificate.samples.average)
    print_table(
        "Risks",
        ["risk", "level", "on calibration", "upper bound", "bound"],
        [
            [
                p.name + (f" ({how})" if how else ""),
                number(p.epsilon),
                number(p.calibration_risk),
                "–" if p.upper_bound is None else number(p.upper_bound),
                p.bound or "–",
            ]
            for p in certificate.promises
        ],
    )
    if certificate.costs.means:
        print_table(
            "Costs",
            ["cost", "full model", "policy", "saved"],
            [
                [
                    name,
                    number(full),
                    number(here),
                    f"{100 * (1 - here / full):.1f} %" if full else "–",
                ]
                for name, (full, here) in certificate.costs.means.items()
            ],
        )
    if how:
        print_text(average_sentence(certificate.samples.unit, certificate.samples.average))


def _parse_risk(text: str) -> "ss.Risk":  # type: ignore[name-defined]  # noqa: F821
    import swiftsure as ss

    parts = text.split(":")
    try:
        kind, loss, level = parts
        return ss.Risk(kind, loss, epsilon=float(level))
    except ValueError:
        raise ValueError(
            f"`--and` must be RISK:LOSS:EPSILON, such as consistency:brier:0.05, but got {text!r}."
        ) from None
