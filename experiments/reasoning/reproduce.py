"""Thinking and votes that stop early, on traces and answers that others released.

`thinking/*.npz`: a 12B model probed at every tenth of its thinking, 75 questions with 10 seeds
each, which are groups; 25 questions learn the score and 50 calibrate. `votes/*.npz`: 20 answers to
each question; all questions calibrate.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import swiftsure as ss
from experiments.studies import DATA_FOLDER
from experiments.tables import write_all
from swiftsure._lib.files import npz
from swiftsure.reasoning import TRACE_FEATURES, TraceRecord, VoteRecord

__all__ = ["ReasoningResult", "load_traces", "load_votes", "reasoning"]

Rows = list[dict[str, Any]]

SPENT = 10
"""Tokens that a probe is taken to cost, which the released traces do not say."""
N_PILOT = 25
LEARNED = "learned"


@dataclass(frozen=True)
class ReasoningResult:
    """A row for each set of traces, score and level, and one for each set of votes."""

    traces: Rows
    votes: Rows

    def tables(self) -> dict[str, Rows]:
        """Return the tables to print, by title."""
        return {"Thinking stopped early": self.traces, "Votes stopped early": self.votes}

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write both tables; return the files."""
        found = {"traces.csv": self.traces, "votes.csv": self.votes}
        return write_all(folder, {name: rows for name, rows in found.items() if rows})


def reasoning(
    data: str | os.PathLike[str] | None = None,
    *,
    epsilons: Sequence[float] = (0.02, 0.05, 0.1),
    vote_epsilons: Sequence[float] = (0.01, 0.02, 0.05),
    checkpoints: int = 512,
    splits: int = 20,
    delta: float = 0.1,
    seed: int = 0,
) -> ReasoningResult:
    """Run the experiment.

    Parameters
    ----------
    data : path, optional
        Folder with the folders `thinking` and `votes`; by default the one that the environment
        variable SWIFTSURE_DATA names.
    checkpoints : int
        Tokens between two checkpoints.
    splits : int
        How often the pilot questions are drawn.
    """
    folder = DATA_FOLDER if data is None else Path(data)
    thinking, votes = (sorted((folder / name).glob("*.npz")) for name in ("thinking", "votes"))
    if not thinking and not votes:
        raise FileNotFoundError(f"{folder} has no traces (thinking/*.npz) and no votes/*.npz.")
    rows = []
    for file in thinking:
        exits = load_traces(file).exits(checkpoints)
        for score in ("top1", LEARNED):
            for epsilon in epsilons:
                found = _saved(exits, score, epsilon, delta, splits, seed)
                rows.append({"traces": file.stem, "score": score, "promised": epsilon} | found)
    drawn = []
    for file in votes:
        exits = load_votes(file).exits()
        for score in ("lead", "stays", "drawn"):
            for epsilon in vote_epsilons:
                policy = ss.calibrate(
                    exits, loss="zero_one", epsilon=epsilon, delta=delta, score=score
                )
                full, here = policy.certificate.costs.means["samples"]
                drawn.append(
                    {"votes": file.stem, "score": score, "promised": epsilon}
                    | {"samples": round(here, 2), "of": full, "questions": exits.n_units}
                )
    return ReasoningResult(rows, drawn)


def load_traces(file: Path) -> TraceRecord:
    """Return the traces in a file; of each answer it is known whether it is right."""
    with npz(file) as arrays:
        return TraceRecord.from_arrays(
            arrays["tokens"],
            probabilities=arrays["probabilities"],
            correct=arrays["correct"],
            questions=arrays["question"],
            seeds=arrays["seed"],
            spent=SPENT,
        )


def load_votes(file: Path) -> VoteRecord:
    """Return the votes in a file."""
    with npz(file) as arrays:
        return VoteRecord(arrays["answers"], correct=arrays["correct"])


def _saved(
    exits: ss.ExitRecord, score: str, epsilon: float, delta: float, splits: int, seed: int
) -> dict[str, Any]:
    """Return what is certified on average over the questions that are drawn to calibrate."""
    shares, risks = [], []
    for draw in range(splits):
        pilot, calibration = exits.split(N_PILOT, seed=seed + draw)
        chosen: Any = score
        if score == LEARNED:
            chosen = ss.LearnedScore.fit(pilot, TRACE_FEATURES, shared=True)
        policy = ss.calibrate(
            calibration, loss="zero_one", epsilon=epsilon, delta=delta, score=chosen
        )
        full, here = policy.certificate.costs.means["tokens"]
        shares.append(1 - here / full)
        if score != LEARNED:  # a learned score has seen the questions of the pilot
            risks.append(policy.evaluate(pilot).risk)
    return {
        "tokens saved": round(float(np.mean(shares)), 3),
        "certified": round(float(np.mean([share > 0 for share in shares])), 2),
        "measured drop": round(float(np.mean(risks)), 3) if risks else None,
        "questions": exits.n_units - N_PILOT,
    }
