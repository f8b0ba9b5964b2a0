"""`swiftsure compare`: certify the cheapest of several models by their scores."""

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.calibrate import show_policy
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, number, print_table
from swiftsure.cli.promises import parse_promise

__all__ = ["compare"]


def compare(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A table with a column of scores per model, or one log per model: MODEL=FILE.",
            show_default=False,
        ),
    ],
    measure: Annotated[
        str,
        optional(
            "What the scores measure, such as exact_match; higher is better.", "--measure", "-m"
        ),
    ],
    epsilon: Annotated[
        float | None, optional("The largest mean score that may be lost.", panel=options.REQUEST)
    ] = None,
    promise: options.Promises = None,
    delta: options.Delta = 0.1,
    full: Annotated[str | None, optional("The model to compare with.", default="the first")] = None,
    cost: Annotated[
        list[str] | None,
        optional("MODEL=NUMBER: what a model costs, in any unit; for all models or none."),
    ] = None,
    values: Annotated[
        str | None,
        optional(
            "LOW,HIGH: the smallest and the largest possible score; with `,whole` if scores are"
            " whole numbers.",
            "--range",
            default="0,1; whole for exact_match, acc and their like",
        ),
    ] = None,
    correction: Annotated[
        str,
        typer.Option(
            help="fixed_sequence: the dearest first, until one fails; bonferroni: each at δ / k."
        ),
    ] = "fixed_sequence",
    filter_name: Annotated[
        str | None, optional("lm-evaluation-harness: the filter of the answers.", "--filter")
    ] = None,
    seed: Annotated[
        int | None, optional("Fixes the order of samples.", default="drawn at random")
    ] = None,
    output: Annotated[Path | None, optional("Write the policy here.", "--output", "-o")] = None,
    json: options.Json = False,
) -> None:
    r"""Certify the cheapest of several models by their scores.

    All were tried on the same samples. The models are a full one and its
    variants: quantised, distilled, cached, re-prompted. Scores come from a
    CSV or Parquet file, with the optional columns id, group and slice, or
    from the logs of samples of lm-evaluation-harness or inspect-ai.

    The exit status is 1 if no model but the full one is certified, so a
    pull request whose model is worse than allowed can be made to fail.
    Fix a seed there: running again until it passes voids the promise.

    [bold]Examples[/bold]

        swiftsure compare scores.csv --measure f1 --epsilon 0.05 \
            --cost full=16 --cost small=8

        swiftsure compare full=bf16.jsonl small=int4.jsonl \
            --measure exact_match --epsilon 0.05 --seed 0
    """
    import swiftsure as ss
    from swiftsure.comparing import read_columns

    check_outputs(output)
    if (epsilon is None) == (promise is None):
        raise ValueError("`--epsilon` or `--promise` must be given, and not both.")
    promises: Any = [parse_promise(text) for text in promise or ()]
    if epsilon is not None:
        promises = [ss.Promise(measure, epsilon=epsilon)]
    prices = None if cost is None else dict(_named("--cost", each) for each in cost)
    columns = read_columns(_source(source), measure, filter_name=filter_name)
    policy = ss.compare(
        columns,
        ss.Calibration(promises, delta=delta),
        full=full,
        costs=None if prices is None else {k: _number("--cost", v) for k, v in prices.items()},
        values=None if values is None else _range(values),
        correction=correction,  # type: ignore[arg-type]
        seed=seed,
    )
    means = {name: float(each.mean()) for name, each in columns.scores.items()}
    if not json:
        print_table(
            f"Mean {measure} on {len(next(iter(columns.scores.values()))):,} samples",
            ["model", measure, *(["cost"] if prices else [])],
            [
                [name, number(mean), *([prices[name]] if prices else [])]
                for name, mean in means.items()
            ],
        )
    show_policy(policy, [output], json)


def _source(given: list[str]) -> Any:
    """Return a table's path, or logs by their models."""
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    return dict(_named("source", each) for each in given)


def _named(option: str, text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not (name and mark and value):
        raise ValueError(f"`{option}` must be MODEL=VALUE, but got {text!r}.")
    return name, value


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"`{option}` must be MODEL=NUMBER, but got {text!r}.") from None


def _range(text: str) -> Any:
    import swiftsure as ss

    low, *rest = text.split(",")
    if len(rest) not in (1, 2) or rest[1:] not in ([], ["whole"]):
        raise ValueError(f"`--range` must be LOW,HIGH or LOW,HIGH,whole, but got {text!r}.")
    return ss.LossRange(_number("--range", low), _number("--range", rest[0]), len(rest) == 2)
