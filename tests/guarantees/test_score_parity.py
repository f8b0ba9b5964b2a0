"""A record of logits holds the confidences and predictions that the runtime will compute."""

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch")

import swiftsure as ss  # noqa: E402
from swiftsure.torch import EarlyExit, Stream, collect  # noqa: E402
from swiftsure.torch.scoring import confidence  # noqa: E402
from tests.torch.builders import SCORES, Played, policy_of  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TEMPERATURES = [None, (1.7, 1.0), (0.3, 2.0), (20.0, 0.05)]


def logits_of_margins(n_classes, dtype):
    """Logits, (n, n_classes), whose largest leads by 0 to 100, and random ones."""
    rng = np.random.default_rng(n_classes)
    fine = 501 if n_classes < 1000 else 51
    margins = np.concatenate(
        [
            np.linspace(0, 100, 4 * fine),
            np.linspace(16.6, 17.4, 4 * fine),  # where 1 - top1 is about 2**-24
            np.linspace(0, 0.01, fine),
            np.geomspace(1e-12, 1, fine),
        ]
    )
    ahead = np.zeros((len(margins), n_classes))
    ahead[np.arange(len(margins)), rng.integers(n_classes, size=len(margins))] = margins
    noisy = ahead + rng.normal(scale=3, size=(len(margins), 1))  # the same margins, elsewhere
    scales = np.repeat([0.001, 0.1, 1, 5, 30], fine)[:, None]
    random = scales * rng.normal(size=(len(scales), n_classes))
    return torch.from_numpy(np.concatenate([ahead, noisy, random])).to(dtype)


def assert_same_bits(found, expected):
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    assert found.dtype == expected.dtype == np.float32
    differ = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
    assert len(differ) == 0, (len(differ), found[differ[:5]], expected[differ[:5]])


