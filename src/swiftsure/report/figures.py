"""Matplotlib figures, drawn with its object interface so that its global state is untouched."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from swiftsure._lib.files import atomic_write
from swiftsure.certify import bounds
from swiftsure.certify.policy import Policy
from swiftsure.certify.wording import average_words, percent
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.risks import risk_noun
from swiftsure.curves.transforms import zero_bounded
from swiftsure.study.results import Study

__all__ = [
    "COLORS",
    "INK",
    "figure_kind",
    "finished",
    "new_figure",
    "policy_figure",
    "save_figure",
    "study_figure",
    "threshold_text",
    "tidy",
]

COLORS = ("#1f6fb2", "#d9730d", "#2a8a57", "#a23b72", "#6b6b6b", "#8a6d3b")
INK = "#333333"
UNITS = {
    "exit": "mean exit",
    "layers": "mean layers",
    "large_passes": "passes of the large model per token",
}


def study_figure(
    studies: Study | Sequence[Study] | Mapping[str, Study],
    path: str | os.PathLike[str] | None = None,
    *,
    speed: str | None = None,
) -> Figure:
    """Draw the paper's figure: test risk (top) and efficiency (bottom) against ε.

    There is one line per control, shaded by the standard deviation over splits. The dotted diagonal
    is ε, which the mean test risk should stay below. Lines of controls without a guarantee are
    dashed.

    Parameters
    ----------
    studies : Study, several, or a mapping of titles to studies
        One column per study.
    path : path, optional
        Where to save it (png, pdf or svg).
    speed : str, optional
        What is processed, as a plural noun: a third row then shows how many per second, from the
        cost "seconds" of the record.

    Returns
    -------
    figure : matplotlib.figure.Figure
    """
    named = _named(studies)
    n_rows = 2 if speed is None else 3
    figure = new_figure(4.4 * len(named) + 0.4, 3.1 * n_rows)
    axes = figure.subplots(n_rows, len(named), sharex="col", squeeze=False)
    for column, (title, study) in enumerate(named.items()):
        above, below = axes[:2, column]
        rates = {label: 1 / seconds for label, seconds in study.seconds.items()}
        for color, label in zip(COLORS * 4, study.labels, strict=False):
            legend = study.legend(label)
            style = "-" if legend == label else (0, (5, 1.5))
            drawn = (study.test_risk, study.mean_cost, rates)
            for axis, values in zip(axes[:, column], drawn, strict=False):
                _band(axis, study.epsilons, values[label], color, legend, style)
        ends = [0.0, float(study.epsilons.max())]
        above.plot(ends, ends, color=INK, linestyle=":", linewidth=1.2, label="ε")
        if np.isfinite(study.full_cost):
            _mark_full(below, study.full_cost)
        above.set_title(title, fontsize=11, loc="left")
        axes[-1, column].set_xlabel("risk level ε")
        if speed is not None:
            _mark_full(axes[2, column], 1 / study.full_seconds)
        for axis in axes[:, column]:
            tidy(axis)
        for axis in axes[1:, column]:
            axis.set_ylim(bottom=0)
        if column == 0:
            kinds = {str(each.about) for each in named.values()}
            above.set_ylabel(f"test risk ({kinds.pop()})" if len(kinds) == 1 else "test risk")
            below.set_ylabel(UNITS.get(study.cost, f"mean {study.cost}") if study.cost else "cost")
            if speed is not None:
                axes[2, 0].set_ylabel(f"{speed} per second")
            above.legend(frameon=False, fontsize=8)
    return finished(figure, path)


def _mark_full(axis: Axes, value: float) -> None:
    """Mark the full model's value."""
    axis.axhline(value, color=INK, linewidth=1, linestyle=":")
    axis.annotate(
        "full model",
        (1, value),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
        color=INK,
    )


