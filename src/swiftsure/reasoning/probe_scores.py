"""Confidences of an answer that was asked for before the model had finished thinking.

The record and the runtime both call `probe_scores`, so that a policy decides by the same numbers.
"""

from collections.abc import Sequence

from swiftsure.cascade.answers import Answer
from swiftsure.cascade.confidences import ANSWER_SCORES, answer_confidence

__all__ = ["TRACE_FEATURES", "probe_scores"]

TRACE_FEATURES = ("top1", "log_ratio", "entropy", "agreement", "progress")
"""Features of `LearnedScore.fit` for probes with probabilities of options."""

OF_TOKENS = ("min_logprob", "first_margin")
OF_OPTIONS = ("top1", "top_diff", "entropy")
USUAL = 1000.0
"""Tokens at which `progress` is one half."""


def probe_scores(answers: Sequence[Answer], tokens: float) -> dict[str, float]:
    """Return the confidences of the last of several probes, by name.

    | name | what it is |
    |---|---|
    | `top1`, `top_diff`, `entropy` | as of a classifier, if options have probabilities |
    | `confidence` | otherwise: the model's own, or the mean probability of the answer's tokens |
    | `min_logprob`, `first_margin` | if the log-probabilities of its tokens are known |
    | `agreement` | (r + 1) / (r + 2), if the r probes before it gave the same answer |
    | `progress` | t / (t + 1000) after t tokens |

    and the probe's own `scores`.

    Examples
    --------
    >>> probe_scores([Answer("A", 0.25), Answer("B", 0.5), Answer("B", 0.75)], 1000)
    {'confidence': 0.75, 'agreement': 0.6666666666666666, 'progress': 0.5}
    """
    last = answers[-1]
    options = last.probabilities is not None
    names = OF_OPTIONS if options else ("confidence", *OF_TOKENS)
    found = {name: answer_confidence(last, name) for name in names if name in ANSWER_SCORES}
    same = 0
    while same + 1 < len(answers) and answers[-2 - same].answer == last.answer:
        same += 1
    return {
        **{name: value for name, value in found.items() if value is not None},
        **last.scores,
        "agreement": (same + 1) / (same + 2),
        "progress": tokens / (tokens + USUAL),
    }
