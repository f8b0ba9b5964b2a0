"""Sampling: its distribution, and that batches and thresholds do not change a sequence's noise."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from swiftsure.text import CalmModel
from swiftsure.text.calm.sampling import SequenceNoise, gumbel
from tests.text.builders import MODELS, batch, new_tokens, single, t5

OPTIONS = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.95}


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_batches_do_not_change_draws(name):
    model = MODELS[name]()
    inputs = batch(5, model)
    fast = CalmModel(model, 0.4)
    together = fast.generate(**inputs, **OPTIONS, seed=7)
    tokens = new_tokens(model, together.sequences, inputs)
    for row in range(5):
        alone = single(inputs, row)
        one = fast.generate(**alone, **OPTIONS, seed=7, sequence_ids=[row])
        length = one.depths.lengths[0]
        assert torch.equal(tokens[row, :length], new_tokens(model, one.sequences, alone)[0])
    other = fast.generate(**inputs, **OPTIONS, seed=8)
    assert not torch.equal(other.sequences, together.sequences)


def test_draws_follow_the_distribution():
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = []
    for sequence in range(4000):
        noise = SequenceNoise(0, [sequence])
        draws.append(int(noise(None, chances.log()[None]).argmax()))
    counts = np.bincount(draws, minlength=4)
    assert chisquare(counts, [2000, 1200, 600, 200]).pvalue > 1e-6


def test_noise_of_different_tokens_is_unrelated():
    table = [gumbel(s, k, t, 2000) for s, k, t in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    related = np.corrcoef(table)[np.triu_indices(4, k=1)]
    assert np.abs(related).max() < 0.12
    assert np.array_equal(gumbel(0, 1, 2, 10), gumbel(0, 1, 2, 10))


def test_ids_that_do_not_fit():
    model = t5()
    with pytest.raises(ValueError, match="one id per sequence, 2, but got 1"):
        CalmModel(model, 0.4).generate(**batch(2, model), **OPTIONS, sequence_ids=[3])


def test_the_generation_config_has_its_say():
    model = t5()
    inputs = batch(3, model)
    wanted = CalmModel(model, 0.4).generate(**inputs, **OPTIONS)
    model.generation_config.update(do_sample=True, temperature=0.8, top_k=12, top_p=0.95)
    found = CalmModel(model, 0.4).generate(**inputs, max_new_tokens=8)
    assert torch.equal(found.sequences, wanted.sequences)
    greedy = CalmModel(model, 0.4).generate(**inputs, max_new_tokens=8, do_sample=False)
    assert not torch.equal(greedy.sequences, wanted.sequences)


def test_what_sampling_does_not_know():
    model = t5()
    with pytest.raises(ValueError, match="`min_p` is not supported"):
        CalmModel(model, 0.4).generate(**batch(2, model), **OPTIONS, min_p=0.1)
