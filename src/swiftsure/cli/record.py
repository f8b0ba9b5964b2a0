"""`swiftsure record`: turn logs of language models into a record."""

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, number, print_json, print_table, print_text

__all__ = ["record"]


def record(
    logs: Annotated[
        list[Path],
        typer.Argument(
            help="JSON lines: one file per model, cheapest first, or one for all.",
            show_default=False,
        ),
    ],
    models: Annotated[
        str | None, optional("Models in the logs, cheapest first, comma-separated.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Record to write.")] = Path(
        "record.parquet"
    ),
    losses: Annotated[
        str | None,
        optional(
            "Losses, comma-separated: exact_match, choice, token_f1, rouge_l, bleu, zero_one.",
            default="exact_match for texts, zero_one for classes",
        ),
    ] = None,
    scores: Annotated[
        str, typer.Option(help="Confidences: confidence, mean_logprob, min_logprob, first_margin.")
    ] = "confidence",
    prices: Annotated[
        list[str] | None,
        optional("MODEL=INPUT,OUTPUT: prices of a million tokens, where lines state no cost."),
    ] = None,
    labels: Annotated[
        Path | None,
        optional('JSON lines {"id": ..., "label": ...}, in place of those in the logs.'),
    ] = None,
    json: options.Json = False,
) -> None:
    """Turn logs of language models into a record to calibrate on.

    A line is one answer of one model: {"id": "q1", "model": "small",
    "answer": "Paris", "logprobs": [-0.1], "cost": {"usd": 0.0001},
    "label": "Paris"}. Also read: requests and responses in OpenAI's form
    (LiteLLM, Helicone, batches) and lm-eval's logs of samples. Lines
    belong together by id, or else by prompt.

    [bold]Examples[/bold]

        swiftsure record small.jsonl large.jsonl -o pair.parquet

        swiftsure record proxy.jsonl --models mini,full -o pair.parquet
    """
    from swiftsure.cascade.logs import read_logs, record_of_logs

    check_outputs(output)
    known = dict(_price(text) for text in prices or ())
    named = None if models is None else [name.strip() for name in models.split(",")]
    entries, names = read_logs(logs, named, known)
    made = record_of_logs(
        entries,
        models=names,
        labels=None if labels is None else _labels(labels),
        losses=None if losses is None else [name.strip() for name in losses.split(",")],
        scores=[name.strip() for name in scores.split(",")],
    )
    made.save(output)
    rows = [
        {
            "model": name,
            **{f"mean {k}": float(v[:, j].mean()) for k, v in made.losses.items()},
            **{f"{k} alone": _alone(v, j) for k, v in made.costs.items() if k != "exit"},
        }
        for j, name in enumerate(names)
    ]
    left_out = len({entry.key for entry in entries}) - made.n
    if json:
        print_json({"samples": made.n, "left_out": left_out, "models": rows, "file": str(output)})
        return
    print_table(
        f"{made.n:,} inputs",
        list(rows[0]),
        [[str(row["model"]), *(number(float(v)) for v in list(row.values())[1:])] for row in rows],  # type: ignore[arg-type]
    )
    if left_out:
        print_text(f"{left_out:,} inputs were left out, because not every model answered them.")
    print_text(f"Wrote {output}")


def _alone(costs: Any, column: int) -> float:
    """Return the mean cost of one model alone."""
    before = costs[..., column - 1] if column else 0.0
    return float((costs[..., column] - before).mean())


def _price(text: str) -> tuple[str, tuple[float, ...]]:
    """Parse --prices."""
    model, mark, values = text.rpartition("=")
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError:
        numbers = ()
    if not mark or len(numbers) not in (2, 3):
        raise ValueError(f"`--prices` must be MODEL=INPUT,OUTPUT, but got {text!r}.")
    return model, numbers


def _labels(path: Path) -> dict[str, Any]:
    """Return labels by id from JSON lines."""
    import json

    found: dict[str, Any] = {}
    for position, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            key, label = str(content["id"]), content["label"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f'{path}, line {position}: it must be {{"id": ..., "label": ...}}.'
            ) from None
        if key in found:
            raise ValueError(f"{path}, line {position}: {key!r} has a label already.")
        found[key] = label
    return found