@pytest.mark.parametrize("n_classes", [2, 10, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperatures", TEMPERATURES, ids=str)
def test_records_hold_the_confidences_of_the_runtime(n_classes, dtype, temperatures):
    one = logits_of_margins(n_classes, dtype)
    logits = torch.stack([one, one.flip(0)], dim=1)
    scale = 1.0 if temperatures is None else temperatures
    record = ss.ExitRecord.from_logits(logits, score=SCORES, losses="zero_one", temperatures=scale)
    model = Played(2)
    collected = collect(
        model, [logits], losses=["zero_one"], scores=SCORES, temperatures=temperatures
    )
    for name in SCORES:
        expected = record.confidences[name]
        assert_same_bits(collected.confidences[name], expected)
        policy = policy_of(0.5, 2, name, temperatures=temperatures)
        out = EarlyExit(model, policy)(logits)
        assert_same_bits(out.confidences.numpy(), expected)
        assert np.array_equal(out.exits.numpy(), policy.exits(expected))
        if temperatures is None:
            assert_same_bits(confidence(name, one).numpy(), expected[:, 0])
    for kind in ("losses", "inconsistencies"):
        for name, values in getattr(record, kind).items():
            assert np.array_equal(values, getattr(collected, kind)[name])


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_does_not_change_confidences(name, dtype):
    """The dtype of inference rounds the logits, never their confidences."""
    logits = torch.stack([logits_of_margins(10, torch.float32)] * 2, dim=1)
    record = ss.ExitRecord.from_logits(logits, score=name, losses="zero_one")
    out = EarlyExit(Played(2), policy_of(0.5, 2, name), dtype=dtype)(logits)
    assert_same_bits(out.confidences.numpy(), record.confidences[name])


@pytest.mark.parametrize("name", SCORES)
def test_streams_exit_where_the_record_does(name):
    one = logits_of_margins(10, torch.bfloat16)
    logits = torch.stack([one, one.flip(0)], dim=1)
    scale = (1.7, 1.0)
    record = ss.ExitRecord.from_logits(logits, score=name, losses="zero_one", temperatures=scale)
    for threshold in (1.0, float(np.float32(1 - 2**-24)), 0.5, 0.0):
        policy = policy_of(threshold, 2, name, temperatures=scale)
        stream = Stream(EarlyExit(Played(2), policy), batch_size=999)
        outs = list(stream.run(logits.split(500), ordered=True))
        exits = torch.cat([out.exits for out in outs]).numpy()
        assert np.array_equal(exits, policy.exits(record.confidences[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperatures", TEMPERATURES, ids=str)
def test_records_hold_the_predictions_of_the_runtime(dtype, temperatures):
    """Also where the two largest logits are neighbours in their dtype, or tiny."""
    rng = np.random.default_rng(0)
    n = 4000
    largest = torch.from_numpy(rng.uniform(1, 16, n)).to(dtype)
    largest[: n // 4] *= 2.0**-60 if dtype != torch.float16 else 2.0**-12
    second = largest.nextafter(torch.zeros_like(largest))
    second[: n // 8] = 0
    at = torch.from_numpy(rng.integers(2, size=n))
    one = torch.full((n, 3), -5.0, dtype=dtype)
    one[torch.arange(n), at], one[torch.arange(n), 1 - at] = largest, second
    assert torch.equal(one.argmax(dim=1), at)
    logits = torch.stack([one, one], dim=1)
    labels = torch.from_numpy(rng.integers(2, size=n))

    scale = 1.0 if temperatures is None else temperatures
    record = ss.ExitRecord.from_logits(logits, labels, temperatures=scale)
    right = (at == labels).numpy()
    assert np.array_equal(record.losses["zero_one"], np.stack([~right, ~right], axis=1))
    assert not record.inconsistencies["zero_one"].any()
    for threshold in (0.0, None):  # everything exits at the first exit, or at the last
        policy = policy_of(threshold, 2, temperatures=temperatures)
        out = EarlyExit(Played(2), policy)(logits)
        assert torch.equal(out.predictions, at)
        assert torch.equal(out.outputs.argmax(dim=1), at)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_logits_over_the_temperature_in_float32(dtype):
    logits = torch.stack([logits_of_margins(10, dtype)] * 2, dim=1)
    out = EarlyExit(Played(2), policy_of(0.0, 2, temperatures=(1.7, 1.0)))(logits)
    assert out.outputs.dtype == torch.float32
    expected = logits[:, 0].double() / 1.7
    torch.testing.assert_close(out.outputs.double(), expected, rtol=2e-7, atol=0)


# A world that is harmed where record and runtime round differently


def world(n, seed, low=16.64, high=17.33, harmed=0.2):
    """Logits of two exits and labels; the first is wrong for a fifth, by a margin near 17.

    Only two classes are likely, so that 1 - top1 is exp(-margin).
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=n)
    wrong = rng.random(n) < harmed
    logits = np.full((n, 2, 10), -60, np.float32)
    logits[np.arange(n), :, (labels + 2) % 10] = 0
    logits[np.arange(n), 0, (labels + wrong) % 10] = np.where(wrong, rng.uniform(low, high, n), 30)
    logits[np.arange(n), 1, labels] = 30
    return logits, labels


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(16.64, 17.33), (14.0, 20.0)])
def test_a_promise_made_from_arrays_holds_when_the_network_runs(score, dtype, low, high):
    logits, labels = world(4000, seed=1, low=low, high=high)
    rounded = torch.from_numpy(logits).to(dtype)
    fresh = ss.ExitRecord.from_logits(rounded, labels, score, losses="zero_one")
    for seed in range(5):
        given, truth = world(1000, seed=100 + seed, low=low, high=high)
        calibration = ss.ExitRecord.from_logits(
            torch.from_numpy(given).to(dtype), truth, score, losses="zero_one"
        )
        request = ss.Calibration(ss.Promise("zero_one", epsilon=0.05), rule=ss.ExitRule(score))
        policy = request.run(calibration)
        out = EarlyExit(Played(2), policy)(rounded)
        gap = (out.predictions.numpy() != labels).mean()  # the full model is always right
        exits = policy.exits(fresh.confidences[score])
        assert np.array_equal(out.exits.numpy(), exits)
        assert gap == (fresh.losses["zero_one"][np.arange(len(exits)), exits]).mean()
        wrong = round(gap * len(labels))
        assert stats.binomtest(wrong, len(labels), 0.05, alternative="greater").pvalue > 1e-6
