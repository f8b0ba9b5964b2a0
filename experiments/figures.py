"""Figures that compare several models: their exits and their studies."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swiftsure.records import ExitRecord
from swiftsure.report.figures import COLORS, INK, finished, new_figure, tidy
from swiftsure.study.results import Study

__all__ = ["exits_figure", "models_figure"]

STYLES = ("-", (0, (4, 1.5)), "-.", (0, (1, 1)))  # dotted is the diagonal
TITLES = {
    "zero_one": "accuracy",
    "brier": "Brier score",
    "miou": "mean mIoU of an image",
    "miscoverage": "share of wrong pixels",
    "pixel_brier": "Brier score of pixels",
}
QUALITIES = ("zero_one", "miou")
"""Losses that are 1 minus a quality, which is drawn instead."""


def exits_figure(
    records: Mapping[str, ExitRecord], path: str | os.PathLike[str] | None = None
) -> Figure:
    """Draw the mean loss at each exit, one line per record: Fig. 1 of the paper.

    If the exits of a network improve on average (Eq. 2 of the paper), its line rises in accuracy
    and falls in any loss. The 0-1 loss is drawn as accuracy, the loss of mIoU as mIoU.

    Parameters
    ----------
    records : mapping of names to records
    path : path, optional
        Where to save it.
    """
    losses = list(dict.fromkeys(name for record in records.values() for name in record.losses))
    if not losses:
        raise ValueError("`records` must hold losses against labels, but none does.")
    figure = new_figure(3.9 * len(losses) + 0.4, 3.9)
    for axis, loss in zip(figure.subplots(1, len(losses), squeeze=False)[0], losses, strict=True):
        for color, (name, record) in zip(COLORS * 4, records.items(), strict=False):
            if loss not in record.losses:
                continue
            mean = np.nanmean(record.losses[loss], axis=0)
            values = 1 - mean if loss in QUALITIES else mean
            exits = np.arange(1, record.n_exits + 1)
            axis.plot(exits, values, color=color, marker="o", markersize=4, label=name)
        axis.set_xlabel("exit")
        axis.set_ylabel(TITLES.get(loss, f"mean {loss}"))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axis)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = min(3, len(losses) + 1)
        look = {"frameon": False, "fontsize": 8}
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)
    return finished(figure, path)


def models_figure(
    studies: Mapping[str, Mapping[str, Study]],
    controls: Sequence[str],
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw test risk above and efficiency below, over ε: Figs. 3 and 8 of the paper.

    Risks have columns, models colours, and controls line styles. On the dotted diagonal the risk
    is ε.

    Parameters
    ----------
    studies : mapping of column titles to mappings of model names to studies
    controls : labels of the controls to draw
    path : path, optional
        Where to save it.
    """
    figure = new_figure(3.3 * len(studies) + 0.6, 5.6)
    axes = figure.subplots(2, len(studies), sharex="col", sharey="row", squeeze=False)
    for (above, below), (title, models) in zip(axes.T, studies.items(), strict=True):
        highest = 0.0
        for color, (name, study) in zip(COLORS * 4, models.items(), strict=False):
            highest = max(highest, float(study.epsilons.max()))
            for style, control in zip(STYLES, controls, strict=False):
                look = {"color": color, "linestyle": style, "linewidth": 1.6}
                above.plot(study.epsilons, study.test_risk[control].mean(axis=0), **look)
                full = 100 - study.gain[control].mean(axis=0)
                below.plot(study.epsilons, full, **look, label=f"{name}, {control}")
        above.plot([0, highest], [0, highest], color=INK, linestyle=":", linewidth=1)
        above.set_title(title, fontsize=10, loc="left")
        below.set_xlabel("risk level ε")
        below.set_ylim(0, 102)
        tidy(above)
        tidy(below)
    axes[0, 0].set_ylabel("test risk")
    axes[1, 0].set_ylabel("mean exit, % of the last")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return finished(figure, path)
