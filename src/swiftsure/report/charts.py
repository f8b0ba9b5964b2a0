"""Chart layout: positions of lines, bars and ticks, which templates turn into SVG.

Charts are as narrow as a phone, so that their text keeps its size there; wider pages put several
in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log10

import numpy as np
from matplotlib.ticker import MaxNLocator

__all__ = [
    "Axis",
    "Bar",
    "Chart",
    "Line",
    "Mark",
    "Tick",
    "bar_chart",
    "chart",
    "line",
    "log_ticks",
    "shortened",
    "with_named_lines",
]

WIDTH, HEIGHT = 340.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 26.0, 38.0
BAR_ROW_HEIGHT = 26.0
"""Height of a bar including the space around it."""
LETTER_WIDTH = 6.2
"""Approximate width of a letter."""
TITLE_LETTER, TITLE_CAPITAL, TITLE_WIDE = 7.2, 9.8, 12.5
"""Widths of letters, capitals and the widest letters in a title, in the widest common font."""
NAME_HEIGHT = 15.0
"""Height of a line's name."""
SWATCH_WIDTH = 40.0
"""Width of a legend entry without its letters: the line sample and spacing."""


@dataclass(frozen=True)
class Tick:
    """A position on an axis and its text."""

    at: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Axis:
    """An axis: its range in data and in the drawing, its ticks and its label."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[Tick, ...] = ()
    label: str = ""
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value in the drawing."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = log10(value), log10(low), log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.stop - self.start), 1)

    def holds(self, value: float) -> bool:
        """Whether a value is on the axis."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Line:
    """A line or a row of dots, with its label."""

    points: tuple[tuple[float, float], ...]
    kind: str
    """Its CSS class."""
    dots: bool = False
    label: str = ""
    label_at: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Mark:
    """A straight line across the drawing at one value."""

    at: float
    kind: str
    label: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of a bar chart."""

    y: float
    width: float
    name: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Everything in one drawing."""

    name: str
    """Unique on a page."""
    title: str
    description: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    verticals: tuple[Mark, ...] = ()
    horizontals: tuple[Mark, ...] = ()
    height: float = HEIGHT
    width: float = WIDTH

    @property
    def heading(self) -> str:
        """The title, shortened to one line; browsers show all of it on hovering."""
        return shortened(self.title, self.width)


def shortened(title: str, width: float) -> str:
    """Return a title shortened to a width by leaving out its middle.

    Examples
    --------
    >>> shortened("zero_one gap", 120), shortened("a_loss_with_a_long_name gap", 120)
    ('zero_one gap', 'a_loss_…ame gap')
    """
    short, kept = title, len(title)
    while sum(map(_letter_width, short)) > width and kept > 2:
        kept -= 1
        short = f"{title[: kept - kept // 2]}…{title[-(kept // 2) :]}"
    return short


def _letter_width(letter: str) -> float:
    if letter in "mwMW…%@":
        return TITLE_WIDE
    return TITLE_CAPITAL if letter.isupper() or not letter.isascii() else TITLE_LETTER


def chart(
    name: str,
    title: str,
    description: str,
    *,
    x: tuple[float, float],
    y: tuple[float, float],
    x_label: str,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_percent: bool = False,
    x_log: bool = False,
) -> Chart:
    """Return an empty chart with its axes.

    Parameters
    ----------
    x, y : (low, high)
    x_ticks : pairs of value and text, optional
        Round numbers by default.
    y_percent : bool
        Format shares as per cent.
    """
    placed = _nonempty_range(x, x_log)
    horizontal = Axis(*placed, LEFT, WIDTH - RIGHT, label=x_label, log=x_log)
    vertical = Axis(*_nonempty_range(y), HEIGHT - BOTTOM, TOP)
    given = _round_ticks(*placed, 5, percent=False) if x_ticks is None else x_ticks
    return Chart(
        name,
        title,
        description,
        x=_with_ticks(horizontal, given),
        y=_with_ticks(vertical, _round_ticks(vertical.low, vertical.high, 5, y_percent)),
    )


