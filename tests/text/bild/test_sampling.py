"""Speculative sampling: lossless at tolerance 0, within the tolerance above it.

The models here are tables of probabilities, so that thousands of sequences take seconds, and what
they should be is known exactly.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from swiftsure.text import BigLittle, Speculative
from swiftsure.text.bild import rules
from swiftsure.text.bild.decoding import Decoding
from tests.text.bild.drafting import PAIRS, inputs, logits

SIZE, LENGTH = 3, 3
N = 2000
ALARM = 1e-6
"""P-value below which a distribution is another one."""


class TableReader:
    """A model that is a table: the chances of a token, given the one before it."""

    def __init__(self, table):
        self.logits = torch.as_tensor(table).log()
        self.length = 0

    def read(self, tokens, last):
        self.length = len(tokens)
        return self.logits[tokens[-last:]]

    def forget(self, length):
        self.length = min(self.length, length)


def tables(seed=0):
    """Chances of a large and a small model that are far apart."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(SIZE, 0.8), (2, SIZE))


@dataclass
class Uniform:
    """Random numbers by place, as `Passage` has them."""

    rng: np.random.Generator

    def __post_init__(self):
        self.known = {}

    def __call__(self, place):
        return self.known.setdefault(place, self.rng.random(3))


def drawn(rule, large, small, n=N, seed=0):
    """How often each sequence is written, in the order of `law`."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((SIZE,) * LENGTH)
    for _ in range(n):
        run = Decoding(
            TableReader(large),
            TableReader(small),
            rule,
            tokens=[0],
            limit=1 + LENGTH,
            ends=(),
            noise=Uniform(rng),
        )
        run.run()
        counts[tuple(run.tokens[1:])] += 1
    return counts.ravel()


def law(table):
    """The chances of each sequence, when a table writes it by itself."""
    found = [
        np.prod([table[a, b] for a, b in zip((0, *each[:-1]), each, strict=True)])
        for each in product(range(SIZE), repeat=LENGTH)
    ]
    return np.asarray(found)


def p_value(counts, chances):
    """Of counts if they came from these chances; rare sequences are taken together."""
    expected = chances * counts.sum()
    rare = expected < 8
    pool = [np.append(each[~rare], each[rare].sum()) for each in (counts, expected)]
    if pool[1][-1] == 0:
        pool = [each[:-1] for each in pool]
    return chisquare(*pool).pvalue


def lenient(p, q, tolerance):
    """The chances of one token, worked out by hand."""
    kept = np.minimum(q, p / (1 - tolerance))
    more = np.maximum(p - q, 0)
    return kept + (1 - kept.sum()) * more / more.sum()


@pytest.mark.parametrize(
    "rule",
    [
        Speculative(max_draft=1),
        Speculative(max_draft=5),
        Speculative(max_draft=5, fallback=0.6),  # drafts end where the small model is not sure
    ],
)
def test_tolerance_zero_is_the_large_model(rule):
    large, small = tables()
    counts = drawn(rule, large, small)
    assert p_value(counts, law(large)) > ALARM
    assert p_value(counts, law(small)) < ALARM  # so many draws tell them apart


def test_rejected_tokens_must_not_be_drawn_from_the_large_model(monkeypatch):
    """The test above sees the classical mistake: replacing a token by a plain draw."""
    monkeypatch.setattr(rules, "excess", lambda large, small: large)
    large, small = tables()
    assert p_value(drawn(Speculative(), large, small), law(large)) < ALARM


def test_acceptance_must_compare_with_the_draft(monkeypatch):
    """Nor may acceptance forget the small model's chances."""
    judge = Speculative.judge

    def careless(self, logits, draft, noise, first):
        found = judge(self, logits, draft, noise, first)
        ratios = logits[:-1].exp().gather(1, torch.tensor([[d.token] for d in draft]))
        found.distances[:] = [
            1 - float(ratio) / (1 - noise(first + k)[1]) for k, ratio in enumerate(ratios)
        ]
        return found

    large, small = tables()
    monkeypatch.setattr(Speculative, "judge", careless)
    assert p_value(drawn(Speculative(), large, small), law(large)) < ALARM


