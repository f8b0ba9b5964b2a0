"""The experiment on learned scores, from a small record."""

import numpy as np
import pytest

import swiftsure as ss
from experiments.learned_score import reproduce
from experiments.learned_score.attempts import ATTEMPTS
from swiftsure.study.simulate import Population


def test_savings_and_attempts(tmp_path, monkeypatch):
    sample = Population(n_exits=4).sample(900, 0)
    logits = sample.logits * np.array([3.0, 1.0, 2.0, 1.0])[:, None]
    record = ss.ExitRecord.from_logits(
        logits, sample.labels, ss.scores.SCORES, costs={"flops": [1, 2, 3, 5]}
    )
    record.save(tmp_path / "simulated.parquet")
    monkeypatch.setattr(reproduce, "N_ATTEMPTS", 1)
    result = reproduce.learned_score(tmp_path, pilots=2, splits=4, draws=4)
    assert [(row["pilot"], row["n"], row["ε"]) for row in result.savings] == [
        (225, 450, 0.01),
        (225, 450, 0.05),
    ]
    assert all(0 <= row["learned"] < 100 for row in result.savings)
    assert result.savings[1]["learned"] > 0
    assert [row["pilot"] for row in result.attempts] == [100]
    assert set(ATTEMPTS) <= set(result.attempts[0])
    names = {file.name for file in result.write(tmp_path / "results")}
    assert names == {"savings.csv", "attempts.csv"}


def test_without_records_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no records"):
        reproduce.learned_score(tmp_path)
