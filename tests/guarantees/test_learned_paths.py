"""Paths learned on a pilot keep the promise; paths learned on the calibration samples do not."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import RefutedError, check_rate

N_EARLY = 12


def draw(n, rng):
    """Exits that all differ from the full model at a rate of ε + 1e-6."""
    apart = (rng.random((n, N_EARLY)) < 0.1 + 1e-6).astype(float)
    return ss.ExitRecord(
        np.full((n, N_EARLY), 0.9),
        inconsistencies={"zero_one": np.column_stack([apart, np.zeros(n)])},
    )


def best_exit(record):
    """A path whose only setting takes the exit that differs least on these samples."""
    chosen = record.inconsistencies["zero_one"][:, :-1].mean(axis=0).argmin()
    return ss.Path.family([np.where(np.arange(N_EARLY) == chosen, 0.5, np.inf)])


@pytest.mark.parametrize("separate", [True, False])
def test_a_path_may_be_learned_on_other_samples_only(separate):
    """The same rule on other samples keeps δ, and on the calibration samples it is refuted."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        calibration = draw(60, rng)
        path = best_exit(draw(60, rng) if separate else calibration)
        policy = ss.calibrate(calibration, risk="consistency", epsilon=0.1, path=path)
        found += policy.threshold is not None
    if separate:
        check_rate(found, 150, 0.1)
    else:
        with pytest.raises(RefutedError):
            check_rate(found, 150, 0.1)


def test_learned_paths_keep_the_failure_probability_on_networks():
    """Exits that are overconfident to different degrees, with a new pilot for each calibration."""
    population, scale = Population(n_exits=4), np.array([4.0, 1.0, 3.0, 1.0])[:, None]
    rng = np.random.default_rng(0)

    def record(n):
        sample = population.sample(n, rng)
        return ss.ExitRecord.from_logits(sample.logits * scale, sample.labels, losses="zero_one")

    truth = record(20_000)
    violations, fast = 0, 0
    for _ in range(20):
        path = ss.Path.pareto(record(150), loss="zero_one")
        policy = ss.calibrate(record(200), loss="zero_one", epsilon=0.05, path=path)
        fast += policy.threshold is not None
        violations += policy.evaluate(truth).risk > 0.05
    check_rate(violations, 20, 0.1)
    assert fast > 10
