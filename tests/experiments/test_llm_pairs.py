"""The experiment on pairs of language models, from small made-up answers."""

import numpy as np
import pytest

from experiments.llm_pairs.reproduce import llm_pairs, load_pairs


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    sure = rng.random((600, 3))
    correct = (rng.random((600, 3)) < 0.5 + sure / 2).astype(float)
    correct[:, 2] = 1.0
    cost = np.tile([1e-5, 2e-5, 1e-3], (600, 1))
    np.savez(
        tmp_path / "medmcqa_made.npz",
        models=["tiny", "small", "large"],
        correct=correct,
        logprob=np.log(sure),
        cost=cost,
    )
    return tmp_path


def test_every_pair_and_the_best_one(folder):
    result = llm_pairs(folder, splits=3, epsilons=(0.05, 0.2))
    assert [row["models"] for row in result.rows[::2]] == [
        "tiny → large",
        "small → large",
        "the best pair with large",
    ]
    for row in result.rows:
        assert row["data"] == "MedMCQA"
        assert 0 <= row["saved"] < 1
        assert row["halves above"] <= 3
    assert [row["guaranteed drop"] for row in result.readme()] == ["≤ .05", "≤ .20"]


def test_savings_are_against_the_last_model_alone(folder):
    record = load_pairs(folder / "medmcqa_made.npz")["tiny → large"]
    assert record.costs["usd"][0].tolist() == pytest.approx([1e-5, 1.01e-3])
    assert record.full_costs["usd"][0] == pytest.approx(1e-3)


def test_without_data_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no answers of language models"):
        llm_pairs(tmp_path)
