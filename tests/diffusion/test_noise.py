"""Noise: standard normal, and a sample's own."""

import numpy as np
import pytest
import torch
from scipy import stats

from swiftsure.diffusion.noise import sample_noise


def noise(samples, seed=0, place=5, shape=(3, 4, 4)):
    return sample_noise(seed, torch.as_tensor(samples), place, shape)


def test_a_sample_has_its_noise_in_any_batch():
    together = noise([3, 8, 5])
    assert together.shape == (3, 3, 4, 4)
    assert together.dtype == torch.float32
    for row, sample in enumerate([3, 8, 5]):
        assert torch.equal(together[row], noise([sample])[0])
    assert torch.equal(noise([5, 3]), together[[2, 0]])


@pytest.mark.parametrize("change", [{"seed": 1}, {"place": 6}, {"samples": [4]}])
def test_other_seeds_places_and_samples_have_other_noise(change):
    one = noise(samples=[3], shape=(1000,))[0]
    two = noise(**{"samples": [3], "shape": (1000,), **change})[0]
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.12  # 1000 pairs: a deviation of 0.032
    assert not torch.equal(one, two)


def test_seed_sample_and_place_are_not_mixed_up():
    cases = {(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)}
    found = {sample_noise(a, torch.tensor([b]), c, (2,)).numpy().tobytes() for a, b, c in cases}
    assert len(found) == len(cases)


def test_noise_is_standard_normal():
    values = noise(range(200), shape=(501,)).double().numpy()
    assert stats.kstest(values.ravel(), "norm").pvalue > 1e-3
    assert abs(values.mean()) < 0.015
    assert abs(values.var() - 1) < 0.02
    # Neither along a sample nor across samples does a number tell of the next.
    for one, two in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.015
    halves = values[:, :250], values[:, 251:501]  # cosines and sines of one angle
    assert abs(np.corrcoef(halves[0].ravel() ** 2, halves[1].ravel() ** 2)[0, 1]) < 0.02


def test_extreme_words_give_finite_noise():
    assert noise(range(2000), shape=(301,)).isfinite().all()
    assert noise([2**40], seed=2**63 + 1).isfinite().all()


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="`seed` must be at least 0"):
        noise([0], seed=-1)
