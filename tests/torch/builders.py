"""Staged models to try things on, policies to run them under, and what is to be expected."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import swiftsure as ss
from swiftsure.certify.certificate import (
    Certificate,
    Costs,
    PromiseResult,
    Provenance,
    Samples,
)
from swiftsure.certify.policy import Policy
from swiftsure.torch import Scored, Staged, collect

SCORES = ["top1", "top_diff", "entropy"]


def refused(name):
    """Expect an error about the argument `name`, which it puts in backticks."""
    return pytest.raises((ValueError, TypeError), match=rf"`{name}\b[^`]*`")


def policy_of(threshold, n_exits, score="top1", *, model=None, **fields):
    """A policy as if it had been calibrated; `model` is the fingerprint it is bound to."""
    promise = PromiseResult(
        risk="gap",
        loss="zero_one",
        epsilon=0.05,
        loss_range=(-1, 1),
        bound=None,
        calibration_risk=0.0,
        upper_bound=None,
    )
    certificate = Certificate(
        guarantee="none",
        delta=None,
        promises=(promise,),
        control="empirical",
        options={},
        path="given",
        n_settings=1,
        index=None,
        conditions=(),
        samples=Samples(n=1, unit="samples", average="sample", n_samples=1),
        costs=Costs(means={}),
        provenance=Provenance(data="", model=model),
    )
    return Policy(
        threshold=threshold,
        score=score,
        n_exits=n_exits,
        settings={"threshold": threshold},
        certificate=certificate,
        **fields,
    )


class Played(Staged):
    """Plays given logits, (n, n_exits, n_classes), and keeps a diary of who ran where.

    Nothing is computed across samples, so that confidences are the same to the last bit in any
    batch.
    """

    def __init__(self, n_exits):
        super().__init__()
        self.n_exits = n_exits
        self.begun = 0
        self.stages, self.heads = [], []
        self.eval()

    def begin(self, batch):
        numbers = torch.arange(self.begun, self.begun + len(batch))
        self.begun += len(batch)
        return {"logits": batch, "numbers": numbers}

    def advance(self, exit_index, state):
        self.stages.append((exit_index, state["numbers"].tolist()))
        return state

    def head(self, exit_index, state):
        self.heads.append((exit_index, state["numbers"].tolist()))
        return state["logits"][:, exit_index]


class OwnConfidence(Played):
    """Plays given confidences, (n, n_exits), as the model's own."""

    def head(self, exit_index, state):
        return Scored({"exit": state["logits"]}, state["logits"][:, exit_index])


def network(n_exits=4, width=16, n_classes=5, n_inputs=6, seed=0, scale=4.0):
    """A random network of linear stages, whose samples leave here and there."""
    generator = torch.Generator().manual_seed(seed)

    def linear(inputs, outputs, gain):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.normal_(0, gain / inputs**0.5, generator=generator)
            layer.bias.normal_(0, 0.3, generator=generator)
        return layer

    stages = [
        nn.Sequential(linear(n_inputs if k == 0 else width, width, 1.5), nn.Tanh())
        for k in range(n_exits)
    ]
    heads = [linear(width, n_classes, scale) for _ in range(n_exits)]
    return Staged.from_sequential(stages, heads).eval()


def inputs(n, n_inputs=6, seed=0):
    return torch.randn(n, n_inputs, generator=torch.Generator().manual_seed(seed))


def logits(n, n_exits=4, n_classes=5, seed=0, scale=3.0):
    """Random logits, (n, n_exits, n_classes)."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, n_exits, n_classes, generator=generator)


def labels(n, n_classes=5, seed=0):
    return torch.randint(0, n_classes, (n,), generator=torch.Generator().manual_seed(seed))


def every_output(model, batch):
    """Outputs of all exits, (n, n_exits, n_classes)."""
    with torch.no_grad():
        return torch.stack(model(batch), dim=1)


def full_confidences(model, batch, score="top1", **options):
    """Confidences at every exit but the last, of a run through all of them."""
    options.setdefault("losses", ["zero_one"])
    return collect(model, [batch], scores=[score], **options).confidences[score]


def completed(out, full):
    """What the runtime saw, and what it did not look at from a run through all exits."""
    seen = out.confidences.numpy()
    return np.where(np.isnan(seen), full, seen)


def expected_exits(policy, confidences):
    """Where the one definition of exiting says that samples leave."""
    if len(confidences) == 0:
        return []
    return ss.exits.exit_indices(
        confidences, policy.thresholds, strict=policy.strict, min_exit=policy.min_exit
    ).tolist()


def rows(values, exits):
    """The value of each sample at the exit it took."""
    return values[torch.arange(len(values)), torch.as_tensor(exits, dtype=torch.long)]


def middle_threshold(model, batch, share=0.5, score="top1"):
    """A threshold that about this share of all confidences reaches."""
    return float(np.quantile(full_confidences(model, batch, score), 1 - share))


def split(batch, size):
    return list(batch.split(size)) if len(batch) else [batch]


@st.composite
def thresholds_of(draw, confidences):
    """Thresholds for these confidences, often tied with one of them; shared or one an exit."""
    seen = sorted({float(value) for value in np.ravel(confidences)})
    levels = st.one_of(
        st.sampled_from([None, 0.0, 0.5, 1.0, float(np.nextafter(np.float32(1), np.float32(2)))]),
        st.sampled_from(seen or [0.5]),
        st.floats(0, 1, width=32),
    )
    n_early = np.shape(confidences)[1]
    if draw(st.booleans()):
        return draw(levels)
    return tuple(draw(st.lists(levels, min_size=n_early, max_size=n_early)))


@st.composite
def rules(draw, confidences):
    """Fields of a policy: thresholds, strictness, first exit."""
    return {
        "threshold": draw(thresholds_of(confidences)),
        "strict": draw(st.booleans()),
        "min_exit": draw(st.integers(0, np.shape(confidences)[1] + 1)),
    }
