"""Certify the small reasoner end to end: traces, policy, new problems, tokens and wall time.

    python -m experiments.reasoning.certify --output experiments/reasoning/results

Nearly always the reasoner thinks exactly what its training data would. Whether it does, and what it
answers on the way, follows from one pass over a problem, in which each probe sees only the thinking
before it (`traces_of`). All other problems are decoded. `--check` problems are also decoded token
by token, under the policy and to the end, which is what the wall time is of.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import swiftsure as ss
from experiments.tables import print_rows, write_all
from swiftsure.cascade import Answer
from swiftsure.reasoning import (
    LocalReasoner,
    Probe,
    Thinker,
    Trace,
    TraceRecord,
    collect_traces,
)
from swiftsure_zoo.programs import (
    END,
    FOLDER,
    STOP,
    Example,
    small_reasoner,
    tokens_of,
    unique_examples,
)

__all__ = ["traces_of"]

DIGITS = "0123456789"
SPACINGS = (8, 12, 16, 20, 24)
"""Distances between checkpoints, of which the pilot chooses."""
LINE = 4
"""Tokens of a line of thinking."""
MASKED = -1e9


def traces_of(
    client: LocalReasoner, examples: Sequence[Example], spacing: int, first: int = 0
) -> TraceRecord:
    """Return the traces that `collect_traces` would, mostly in one pass per problem."""
    found = [_trace(client, each, spacing, first + k) for k, each in enumerate(examples)]
    odd = [k for k, trace in enumerate(found) if trace is None]
    if odd:
        decoded = collect_traces(
            client,
            [examples[k].question for k in odd],
            [examples[k].answer for k in odd],
            checkpoints=spacing,
            ids=[first + k for k in odd],
            concurrency=1,
        )
        for k, trace in zip(odd, decoded.traces, strict=True):
            found[k] = trace
    print(f"{len(odd)} of {len(examples)} problems were decoded", flush=True)
    return TraceRecord([each for each in found if each is not None], client.fingerprint)


def _trace(client: LocalReasoner, example: Example, spacing: int, name: int) -> Trace | None:
    """Return a trace from one pass; None if the model thinks otherwise than the example."""
    begin, n = len(example.program) + 1, len(example.thinking) - 1
    ids = tokens_of([*example.program, *example.thinking, END])
    places = list(range(spacing, n + 1, spacing))
    total = len(ids) + len(places)
    mask = torch.full((total, total), MASKED).triu(1)
    mask[len(ids) :, :] = MASKED
    for k, at in enumerate(places):  # a probe sees the thinking before it, and itself
        mask[len(ids) + k, : begin + at] = 0
        mask[len(ids) + k, len(ids) + k] = 0
    positions = [*range(len(ids)), *(begin + at for at in places)]
    with torch.inference_mode():
        logits = client.model(
            input_ids=torch.tensor([ids + tokens_of([END] * len(places))]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0]
    if logits[begin - 1 : len(ids) - 1].argmax(-1).tolist() != ids[begin:]:
        return None
    last = client.tokenizer.decode([int(logits[len(ids) - 1].argmax())])
    if last not in DIGITS:
        return None
    probes = []
    for k, at in enumerate(places):
        best = logits[len(ids) + k].log_softmax(-1).topk(10)
        words = [client.tokenizer.decode([token]) for token in best.indices.tolist()]
        values = best.values.tolist()
        raw = Answer(
            words[0] if words[0] != STOP else "",
            cost={"tokens": 2},  # the end of the thinking, and the digit
            logprobs=(values[0],),
            top_logprobs=(dict(zip(words, values, strict=True)),),
        )
        probes.append(Probe(at, client.read_probe(raw)))
    return Trace(name, tuple(probes), n, Answer(last), example.answer)


def spacing_of(pilot: TraceRecord, epsilon: float) -> int:
    """Return the distance between checkpoints that saves most on pilot problems."""
    saved = {}
    for spacing in SPACINGS:
        exits = pilot.exits(spacing)
        policy = ss.calibrate(exits, loss="zero_one", epsilon=3 * epsilon, score="top1")
        full, here = policy.certificate.costs.means["tokens"]
        saved[spacing] = 1 - here / full
    print("saved on the pilot:", {k: round(v, 3) for k, v in saved.items()}, flush=True)
    return max(saved, key=saved.__getitem__)


def timed(client: LocalReasoner, policy: Any, examples: Sequence[Example]) -> dict[str, float]:
    """Return tokens, accuracy and seconds under a policy and to the end, alternately."""
    stops, full = Thinker(client, policy), Thinker(client)
    seconds = {"stops": 0.0, "full": 0.0}
    tokens, right = dict.fromkeys(seconds, 0.0), dict.fromkeys(seconds, 0)
    for example in examples:
        for name, thinker in (("stops", stops), ("full", full)):
            start = time.process_time()  # others use this machine
            thought = thinker.answer(example.question)
            seconds[name] += time.process_time() - start
            tokens[name] += thought.total
            right[name] += thought.answer == example.answer
    return {
        "decoded": len(examples),
        "tokens saved when decoded": 1 - tokens["stops"] / tokens["full"],
        "times faster": seconds["full"] / seconds["stops"],
        "accuracy when stopped": right["stops"] / len(examples),
        "accuracy of these to the end": right["full"] / len(examples),
    }


def main() -> None:
    """Certify, and write what was measured."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=FOLDER)
    options.add_argument("--output", type=Path)
    options.add_argument("--n", type=int, default=600, help="problems to calibrate on")
    options.add_argument("--test", type=int, default=2000, help="new problems")
    options.add_argument("--check", type=int, default=200, help="new problems that are decoded")
    options.add_argument("--epsilon", type=float, default=0.02)
    asked = options.parse_args()
    torch.set_num_threads(1)
    client = small_reasoner(asked.folder)
    problems = list(unique_examples(1, 300 + asked.n + asked.test))
    pilot, rest = problems[:300], problems[300:]
    calibration, test = rest[: asked.n], rest[asked.n :]
    spacing = spacing_of(traces_of(client, pilot, LINE), asked.epsilon)
    exits = traces_of(client, calibration, spacing).exits(spacing)
    record = traces_of(client, test, spacing, first=asked.n)
    new = record.exits(exits.settings["checkpoints"])
    rows = []
    for epsilon in (asked.epsilon / 2, asked.epsilon, 2.5 * asked.epsilon):
        policy = ss.calibrate(exits, loss="zero_one", epsilon=epsilon, score="top1")
        found = policy.evaluate(new)
        rows.append(
            {"promised": epsilon, "measured drop": round(found.risk, 4)}
            | {"tokens saved": round(found.savings["tokens"], 3), "checkpoints every": spacing}
        )
        if epsilon == asked.epsilon:
            chosen = policy
    ends = np.asarray([trace.tokens for trace in record.traces])
    right = np.asarray([trace.answer.answer == trace.label for trace in record.traces])
    summary = {
        "accuracy to the end": right.mean(),
        "accuracy at the mean length": _cut(record, ends.mean()),
        "tokens: 1, 50 and 99 % of problems need at most": np.percentile(
            ends, [1, 50, 99]
        ).tolist(),
        "parameters": sum(each.numel() for each in client.model.parameters()),
        "policy": str(chosen).split("\n")[0],
        **timed(client, chosen, test[: asked.check]),
    }
    print_rows("The small reasoner, certified", rows)
    print(json.dumps(summary, indent=2, default=float))
    if asked.output is not None:
        write_all(asked.output, {"small_reasoner.csv": rows})
        text = json.dumps(summary, indent=2, default=float)
        (asked.output / "small_reasoner.json").write_text(f"{text}\n")


def _cut(record: TraceRecord, most: float) -> float:
    """Return the accuracy if everybody stopped at a number of tokens."""
    right = []
    for trace in record.traces:
        before = [probe.answer for probe in trace.probes if probe.tokens <= most]
        answer = trace.answer if trace.tokens <= most or not before else before[-1]
        right.append(answer.answer == trace.label)
    return float(np.mean(right))


if __name__ == "__main__":
    main()
