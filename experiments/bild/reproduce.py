"""Speculative decoding with BiLD (section 5.5 of the paper).

From a threshold record of `swiftsure.text.sweep_pair`: losses of sentences at each rollback
threshold, and how often the large model was asked, per token.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from experiments.studies import StudyOptions, studied
from experiments.sweeps import CONTROLS, DRAWN, SweepResult, load_sweep
from swiftsure import assets
from swiftsure.records import ThresholdRecord

__all__ = ["bild"]

EPSILONS = np.round(np.arange(0.005, 0.1001, 0.005), 3)
SHOWN = (0.01, 0.02, 0.05)
"""Levels of the table: drafts lose little, so larger ones change nothing."""
PASSES = "large_passes"


def bild(
    data: ThresholdRecord | str | os.PathLike[str] | None = None,
    *,
    risk: str = "gap",
    loss: str = "bleu",
    n_calibration: int = 500,
    **options: Unpack[StudyOptions],
) -> SweepResult:
    """Run the experiment on the sweep of a pair of models.

    Parameters
    ----------
    data : ThresholdRecord or file, optional
        A record with the cost "large_passes"; our own pair's by default. FILE.seconds.json beside
        FILE.parquet may hold the seconds per sentence at each threshold.
    risk, loss
        As in `record.curve`.
    n_calibration : sentences to calibrate on
    options : see `StudyOptions`
    """
    pairs = _timed(assets.BILD if data is None else data)
    if PASSES not in pairs.costs:
        raise ValueError(
            f"`data` must hold the cost {PASSES!r}, as records of sweep_pair do, but holds"
            f" {', '.join(pairs.costs) or 'none'}."
        )
    given: dict[str, Any] = {"risk": risk, "loss": loss, "n_calibration": n_calibration}
    given |= {"controls": {label: CONTROLS[label] for label in DRAWN}, "epsilons": EPSILONS}
    given["cost"] = PASSES
    study = studied(pairs, **given | options)
    speed = "sentences" if study.seconds else None
    title = f"{pairs.n:,} sentences, n = {n_calibration:,}"
    return SweepResult(study, title, "bild", "passes of the large model", SHOWN, speed)


def _timed(data: ThresholdRecord | str | os.PathLike[str]) -> ThresholdRecord:
    """Return a record with the seconds in the file beside it, if there is one.

    They are kept apart because they belong to one machine and to other sentences: policies made
    from the record must not mention them.
    """
    pairs = load_sweep(data)
    if isinstance(data, ThresholdRecord):
        return pairs
    file = Path(data).with_suffix(".seconds.json")
    if not file.is_file():
        return pairs
    found = json.loads(file.read_text(encoding="utf-8"))
    if not np.array_equal(found["thresholds"], pairs.thresholds):
        raise ValueError(f"{file} has other thresholds than the record: time the pair again.")
    return replace(pairs, costs={**pairs.costs, "seconds": np.asarray(found["seconds"])})