@pytest.mark.parametrize("tolerance", [0.2, 0.6])
def test_a_tolerance_is_what_it_says(tolerance):
    large, small = tables()
    expected = lenient(large[0], small[0], tolerance)
    assert 0 < np.abs(expected - large[0]).sum() / 2 <= tolerance
    # The first token of each sequence, which is always drafted.
    counts = drawn(Speculative(tolerance, max_draft=1), large, small)
    first = counts.reshape(SIZE, -1).sum(axis=1)
    assert chisquare(first, expected * N).pvalue > ALARM
    assert chisquare(first, large[0] * N).pvalue < ALARM


def test_full_tolerance_is_the_small_model():
    large, small = tables()
    rule = Speculative(1.0, max_draft=LENGTH)
    counts = drawn(rule, large, small).reshape((SIZE,) * LENGTH).sum(axis=2)
    expected = law(small).reshape((SIZE,) * LENGTH).sum(axis=2)
    assert p_value(counts.ravel(), expected.ravel()) > ALARM


@pytest.mark.parametrize("extreme", [0.0, np.nextafter(1, 0)])
def test_extreme_random_numbers(extreme):
    """Nothing is divided by 0, and no token is drawn that cannot be."""
    large = np.tile([0.0, 0.7, 0.3, 0.0], (4, 1))
    small = np.tile([0.0, 0.2, 0.3, 0.5], (4, 1))
    run = Decoding(
        TableReader(large),
        TableReader(small),
        Speculative(),
        tokens=[0],
        limit=9,
        ends=(),
        noise=lambda place: np.full(3, extreme),
    )
    run.run()
    assert set(run.tokens[1:]) <= {1, 2}
    assert all(type(each) is float for call in run.calls for each in call.distances)


def test_models_that_agree_reject_nothing():
    large, _ = tables()
    run = Decoding(
        TableReader(large),
        TableReader(large),
        Speculative(max_draft=9),
        tokens=[0],
        limit=41,
        ends=(),
        noise=Uniform(np.random.default_rng(1)),
    )
    run.run()
    assert [call.event for call in run.calls if call.model == "large"] == ["accept"] * 4


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_with_models(name):
    """The first two tokens of real models, at a temperature, among the most probable tokens."""
    large, small = PAIRS[name]()
    source = inputs(large)
    rule = Speculative(temperature=2.0, top_k=2, max_draft=2)
    pair = BigLittle(large, small, rule)
    passages = [
        pair.passage(source, max_new_tokens=2, eos_token_id=None, sequence=k) for k in range(100)
    ]
    first = np.zeros(48)
    for passage in passages:
        first[passage.run(rule).tokens[0]] += 1
    warped = logits(large, source, [])[-1] / 2.0
    best = warped.topk(2)
    chances = best.values.double().softmax(0).numpy()
    counts = first[best.indices.numpy()]
    assert counts.sum() == 100
    assert chisquare(counts, chances * 100).pvalue > ALARM


def test_random_numbers_belong_to_seed_and_sequence():
    large, small = PAIRS["Llama"]()
    pair = BigLittle(large, small, Speculative(temperature=2.0))
    given = inputs(large).repeat(3, 1)
    options = {"max_new_tokens": 8, "eos_token_id": None}
    output = pair.generate(given, **options)
    again = pair.generate(given[:1], **options, sequence_ids=[2])
    assert again.runs[0] == output.runs[2]
    assert len({run.tokens for run in output.runs}) > 1
    other = pair.generate(given, **options, seed=1)
    assert [run.tokens for run in other.runs] != [run.tokens for run in output.runs]


def test_higher_tolerances_take_fewer_passes_of_the_large_model():
    large, small = PAIRS["T5"]()
    passes = []
    for tolerance in (0.0, 0.5, 1.0):
        pair = BigLittle(large, small, Speculative(tolerance, temperature=3.0))
        given = inputs(large).repeat(6, 1)
        passes.append(
            pair.generate(given, max_new_tokens=12, eos_token_id=None).large_passes.mean()
        )
    assert passes[2] < passes[1] < passes[0] < 1
    assert passes[2] == pytest.approx(2 / 12)
