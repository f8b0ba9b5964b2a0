"""Temperatures: what divides logits into probabilities that are true."""

import numpy as np
import pytest
import torch
from torch import nn

from swiftsure.torch import Scored, Staged, collect, fit_temperatures
from tests.torch.builders import OwnConfidence, Played, inputs, labels, logits, network, refused


def truthful(n, temperatures, n_classes=6, seed=0):
    """Logits whose probabilities are true once divided by the temperatures, and labels of them."""
    generator = torch.Generator().manual_seed(seed)
    true = 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    truth = torch.multinomial(true.softmax(dim=1), 1, generator=generator)[:, 0]
    scale = torch.tensor(temperatures, dtype=torch.float64)
    return (true[:, None] * scale[:, None]).float(), truth


def test_a_known_temperature_is_found():
    known = (3.0, 1.0, 0.4, 10.0)
    x, y = truthful(20_000, known)
    found = fit_temperatures(Played(4), list(zip(x.split(999), y.split(999), strict=True)))
    assert isinstance(found, tuple)
    assert all(isinstance(each, float) for each in found)
    assert found == pytest.approx(known, rel=0.03)


def test_it_is_the_most_likely():
    x, y = logits(500, 2), labels(500)
    found = fit_temperatures(Played(2), [(x, y)])
    grid = np.geomspace(0.05, 20, 4001)
    for k, temperature in enumerate(found):
        likely = [nn.functional.cross_entropy(x[:, k].double() / t, y).item() for t in grid]
        assert temperature == pytest.approx(grid[int(np.argmin(likely))], rel=0.005)


def test_batches_do_not_matter():
    x, y = truthful(1000, (2.0, 1.0))
    whole = fit_temperatures(Played(2), [(x, y)])
    parts = fit_temperatures(Played(2), list(zip(x.split(7), y.split(7), strict=True)))
    assert parts == pytest.approx(whole, rel=1e-6)


def test_temperatures_stay_within_limits():
    x, y = truthful(2000, (50.0, 0.01, 1.0))
    high, low, _ = fit_temperatures(Played(3), [(x, y)])
    assert 0.05 <= low < 0.06
    assert 19 < high <= 20
    narrow = fit_temperatures(Played(3), [(x, y)], limits=(0.9, 1.5))
    assert all(0.9 <= each <= 1.5 for each in narrow)
    assert narrow == pytest.approx((1.5, 0.9, 1.0), abs=0.1)


def test_they_lower_the_loss_of_other_samples():
    x, y = truthful(4000, (4.0, 0.5))
    found = fit_temperatures(Played(2), [(x[:2000], y[:2000])])
    rest = [(x[2000:], y[2000:])]
    plain, scaled = collect(Played(2), rest), collect(Played(2), rest, temperatures=found)
    assert (scaled.losses["brier"].mean(axis=0) < plain.losses["brier"].mean(axis=0)).all()
    assert np.array_equal(scaled.losses["zero_one"], plain.losses["zero_one"])


def test_heads_with_their_own_confidence():
    class Both(OwnConfidence):
        def head(self, exit_index, state):
            output = state["logits"][:, exit_index]
            return Scored(output, output[:, 0])

    x, y = truthful(500, (2.0, 1.0))
    assert fit_temperatures(Both(2), [(x, y)]) == fit_temperatures(Played(2), [(x, y)])


def test_networks_keep_no_gradients():
    model = network()
    found = fit_temperatures(model, [(inputs(100), labels(100))])
    assert len(found) == 4
    assert all(each > 0 for each in found)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_without_parameters_or_modules():
    class Plain:
        n_exits = 2

        def begin(self, batch):
            return batch

        def advance(self, exit_index, state):
            return state

        def head(self, exit_index, state):
            return state[:, exit_index]

    x, y = truthful(300, (2.0, 1.0))
    assert fit_temperatures(Plain(), [(x, y)]) == fit_temperatures(Played(2), [(x, y)])


def test_nested_inputs():
    """What `collect` takes can be fitted too."""

    class Nested(Staged):
        def __init__(self):
            super().__init__()
            self.n_exits = 2
            self.unused = nn.Parameter(torch.zeros(1))
            self.eval()

        def begin(self, batch):
            return batch["x"]

        def advance(self, exit_index, state):
            return state

        def head(self, exit_index, state):
            return state[:, exit_index]

    x, y = truthful(300, (2.0, 1.0))
    assert fit_temperatures(Nested(), [({"x": x}, y)]) == fit_temperatures(Played(2), [(x, y)])


def test_missing_labels_are_left_out():
    """Negative labels are missing ones, as they are to `collect`."""
    x, y = truthful(300, (2.0, 1.0))
    expected = fit_temperatures(Played(2), [(x[:200], y[:200])])
    y[200:] = -1
    assert fit_temperatures(Played(2), [(x, y)]) == pytest.approx(expected, rel=1e-6)


def test_nan_is_refused_by_name():
    x, y = truthful(20, (2.0, 1.0))
    y[:5] = -1  # a missing label does not change a sample's number
    x[13, 1, 2] = torch.nan
    with pytest.raises(ValueError, match="output of exit 2 is NaN or infinite for sample 13"):
        fit_temperatures(Played(2), list(zip(x.split(8), y.split(8), strict=True)))


def test_labels_of_masked_classes_are_refused():
    x, y = truthful(20, (2.0, 1.0))
    x[:, :, 2] = -torch.inf
    kept = y != 2
    assert all(np.isfinite(fit_temperatures(Played(2), [(x[kept], y[kept])])))
    with pytest.raises(ValueError, match=r"`loader`: exit 1 .* sample \d+ .* −inf"):
        fit_temperatures(Played(2), [(x, y)])


def test_labels_are_needed():
    x, y = truthful(8, (2.0, 1.0))
    with refused("loader"):
        fit_temperatures(Played(2), [x])
    with refused("loader"):
        fit_temperatures(Played(2), [(x, torch.full_like(y, -1))])
    for wrong in (y[:4], y + 6, y.float()):
        with refused("labels"):
            fit_temperatures(Played(2), [(x, wrong)])


def test_refusals():
    with refused("model"):
        fit_temperatures(network().train(), [(inputs(4), labels(4))])
    with refused("loader"):
        fit_temperatures(network(), [])


@pytest.mark.parametrize("limits", [(0.0, 2.0), (-1.0, 2.0), (2.0, 1.0), (1.0, float("inf"))])
def test_limits_are_checked(limits):
    with refused("limits"):
        fit_temperatures(network(), [(inputs(4), labels(4))], limits=limits)
