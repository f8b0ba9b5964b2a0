"""Semantic segmentation (section 5.2 of the paper: Tables 1, 3 and 4, and its figures).

From an exit record with the nine image-level scores, such as that of ADP-C on CamVid, which
`experiments.segmentation.records` made.

Frames of a video depend on each other. The tables treat them as independent, as the paper does, so
their certificates hold for frames drawn like these, not for the next video. `by_group` shows the
difference: it tests on each video the thresholds that were certified on all others.
"""

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from experiments.figures import exits_figure
from experiments.segmentation.scenes import camvid_labels, scenes_figure
from experiments.studies import StudyOptions, column, evaluate_all, summary
from experiments.tables import join_levels, markdown_table, write_all
from swiftsure._lib.files import npz
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.control import Control
from swiftsure.certify.policy import Policy
from swiftsure.certify.promise import Promise
from swiftsure.exits import exit_indices
from swiftsure.records import ExitRecord
from swiftsure.report import study_figure
from swiftsure.study.results import Study
from swiftsure_zoo.records import SEGMENTATION

__all__ = ["RISKS", "SCORES", "SegmentationResult", "published", "segmentation"]

RISKS = {
    "gap, mIoU": ("gap", "miou"),
    "gap, Brier": ("gap", "pixel_brier"),
    "consistency, miscoverage": ("consistency", "miscoverage"),
    "consistency, Brier": ("consistency", "pixel_brier"),
}

AGGREGATES = {"mean": "Mean", "quantile": "Quantile", "patch": "Patch"}
PIXEL_SCORES = {"top1": "Top-1", "top_diff": "Top-Diff", "entropy": "Entropy"}
SCORES = {
    f"{aggregate}_{score}": f"{AGGREGATES[aggregate]}, {PIXEL_SCORES[score]}"
    for aggregate, score in product(AGGREGATES, PIXEL_SCORES)
}
"""Image-level scores in the order of the paper's tables, and their titles there."""

SIMPLEST = "mean_top1"
"""The score of the paper's figures."""

CONTROLS = {"UCB (WSR)": Control("ucb", bound="wsr"), "CRC (monotone)": Control("crc")}
TABLE_CONTROL = "UCB (WSR)"
TABLE_LEVELS = (0.01, 0.05, 0.1)
EPSILONS = np.union1d(TABLE_LEVELS, np.arange(0.02, 0.201, 0.02).round(2))
GAINS = {"exit": "mean exit", "flops": "FLOPs"}
NOT_CERTIFIED = "–"


@dataclass(frozen=True)
class SegmentationResult:
    """A study for each score and risk."""

    record: ExitRecord
    studies: Mapping[str, Mapping[str, Study]]
    delta: float
    seed: int
    scenes: Mapping[str, NDArray[np.uint8]] | None = None
    """Predictions and confidence maps of two scenes, and their labels if CamVid is at hand."""

    def table(self, gain: str = "exit") -> list[dict[str, Any]]:
        """Return the table of gains (%), one row per score; "–" if no split certified anything.

        Columns are those of the table's three levels that were studied.

        Parameters
        ----------
        gain : {"exit", "flops"}
            In mean exit layer, or in FLOPs.
        """
        rows = []
        for score, title in SCORES.items():
            row: dict[str, Any] = {"score": title}
            for risk, study in self.studies[score].items():
                for level in TABLE_LEVELS:
                    if np.isclose(study.epsilons, level).any():
                        row[_column(risk, level)] = _cell(study, level, gain)
            rows.append(row)
        return rows

    def by_group(self, epsilon: float = 0.1) -> list[dict[str, Any]]:
        """Return the risk in each video of thresholds that were certified on all the others.

        Empty if the record has no groups or a single video.
        """
        groups = np.asarray([] if self.record.groups is None else self.record.groups)
        videos = list(dict.fromkeys(groups.tolist()))
        if len(videos) < 2:
            return []
        frames = replace(self.record, groups=None, order=self.seed)
        rows = []
        for group in videos:
            inside = groups == group
            row: dict[str, Any] = {"video": group, "frames": int(inside.sum())}
            for title, (risk, loss) in RISKS.items():
                asked = Calibration(
                    Promise(loss, epsilon=epsilon, risk=risk),
                    delta=self.delta,
                    bound="wsr",
                    rule=SIMPLEST,
                )
                policy = asked.run(frames.take(np.flatnonzero(~inside)))
                row[title] = _risk_at(frames.take(np.flatnonzero(inside)), risk, loss, policy)
            rows.append(row)
        return rows

    def brier_by_exit(self, epsilon: float = 0.08) -> list[NDArray[np.float64]]:
        """Return |Brier loss at the first exit - at the last|, one array per exit taken.

        The exits are those of a policy for the gap of the Brier loss on all frames, as in the left
        part of the paper's figure. They show which images continue; nothing is certified.
        """
        frames = replace(self.record, groups=None, order=self.seed)
        promise = Promise("pixel_brier", epsilon=epsilon)
        policy = Calibration(promise, bound="wsr", rule=SIMPLEST).run(frames)
        losses = frames.losses["pixel_brier"]
        differences = np.abs(losses[:, 0] - losses[:, -1])
        taken = exit_indices(frames.confidences[SIMPLEST], policy.threshold)
        return [differences[taken == k] for k in range(frames.n_exits)]

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables to print, by title."""
        return {
            f"Gain in {title}, %: ε = 0.01 / 0.05 / 0.1": join_levels(self.table(gain), list(RISKS))
            for gain, title in GAINS.items()
        }

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write tables, figures and every number behind them; return the files.

        by_video.csv shows the risk of each video under thresholds that the others certified.
        """
        contents: dict[str, Any] = {}
        for gain in GAINS:
            contents[f"table_{gain}.md"] = markdown_table(self.table(gain), decimals=1)
            contents[f"table_{gain}.csv"] = self.table(gain)
        contents["summary.csv"] = summary(self.studies, "score", "risk")
        videos = self.by_group()
        if videos:
            contents["by_video.csv"] = videos
        files = write_all(folder, contents)
        figures = [Path(folder) / f"{name}.png" for name in ("exits", "curves", "scenes")]
        exits_figure({"ADP-C": self.record}, figures[0])
        study_figure(dict(self.studies[SIMPLEST]), figures[1])
        scenes_figure(self.brier_by_exit(), self.scenes, figures[2])
        return [*figures, *files]