def line(
    axes: Chart,
    xs: Sequence[float],
    ys: Sequence[float],
    kind: str,
    *,
    label: str = "",
    dots: bool = False,
) -> Line:
    """Return a line through points."""
    points = tuple((axes.x(x), axes.y(y)) for x, y in zip(xs, ys, strict=True))
    return Line(points, kind, dots, label)


def with_named_lines(axes: Chart, lines: Sequence[Line]) -> Chart:
    """Return a chart with lines, and their names in a row below the axes."""
    x, named = LEFT, []
    for each in lines:
        named.append(replace(each, label_at=(round(x, 1), HEIGHT + 9)))
        x += SWATCH_WIDTH + LETTER_WIDTH * len(each.label)
    return replace(axes, lines=tuple(named), height=HEIGHT + NAME_HEIGHT)


def bar_chart(
    name: str, title: str, description: str, values: Sequence[tuple[str, float, str]]
) -> Chart:
    """Return a bar chart from the name, share of the full width and text of each bar."""
    left, right = 50.0, 56.0
    x = Axis(0.0, 1.0, left, WIDTH - right)
    bars = tuple(
        Bar(round(TOP + k * BAR_ROW_HEIGHT, 1), round(share * (x.stop - x.start), 1), label, text)
        for k, (label, share, text) in enumerate(values)
    )
    height = TOP + len(bars) * BAR_ROW_HEIGHT + 6
    return Chart(name, title, description, x, Axis(0, 1, 0, height), bars=bars, height=height)


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return round ticks for a logarithmic axis: 1, 2, 5, or only powers of ten."""
    powers = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    for digits in ((1, 2, 5), (1,)):
        values = [d * 10.0**k for k in powers for d in digits if low <= d * 10.0**k <= high]
        if len(values) <= 7:
            break
    return [(value, f"{value:,.0f}" if value >= 1 else f"{value:.4g}") for value in values]


def _nonempty_range(ends: tuple[float, float], log: bool = False) -> tuple[float, float]:
    """Return the ends of an axis, widened if they coincide."""
    low, high = ends
    if high > low:
        return low, high
    return (low / 2, high * 2) if log else (low - 0.5, high + 0.5)


def _round_ticks(low: float, high: float, most: int, percent: bool) -> list[tuple[float, str]]:
    steps = [1, 2, 2.5, 5, 10]
    values = MaxNLocator(nbins=most, steps=steps).tick_values(low, high)
    inside = [float(np.round(v, 12)) + 0.0 for v in values if low - 1e-12 <= v <= high + 1e-12]
    return [(v, f"{100 * v:.4g} %" if percent else f"{v:.4g}".replace("-", "−")) for v in inside]


def _with_ticks(axis: Axis, ticks: Sequence[tuple[float, str]]) -> Axis:
    placed = [Tick(axis(value), text) for value, text in ticks]
    if axis.stop > axis.start:  # texts along the x axis can overlap
        placed = _without_overlaps([_anchored_inside(tick, axis) for tick in placed])
    return replace(axis, ticks=tuple(placed))


def _anchored_inside(tick: Tick, axis: Axis) -> Tick:
    """Return a tick anchored so that its text stays within the axis."""
    half = LETTER_WIDTH * len(tick.text) / 2
    if tick.at + half > axis.stop + RIGHT:
        return replace(tick, anchor="end")
    return replace(tick, anchor="start") if tick.at - half < axis.start - 10 else tick


def _without_overlaps(ticks: list[Tick]) -> list[Tick]:
    """Return the ticks whose texts do not overlap that of an earlier tick."""
    kept: list[Tick] = []
    free = -WIDTH
    for tick in sorted(ticks, key=lambda tick: tick.at):
        width = LETTER_WIDTH * len(tick.text)
        start = tick.at - {"start": 0.0, "middle": width / 2, "end": width}[tick.anchor]
        if start >= free:
            kept.append(tick)
            free = start + width + LETTER_WIDTH
    return kept
