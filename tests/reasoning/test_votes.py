from pathlib import Path

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.reasoning import Voter, VoteRecord, majority, vote_scores

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "votes"


def test_exits_are_majorities_of_the_first_answers():
    record = VoteRecord(
        [["B", "A", "A", None], ["C", "C"]], labels=["A", "C"], questions=["x", "y"]
    )
    exits = record.exits()
    assert exits.losses["zero_one"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert exits.costs["samples"].tolist() == [[1, 2, 3, 4], [1, 2, 2, 2]]
    assert exits.full_costs["samples"].tolist() == [4, 2]
    assert exits.confidences["lead"][1, 2] == 1  # it had ended
    assert exits.groups is None


def test_rows_of_one_question_are_a_group():
    exits = VoteRecord([["A", "B"]] * 4, questions=["x", "x", "y", "y"]).exits()
    assert exits.n_units == 2
    assert exits.losses == {}


def test_scores_of_votes():
    assert vote_scores(["A"], 20)["lead"] == 0.75
    assert vote_scores(["A", "A", "A"], 4)["stays"] == 1
    assert vote_scores([None], 2) == {"lead": 0.5, "stays": 0.5, "drawn": 0.5}
    assert majority(["B", "A", "A", "B"]) == "B"


def test_lines_come_back(tmp_path):
    record = VoteRecord([["A", None], ["B"]], labels=["A", None], questions=["x", "y"])
    record.save(tmp_path / "votes.jsonl")
    again = VoteRecord.load(tmp_path / "votes.jsonl")
    assert (again.answers, again.labels) == (record.answers, record.labels)


def test_bad_votes_are_refused():
    with pytest.raises(ValueError, match="at least one answer"):
        VoteRecord([["A"], []])
    with pytest.raises(ValueError, match="one per question"):
        VoteRecord([["A"]], labels=["A", "B"])
    with pytest.raises(ValueError, match="nothing to stop"):
        VoteRecord([["A"]]).exits()


def test_real_votes():
    """20 answers to each of 369 questions."""
    path = SHARED / "date_gpt35.npz"
    if not path.is_file():
        pytest.skip("the measured votes are not here")
    data = np.load(path)
    exits = VoteRecord(data["answers"], correct=data["correct"]).exits()
    needed = []
    for epsilon in (0.01, 0.02, 0.05):
        policy = ss.calibrate(exits, loss="zero_one", epsilon=epsilon, score="lead")
        needed.append(policy.certificate.costs.means["samples"][1])
        assert "It stops sampling at the first of 19 samples" in str(policy)
    assert needed == sorted(needed, reverse=True)
    assert needed[0] < 9.9
    assert needed[1] < 6


def test_votes_that_end_early_are_not_what_a_voter_runs():
    """Two answers each to all questions but one: the first always is the vote, whatever it is."""
    rng = np.random.default_rng(0)
    answers = np.where(rng.random((400, 21)) < 0.65, "A", "B").tolist()
    uneven = VoteRecord([answers[0], *(row[:2] for row in answers[1:])], labels=["A"] * 400)
    policy = ss.calibrate(uneven.exits(), loss="zero_one", epsilon=0.05, score="lead")
    assert not policy.runs_full_model
    with pytest.raises(ValueError, match="fewer answers than a full vote"):
        Voter(lambda question: "A", policy)
    even = ss.calibrate(uneven.exits(2), loss="zero_one", epsilon=0.05, score="lead")
    assert Voter(lambda question: "A", even).samples == 2


def test_right_answers_that_differ_are_refused():
    with pytest.raises(ValueError, match="true for equal answers alone"):
        VoteRecord([["0.5", "x", "1/2"]], correct=[[1, 0, 1]])
    with pytest.raises(ValueError, match="true for equal answers alone"):
        VoteRecord([["A", "A", "B"]], correct=[[1, 0, 0]])
    assert VoteRecord([["A", "B", None]], correct=[[0, 1, 0]]).labels == ("B",)


def test_labels_of_another_kind_than_the_answers_are_refused():
    """Every answer would be wrong, so no gap would ever be seen, and anything be certified."""
    with pytest.raises(TypeError, match="answers are texts and the labels numbers"):
        VoteRecord([["7", "42"]] * 2, labels=[42, 7]).exits()
    with pytest.raises(TypeError, match="of the kind of the answers"):
        VoteRecord([[7, 42]] * 2, labels=["42", "7"]).exits()
    assert VoteRecord([[7, 42]] * 2, labels=[42.0, 7]).exits().losses["zero_one"][1, 0] == 0