def policy_figure(
    curve: RiskCurve,
    policy: Policy,
    path: str | os.PathLike[str] | None = None,
    *,
    cost: str | None = None,
) -> Figure:
    """Draw the risk along a path, its upper bound, the level, and the saving.

    Parameters
    ----------
    curve : RiskCurve
        The calibration curve behind the policy.
    policy : Policy
        A policy with a single risk.
    path : path, optional
        Where to save it.
    cost : str, optional
        The cost whose saving is shown; by default the one that `policy.evaluate` reports.
    """
    promise = policy.certificate.promises[0]
    shown = np.unique(np.linspace(0, curve.n_settings - 1, 160).astype(int))
    position = np.arange(curve.n_settings)
    risk = curve.risk()
    figure = new_figure(7.2, 5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    how = average_words(policy.certificate.samples.unit, policy.certificate.samples.average)
    seen = f"risk on the calibration {policy.certificate.samples.unit}"
    above.plot(position, risk, color=COLORS[0], label=seen)
    # The bounds are for all samples and for one look at them.
    bounded = not curve.statistic.selective and policy.certificate.samples.horizon is None
    if bounded and promise.bound is not None and policy.certificate.delta is not None:
        bound = bounds.BOUNDS[promise.bound]
        ordered = curve
        if policy.certificate.options.get("zero_bounded"):
            ordered = zero_bounded(ordered)
        if policy.certificate.provenance.seed is not None:
            ordered = ordered.shuffled(policy.certificate.provenance.seed)
        rows = np.arange(ordered.n)[
            -policy.certificate.samples.n :
        ]  # earlier rows chose the setting
        upper = [bound.upper(ordered, rows, int(k), policy.certificate.delta, 0) for k in shown]
        sure = percent(1 - policy.certificate.delta)
        above.plot(shown, upper, color=COLORS[1], label=f"{sure} upper bound ({promise.bound})")
    above.axhline(promise.epsilon, color=INK, linestyle="--", linewidth=1)
    above.annotate(f"ε = {promise.epsilon:g}", (0, promise.epsilon), va="bottom", color=INK)
    spread = max(float(np.abs(risk).max()), promise.epsilon)
    above.set_ylim(
        min(0.0, float(risk.min())) - 0.05 * spread, min(1.2 * spread, 3 * promise.epsilon)
    )
    above.set_ylabel(promise.name + (f"\n{how}" if how else ""))
    cost = curve.default_cost(cost)
    if cost is not None:
        below.plot(position, 100 * curve.saving(cost), color=COLORS[2])
        below.set_ylabel(f"saved, % of {cost}")
        if (curve.saving(cost) < 0).any():
            below.axhline(0, color=INK, linewidth=1, linestyle=":")
            below.set_title("below 0, the early exits cost more than they save", fontsize=9)
    what = "setting" if policy.dials else "threshold"
    below.set_xlabel(f"{what}, safest first")
    _threshold_ticks(below, curve)
    for axis in (above, below):
        tidy(axis)
        if policy.certificate.index is not None:
            axis.axvline(policy.certificate.index, color=INK, linewidth=1)
    if isinstance(policy.threshold, float) and policy.certificate.index is not None:
        index, chosen = policy.certificate.index, threshold_text(policy.threshold)
        if policy.dials:
            chosen = ", ".join(f"{name} = {policy.settings[name]}" for name in policy.dials)
        side = "left" if index < 0.5 * curve.n_settings else "right"
        below.annotate(f" {chosen} ", (index, 0), color=INK, fontsize=9, ha=side)
    # Above the axes, where it cannot cover a curve.
    above.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return finished(figure, path)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure (png, pdf or svg) atomically."""
    kind = figure_kind(path)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=160)


def figure_kind(path: str | os.PathLike[str]) -> str:
    """Return the format that a file name's suffix asks for."""
    kind = Path(path).suffix.removeprefix(".").lower() or "png"
    if kind not in ("png", "pdf", "svg"):
        raise ValueError(f"`path` must end in .png, .pdf or .svg, but got {Path(path).name!r}.")
    return kind


def _named(studies: Study | Sequence[Study] | Mapping[str, Study]) -> dict[str, Study]:
    if isinstance(studies, Mapping):
        return dict(studies)
    several = [studies] if isinstance(studies, Study) else list(studies)
    if not several:
        raise ValueError("`studies` must not be empty.")
    named: dict[str, Study] = {}
    for study in several:
        title = f"n = {study.n_calibration:,}"
        if title in named:
            title = f"{study.about.statistic.loss} {risk_noun(study.about.statistic.risk)}, {title}"
        while title in named:
            title += " "
        named[title] = study
    return named


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure without a window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _band(axis: Axes, x: Any, runs: Any, color: str, label: str, style: Any) -> None:
    order = np.argsort(x)
    mean, spread = runs.mean(axis=0)[order], runs.std(axis=0)[order]
    axis.plot(x[order], mean, color=color, label=label, linewidth=1.8, linestyle=style)
    axis.fill_between(x[order], mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)


def _threshold_ticks(axis: Axes, curve: RiskCurve) -> None:
    where = np.unique(np.linspace(0, curve.n_settings - 1, 8).astype(int))
    values = curve.thresholds[where]
    if values.ndim == 1:
        texts = [threshold_text(float(v)) for v in values]
    else:
        texts = [str(k) for k in where]
    axis.set_xticks(where, texts)


def threshold_text(value: float) -> str:
    """Format a threshold briefly, distinguishable from 1."""
    if np.isinf(value):
        return "never"
    return f"1 − {1 - value:.1g}" if 0.995 < value < 1 else f"{value:.3g}"


def tidy(axis: Axes) -> None:
    """Remove spines and lighten the grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.02)


def finished(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Return the figure, saved if a path is given."""
    if path is not None:
        save_figure(figure, path)
    return figure
