"""The figure of segmentation: where images exit, and predictions for two of them."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.studies import DATA_FOLDER
from swiftsure.losses import VOID
from swiftsure.records import ExitRecord
from swiftsure.report.figures import COLORS, INK, finished, new_figure, tidy

__all__ = ["SHOWN_SIZE", "camvid_labels", "scenes_figure", "shown_scenes"]

SHOWN_SIZE = (180, 240)

CLASS_COLORS = (
    "#6fa8dc", "#8c6d62", "#d9a441", "#7a5c8e", "#d16ba5", "#5a8f4e", "#c94f4f",
    "#b8a07e", "#33539e", "#e07b39", "#70343c", "#4aa8a0", "#a3b18a", "#6d6875",
    "#e5989b", "#355070", "#9a8c98", "#bc6c25", "#606c38",
)  # fmt: skip
"""One per class, as many as Cityscapes has."""


def scenes_figure(
    differences: Sequence[NDArray[np.float64]],
    scenes: Mapping[str, NDArray[np.uint8]] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw how much the loss changes from first to last exit, and two scenes.

    Parameters
    ----------
    differences : one array per exit
        How much the last exit would change the loss of the images that exit there.
    scenes : mapping, optional
        "early_predictions" and "early_confidences" (n_exits, height, width) of a scene that exits
        early, optionally "early_label" (height, width), and the same for a late one. Confidences
        are in 255ths.
    path : path, optional
        Where to save it.
    """
    if scenes is None:
        figure = new_figure(4.2, 3.6)
        _draw_differences(figure.subplots(), differences)
        return finished(figure, path)
    figure = new_figure(13.0, 3.7)
    sides: Any = figure.subfigures(1, 2, width_ratios=(1, 3.2))
    left, right = sides
    _draw_differences(left.subplots(), differences)
    _draw_scenes(right.subplots(2, 5 if "early_label" in scenes else 4), scenes)
    return finished(figure, path)


def shown_scenes(record: ExitRecord) -> dict[str, int]:
    """Return the rows of the scenes with the highest and lowest confidence at the first exit."""
    order = np.argsort(record.confidences["mean_top1"][:, 0])
    return {"early": int(order[-1]), "late": int(order[0])}


def camvid_labels(record: ExitRecord) -> dict[str, NDArray[np.uint8]]:
    """Return the labels of the shown scenes, where CamVid is in the folder of data; else nothing.

    CamVid's terms do not allow us to distribute them.
    """
    if not (DATA_FOLDER / "camvid").is_dir() or find_spec("torch") is None:
        return {}
    from swiftsure_zoo.readers.road_scenes import CamVid

    part = CamVid(DATA_FOLDER / "camvid", "test")
    labels = {}
    for kind, row in shown_scenes(record).items():
        label = part[row][1].numpy()
        rows, columns = (
            np.arange(new) * old // new for new, old in zip(SHOWN_SIZE, label.shape, strict=True)
        )
        labels[f"{kind}_label"] = label[np.ix_(rows, columns)].astype(np.uint8)
    return labels


def _draw_differences(axis: Any, differences: Sequence[NDArray[np.float64]]) -> None:
    jitter = np.random.default_rng(0)
    for k, values in enumerate(differences, start=1):
        spread = jitter.uniform(-0.18, 0.18, len(values))
        axis.scatter(k + spread, values, s=9, color=COLORS[0], alpha=0.45, linewidths=0)
        if len(values):
            axis.scatter([k], [values.mean()], s=42, color=COLORS[1], zorder=3)
    axis.set_xticks(range(1, len(differences) + 1))
    axis.set_xlim(0.5, len(differences) + 0.5)  # include exits that no image took
    axis.set_xlabel("exit taken")
    axis.set_ylabel("|Brier loss at first exit - at last|")
    axis.set_title("effect of later exits (orange: mean)", fontsize=10, loc="left")
    tidy(axis)


def _draw_scenes(axes: Any, scenes: Mapping[str, NDArray[np.uint8]]) -> None:
    classes = ListedColormap([*CLASS_COLORS, "#ffffff"])
    for line, kind in zip(axes, ("early", "late"), strict=True):
        predictions, confidences = scenes[f"{kind}_predictions"], scenes[f"{kind}_confidences"]
        parts: list[tuple[str, NDArray[np.uint8], bool]] = [
            ("first exit", predictions[0], True),
            ("its confidence", confidences[0], False),
            ("last exit", predictions[-1], True),
            ("its confidence", confidences[-1], False),
        ]
        if f"{kind}_label" in scenes:
            parts.insert(0, ("label", scenes[f"{kind}_label"], True))
        for axis, (title, image, of_classes) in zip(line, parts, strict=True):
            if of_classes:
                shown = np.where(image == VOID, len(CLASS_COLORS), image)
                axis.imshow(shown, cmap=classes, vmin=0, vmax=len(CLASS_COLORS))
            else:
                axis.imshow(image, cmap="gray", vmin=0, vmax=255)
            axis.set_xticks([])
            axis.set_yticks([])
            if kind == "early":
                axis.set_title(title, fontsize=10, loc="left")
        line[0].set_ylabel(f"exits {kind}", color=INK)
