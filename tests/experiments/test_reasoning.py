import numpy as np
import pytest

from experiments.reasoning.reproduce import reasoning


@pytest.fixture
def folder(tmp_path):
    """75 questions with 2 seeds, sure and right in the second half of their thinking; votes."""
    rng = np.random.default_rng(0)
    n, m, options = 150, 11, 4
    label = rng.integers(options, size=n)
    known = np.arange(m) >= rng.integers(2, 6, size=n)[:, None]
    p = np.full((n, m, options), 0.25)
    for row, column in np.argwhere(known):
        p[row, column] = 0.01
        p[row, column, label[row]] = 0.97
    (tmp_path / "thinking").mkdir()
    np.savez(
        tmp_path / "thinking" / "simple.npz",
        tokens=np.tile(600 * np.arange(1, m + 1), (n, 1)),
        probabilities=p,
        correct=p.argmax(2) == label[:, None],
        question=np.repeat(np.arange(75), 2),
        seed=np.tile([0, 1], 75),
    )
    (tmp_path / "votes").mkdir()
    answers = (rng.random((200, 10)) < 0.1).astype(int)
    np.savez(tmp_path / "votes" / "coins.npz", answers=answers, correct=answers == 0)
    return tmp_path


def test_traces_and_votes_are_certified(folder, tmp_path):
    result = reasoning(folder, epsilons=[0.2], vote_epsilons=[0.2], checkpoints=600, splits=2)
    saved = {row["score"]: row["tokens saved"] for row in result.traces}
    assert 0.3 < saved["top1"] < 0.8
    assert saved["learned"] > 0.3
    assert all(row["samples"] < 10 for row in result.votes if row["score"] != "drawn")
    assert [file.name for file in result.write(tmp_path / "out")] == ["traces.csv", "votes.csv"]


def test_without_data_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no traces"):
        reasoning(tmp_path)
