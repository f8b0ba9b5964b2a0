"""Speculative decoding with BiLD (section 5.5 of the paper).

From a threshold record of `swiftsure.text.sweep_pair`: losses of sentences at each rollback
threshold, and how often the large model was asked, per token.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swiftsure import assets
from swiftsure.control import Control
from swiftsure.evaluation import evaluate
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.sweeps import CONTROLS, Source, SweepResult, loaded

__all__ = ["bild"]

LTT = {"LTT (HB, zero-bounded)": Control("ltt", bound="hoeffding_bentkus", zero_bounded=True)}
EPSILONS = np.round(np.arange(0.005, 0.1001, 0.005), 3)
SHOWN = (0.01, 0.02, 0.05)
"""Levels of the table: drafts lose little, so larger ones change nothing."""
PASSES = "large_passes"


def bild(
    record: Source = None,
    *,
    risk: str = "gap",
    loss: str = "bleu",
    n_calibration: int = 500,
    splits: int = 100,
    delta: float = 0.1,
    epsilons: NDArray[np.float64] = EPSILONS,
    seed: int = 0,
    progress: bool | None = None,
) -> SweepResult:
    """Run the experiment on the sweep of a pair of models.

    Parameters
    ----------
    record : ThresholdRecord, or file
        With the cost "large_passes". Default: of the pair that was trained for the library. Beside
        FILE.parquet, FILE.seconds.json may say how long a sentence takes at each threshold.
    risk, loss
        As in `record.curve`.
    n_calibration : sentences to calibrate on
    splits : random splits into calibration and test sentences
    """
    pairs = _timed(loaded(record, assets.BILD), assets.BILD if record is None else record)
    if PASSES not in pairs.costs:
        raise ValueError(
            f"`record` must hold the cost {PASSES!r}, as records of sweep_pair do, but holds"
            f" {', '.join(pairs.costs) or 'none'}."
        )
    study = evaluate(
        pairs,
        risk=risk,
        loss=loss,
        controls=CONTROLS | LTT,
        epsilons=epsilons,
        delta=delta,
        n_calibration=n_calibration,
        splits=splits,
        seed=seed,
        progress=progress,
    )
    speed = "sentences" if study.seconds else None
    title = f"{pairs.n:,} sentences, n = {n_calibration:,}"
    return SweepResult(study, title, "bild", "passes of the large model", SHOWN, speed)


def _timed(pairs: ThresholdRecord, source: Source) -> ThresholdRecord:
    """Return a record with the seconds that lie beside its file, if any do.

    They are apart from it because they are of a machine, and of other sentences: policies made from
    the record must not speak of them.
    """
    if source is None or isinstance(source, ThresholdRecord):
        return pairs
    file = Path(source).with_suffix(".seconds.json")
    if not file.is_file():
        return pairs
    found = json.loads(file.read_text(encoding="utf-8"))
    if not np.array_equal(found["thresholds"], pairs.thresholds):
        raise ValueError(f"{file} is of other thresholds than the record: time the pair anew.")
    return replace(pairs, costs={**pairs.costs, "seconds": np.asarray(found["seconds"])})