def segmentation(
    data: ExitRecord | str | os.PathLike[str] | None = None,
    *,
    n_calibration: float = 0.8,
    **options: Unpack[StudyOptions],
) -> SegmentationResult:
    """Run the experiment on a record of a segmentation network.

    Parameters
    ----------
    data : ExitRecord or file, optional
        A record with the losses "miou", "miscoverage" and "pixel_brier" and the nine image-level
        scores; our own by default. FILE.npz beside FILE.parquet may hold two scenes to draw.
    n_calibration : int, or a fraction of the images
        0.8 in the paper.
    options : see `StudyOptions`; 1,000 draws by default
    """
    scenes = None
    if isinstance(data, ExitRecord):
        record = data
    else:
        file = Path(data or SEGMENTATION)
        record = ExitRecord.load(file)
        if file.with_suffix(".npz").is_file():
            with npz(file.with_suffix(".npz")) as held:
                scenes = {name: held[name] for name in held}
            if data is None:
                scenes |= camvid_labels(record)
    missing = [score for score in SCORES if score not in record.confidences]
    if missing:
        raise ValueError(
            f"`data` must hold the scores {', '.join(SCORES)}, but lacks {', '.join(missing)}:"
            " collect them with `scores=`."
        )
    frames = replace(record, groups=None)
    cases = {
        (score, title): {"risk": risk, "loss": loss, "score": score}
        for score in SCORES
        for title, (risk, loss) in RISKS.items()
    }
    given = {"epsilons": EPSILONS, "draws": 1000, "delta": 0.1, "seed": 0, **options}
    given |= {"record": frames, "controls": CONTROLS, "n_calibration": n_calibration}
    given["cost"] = "exit"
    studies = evaluate_all(cases, **given)
    return SegmentationResult(record, studies, given["delta"], given["seed"], scenes)


def published(data: str, gain: str = "exit") -> list[dict[str, Any]]:
    """Return the paper's own table of gains (%).

    Parameters
    ----------
    data : {"cityscapes", "gta5"}
        Table 3 or Table 4.
    gain : {"exit", "flops"}

    Examples
    --------
    >>> published("cityscapes")[0]["gap, mIoU, ε=0.05"]
    33.7
    """
    text = (Path(__file__).parent / "published.csv").read_text(encoding="utf-8")
    rows = []
    for found in csv.DictReader(text.splitlines()):
        if (found.pop("data"), found.pop("gain in")) == (data, gain):
            title = SCORES[found.pop("score")]
            rows.append({"score": title} | {name: float(found[name]) for name in found})
    return rows


def _column(risk: str, level: float) -> str:
    return f"{risk}, ε={level:g}"


def _cell(study: Study, level: float, gain: str) -> float | str:
    at = column(study, level)
    if np.isinf(study.thresholds[TABLE_CONTROL][:, at]).all():
        return NOT_CERTIFIED
    gains = study.gain if gain == "exit" else study.flops_gain
    return round(float(gains[TABLE_CONTROL][:, at].mean()), 1)


def _risk_at(record: ExitRecord, risk: str, loss: str, policy: Policy) -> float:
    """Return a record's risk under a policy with one threshold for all exits."""
    if not isinstance(policy.threshold, float):
        return 0.0  # always the full model
    curve = record.curve(risk, loss, score=SIMPLEST, path=[policy.threshold])
    return round(float(curve.risk()[-1]), 4)
