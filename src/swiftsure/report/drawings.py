"""The charts of a report, from its findings."""

from dataclasses import replace

from swiftsure.certify.wording import average_words, percent
from swiftsure.report.charts import Chart, Mark, bar_chart, chart, line, log_ticks, with_named_lines
from swiftsure.report.figures import threshold_text
from swiftsure.report.findings import Findings
from swiftsure.report.quality import ExitLoss, Reliability
from swiftsure.report.sensitivity import Setting

__all__ = [
    "exit_loss_chart",
    "exit_shares_chart",
    "movement_charts",
    "reliability_chart",
    "risk_chart",
    "saving_chart",
]

X_TICKS = 5
HEADROOM = 3.0
"""The risk axis ends at this multiple of ε or below."""
TITLES = {"zero_one": "Accuracy", "brier": "Brier score"}
POLICY = "policy"
WHAT_IF = "what-if"


def risk_chart(found: Findings, promise: int) -> Chart:
    """Draw the risk along the path, its upper bound, and ε."""
    kept, along = found.policy.certificate.promises[promise], found.risks[promise]
    highest = max(*along.risk, *(along.upper or ()), kept.epsilon)
    certificate = found.policy.certificate
    how = average_words(certificate.samples.unit, certificate.samples.average)
    axes = chart(
        f"risk-{promise}",
        kept.name,
        f"Risk of the calibration samples{f' ({how})' if how else ''} along the thresholds, from"
        f" safe to fast, and the level ε = {kept.epsilon:g}.",
        x=(found.shown[0], found.shown[-1]),
        y=(min(0.0, *along.risk), min(1.1 * highest, HEADROOM * kept.epsilon)),
        x_label="threshold, from safe to fast",
        x_ticks=_threshold_ticks(found),
    )
    lines = [line(axes, along.settings, along.risk, "risk", label="measured")]
    if along.upper is not None:
        name = along.upper_name
        lines.insert(0, line(axes, along.upper_settings, along.upper, "upper", label=name))
    level = axes.y(kept.epsilon)
    return replace(
        with_named_lines(axes, lines),
        horizontals=(Mark(level, "level", f"ε = {kept.epsilon:g}"), Mark(level, WHAT_IF)),
        verticals=_setting_marks(found, axes),
    )


BELOW_ZERO = (
    "Below 0, so few samples exit early that deciding at the exits, or running the models before"
    " the last, costs more than is saved; the full model alone needs none of that."
)
"""Why a setting can save less than nothing."""


def saving_chart(found: Findings) -> Chart | None:
    """Draw the saving along the path; None for a record without costs."""
    if found.cost is None:
        return None
    saved = found.saved[found.cost]
    axes = chart(
        "saving",
        f"Saved, of {cost_words(found.cost)}",
        "Share of the full model's cost that is saved along the thresholds, from safe to fast."
        + f" {BELOW_ZERO}" * (min(saved) < 0),
        x=(found.shown[0], found.shown[-1]),
        y=(min(0.0, *saved), 1.05 * max(0.01, *saved)),
        x_label="threshold, from safe to fast",
        x_ticks=_threshold_ticks(found),
        y_percent=True,
    )
    curve = line(axes, found.shown, saved, "saved")
    return replace(axes, lines=(curve,), verticals=_setting_marks(found, axes))


def cost_words(cost: str) -> str:
    """Return the plural noun for a cost."""
    return "exits" if cost == "exit" else cost


def exit_shares_chart(setting: Setting) -> Chart | None:
    """Draw the share of samples at each exit; None for records without exits."""
    if setting.shares is None:
        return None
    bars = [(f"exit {k + 1}", share, percent(share)) for k, share in enumerate(setting.shares)]
    description = "Share of the calibration samples that take each exit: "
    texts = ", ".join(f"{name} {text}" for name, _, text in bars)
    return bar_chart("exits", "Samples that take each exit", f"{description}{texts}.", bars)


