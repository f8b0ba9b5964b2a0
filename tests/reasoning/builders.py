"""Traces of an imaginary model, whose losses are known."""

import numpy as np

from swiftsure.cascade import Answer
from swiftsure.reasoning import Probe, Trace, TraceRecord


def questions(n, rng, seeds=1, spent=5):
    """Traces of n questions that differ in difficulty; confidences say how hard they are.

    The answer is found after `need` tokens, and the model thinks on to twice that.
    """
    traces = []
    for question in range(n):
        hard = rng.random()
        for seed in range(seeds):
            need = int(100 + 900 * hard * rng.uniform(0.8, 1.2))
            end = 2 * need
            probes = []
            for at in range(100, end + 1, 100):
                sure = 1 / (1 + np.exp(-(at - need) / 60))
                found = rng.random() < sure
                probes.append(
                    Probe(at, Answer("right" if found else "wrong", sure, {"tokens": spent}))
                )
            final = "right" if rng.random() < 0.95 else "wrong"
            traces.append(Trace(f"q{question}", tuple(probes), end, Answer(final), "right", seed))
    return TraceRecord(traces)
