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
from swiftsure.cli.requests import request_of

if TYPE_CHECKING:
    from swiftsure.certify.calibration import Calibration
    from swiftsure.certify.certificate import Certificate
    from swiftsure.certify.policy import Policy
    from swiftsure.certify.slices import SlicedPolicy

__all__ = ["calibrate", "show_policy"]

DATASETS = " Several are datasets, each of them a slice."


def calibrate(
    context: typer.Context,
    record: Annotated[
        list[Path], typer.Argument(help=options.RECORD_HELP + DATASETS, show_default=False)
    ],
    promise: options.Promises = None,
    loss: options.Loss = None,
    epsilon: options.Epsilon = None,
    risk: options.Risk = "gap",
    delta: options.Delta = 0.1,
    control: options.Control = "ucb",
    path: options.Route = None,
    rule: options.Rule = None,
    missing: options.Missing = "raise",
    cost: options.Cost = None,
    request: options.Request = None,
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
    r"""Find the fastest setting that keeps every promise, and certify it.

    A promise is written as a sentence; several hold together:

        gap zero_one <= 0.01             the mean
        P(gap brier > 0.1) <= 0.05       how often the loss is large
        worst 10% of gap brier <= 0.3    the mean of the worst share
        cost flops <= 3e9                a mean cost

    Before <=, a promise about a loss may say whose loss counts (among
    exits) and where it holds (within slices; or within each slice, which
    then has a setting of its own). The risk is gap or consistency, or
    zero-bounded gap. --loss, --epsilon and --risk make one such promise.

    The exit status is 1 if nothing faster than the full model can be
    certified; the policy is still written, and runs the full model.

    With --state, the samples are added to those of earlier runs, and the
    promise holds at every moment, however often you look. All options
    must stay the same. Adding a record twice changes nothing.

    How samples were drawn (groups, weights, a finite population, their
    order) is part of the record: swiftsure convert writes it there.

    The record may be a folder of Parquet files with any number of
    samples. It is read a part at a time, with temporary files in the
    folder that the environment variable TMPDIR names.

    Write a control's options after its name, each after a colon:

        all        zero_bounded
        ucb, ltt   bound=NAME (star, wsr, binomial, trinomial, …)
        ltt        correction=bonferroni
        crc        method=ucb, with bound=NAME and delta_prime=NUMBER;
                   monotone=false; selection=contiguous or paper

    [bold]Examples[/bold]

        swiftsure calibrate record.parquet \
            --promise 'gap zero_one <= 0.05' \
            --promise 'cost flops <= 4e9' -o policy.json

        swiftsure calibrate dials.parquet --path learn:200 \
            --promise 'consistency bleu <= 0.05'

        swiftsure calibrate record.parquet --loss brier --epsilon 0.05 \
            --control ltt:zero_bounded:bound=wsr --rule top1:strict

        swiftsure calibrate record.parquet --loss zero_one \
            --epsilon 0.1 --state growing.state -o policy.json

        swiftsure calibrate tenants.parquet \
            --promise 'gap zero_one within each slice <= 0.1'
    """
    from swiftsure.report.figures import figure_kind

    check_outputs(output, figure)
    if figure is not None:
        figure_kind(figure)
    if horizon is not None and state is None:
        raise ValueError("`--horizon` goes with --state.")
    wanted = request_of(context, record)
    loaded = _loaded(record, wanted, state is not None)
    if figure is not None:
        for what, cannot in {
            "a calibration that grows": state is not None,
            "promises within slices": any(each.within is not None for each in wanted.risks),
            "a promise about weighted samples": loaded.sampling.max_weight is not None,
        }.items():
            if cannot:
                raise ValueError(f"`--figure` cannot show {what}.")
    policy: Any = (
        wanted.run(loaded) if state is None else _grown(record, loaded, state, horizon, wanted)
    )
    if figure is not None:
        _draw(loaded, wanted, policy, figure)
    if hasattr(policy, "policies"):
        _show_slices(policy, output, json)
    else:
        show_policy(policy, [output, figure], json, record[0])


def _loaded(files: list[Path], request: "Calibration", in_memory: bool) -> Any:
    """Return the record, or those of several datasets as slices of one."""
    import swiftsure as ss
    from swiftsure.records import open_record

    sliced = any(each.within is not None for each in request.risks)
    if len(files) == 1:
        in_memory |= sliced or request.path == "breakpoints"
        return (ss.load_record if in_memory else open_record)(files[0])
    if not all(each.within is not None for each in request.risks):
        raise ValueError(
            "`record`: several datasets are slices, so every promise must say `within slices` or"
            " `within each slice`. To promise a mean over all of them, join them to one record."
        )
    named: dict[str, Any] = {}
    for file in files:
        if file.stem in named:
            raise ValueError(f"`record` must be files of different names, but two are {file.stem}.")
        named[file.stem] = ss.load_record(file)
    return ss.joined_datasets(
        named, path=request.path if isinstance(request.path, ss.Path) else None
    )


def _draw(record: Any, request: "Calibration", policy: "Policy", figure: Path) -> None:
    """Draw the curve of the first promise, of the samples that calibrated."""
    from swiftsure.certify.selection import cells, prepared
    from swiftsure.report.figures import policy_figure

    record, request = prepared(request, record)
    policy_figure(cells(request, record)[0].curve, policy, figure, cost=request.cost)


def show_policy(
    policy: "Policy", targets: list[Path | None], json: bool, record: Path | None = None
) -> None:
    """Save and print a policy of a record; the first target is its file."""
    if targets[0] is not None:
        policy.save(targets[0])
    if json:
        print_json(policy.model_dump(mode="json") | {"sentence": str(policy)})
    else:
        print_policy(policy)
        _print_tables(policy.certificate)
        if record is not None:
            print_drawn_seed(record, policy)
        for target in targets:
            if target is not None:
                print_text(f"Wrote {target}")
    if policy.runs_full_model:
        raise typer.Exit(1)


def _grown(
    files: list[Path], record: Any, state: Path, horizon: int | None, request: "Calibration"
) -> "Policy":
    """Add a record to a calibration that grows, unless it holds it already."""
    from swiftsure.certify.anytime.calibration import HORIZON
    from swiftsure.certify.anytime.state import known_again
    from swiftsure.records.files import keeps_order

    file = files[0]
    if not all(keeps_order(each) for each in files):
        raise ValueError(
            f"`record` must be a Parquet file for --state, so that adding it twice is noticed: run"
            f" swiftsure convert {file} -o record.parquet first."
        )
    if not known_again(record):
        raise ValueError(
            "`record` must have a seed that was drawn at random, or ids of its own, for --state:"
            " otherwise adding it twice is not noticed."
        )
    calibration = request.start(HORIZON if horizon is None else horizon, state)
    if calibration.has(record):
        typer.echo(f"swiftsure: {state} holds {file} already; nothing was added.", err=True)
    else:
        calibration.update(record)
    return calibration.policy()


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