def exit_loss_chart(found: ExitLoss) -> Chart:
    """Draw the mean loss at each exit; the 0-1 loss against labels as accuracy."""
    accuracy = found.loss == "zero_one" and found.against == "labels"
    values = [1 - mean for mean in found.means] if accuracy else list(found.means)
    if found.against == "labels":
        title = TITLES.get(found.loss, f"Mean {found.loss}")
    else:
        title = f"Mean {found.loss} against the last exit"
    exits = range(1, len(values) + 1)
    space = 0.12 * (max(values) - min(values)) or 0.1
    axes = chart(
        f"loss-{found.loss}",
        title,
        f"{title} by exit: {', '.join(f'{value:.4g}' for value in values)}.",
        x=(0.8, len(values) + 0.2),
        y=(min(values) - space, max(values) + 2 * space),
        x_label="exit",
        x_ticks=[(k, str(k)) for k in exits if len(values) <= 12 or k % (len(values) // 6) == 1],
        y_percent=accuracy,
    )
    return replace(axes, lines=(line(axes, exits, values, "quality", dots=True),))


def reliability_chart(found: Reliability) -> Chart:
    """Draw how often an exit is right, by its confidence."""
    points = ", ".join(
        f"{100 * c:.0f} % confident {100 * a:.0f} % right"
        for c, a in zip(found.confidences, found.accuracies, strict=True)
    )
    axes = chart(
        f"reliability-{found.exit}",
        f"Exit {found.exit + 1}: {percent(found.error)} off",
        f"How often exit {found.exit + 1} is right, by its confidence: {points}.",
        x=(0.0, 1.0),
        y=(0.0, 1.0),
        x_label="confidence",
        x_ticks=[(share, percent(share)) for share in (0, 0.25, 0.5, 0.75, 1)],
        y_percent=True,
    )
    diagonal = line(axes, [0, 1], [0, 1], "ideal")
    measured = line(axes, found.confidences, found.accuracies, "quality", dots=True)
    return replace(axes, lines=(diagonal, measured))


def movement_charts(found: Findings) -> list[Chart]:
    """Draw how the saving depends on ε, δ and n."""
    if found.cost is None:
        return []
    cost, charts = found.cost, []
    for k, (kept, choices) in enumerate(
        zip(found.policy.certificate.promises, found.by_epsilon or (), strict=False)
    ):
        saved = [found.settings[index].saved[cost] for index in choices.settings]
        several = len(found.risks) > 1
        moved = f"ε of the {kept.name} alone" if several else "level ε"
        charts.append(
            _movement(f"by-epsilon-{k}", cost, moved, "ε", choices.epsilons, saved, choices.own)
        )
    if found.by_delta is not None:
        deltas = found.by_delta.deltas
        saved = [found.settings[index].saved[cost] for index in found.by_delta.settings]
        own = deltas.index(found.policy.certificate.delta or 0)
        charts.append(
            _movement("by-delta", cost, "failure probability δ", "δ", deltas, saved, own, True)
        )
    if found.by_size is not None and found.by_size.saved is not None:
        sizes = found.by_size.sizes
        own = sizes.index(found.policy.certificate.samples.n)
        unit = f"calibration {found.policy.certificate.samples.unit}"
        means = list(found.by_size.saved)
        charts.append(_movement("by-size", cost, unit, "n", sizes, means, own, True))
    return charts


def _movement(
    name: str,
    cost: str,
    moved: str,
    symbol: str,
    values: tuple[float, ...],
    saved: list[float],
    own: int,
    dots: bool = False,
) -> Chart:
    axes = chart(
        name,
        f"Saved, by {moved}",
        f"Share of {cost_words(cost)} saved, by {moved}: from {percent(saved[0])} at"
        f" {values[0]:,g} to {percent(saved[-1])} at {values[-1]:,g}.",
        x=(min(values), max(values)),
        y=(min(0.0, *saved), 1.1 * max(0.01, *saved)),
        x_label=f"{symbol}, on a logarithmic scale",
        x_ticks=log_ticks(min(values), max(values)),
        y_percent=True,
        x_log=True,
    )
    here = Mark(axes.x(values[own]), POLICY)
    return replace(axes, lines=(line(axes, values, saved, "saved", dots=dots),), verticals=(here,))


def _threshold_ticks(found: Findings) -> list[tuple[float, str]]:
    last = len(found.shown) - 1
    where = sorted({round(k * last / (X_TICKS - 1)) for k in range(X_TICKS)})
    texts = []
    for k in where:
        threshold = found.thresholds[k]
        if isinstance(threshold, tuple | str):  # too long for a tick: the number of the setting
            texts.append(f"no. {found.shown[k]}")
        else:
            texts.append("never" if threshold is None else threshold_text(threshold))
    return [(found.shown[k], text) for k, text in zip(where, texts, strict=True)]


def _setting_marks(found: Findings, axes: Chart) -> tuple[Mark, ...]:
    at = axes.x(max(found.chosen, found.shown[0]))
    return (Mark(at, POLICY), Mark(at, WHAT_IF))
