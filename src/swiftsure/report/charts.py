"""Charts as plain numbers: where everything stands, in the units of a small drawing.

Templates turn them into SVG. Drawings are as narrow as a phone, so that their text keeps its size
there; wider pages put several in a row.
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
ROW = 26.0
"""Height of a bar with the space around it."""
LETTER = 6.2
"""Width of a letter, about."""
TITLE_LETTER, TITLE_CAPITAL, TITLE_WIDE = 7.2, 9.8, 12.5
"""Widths of letters, capitals and the widest letters in a title, in the widest of usual fonts."""
ROOM = 15.0
"""Height of a line's name."""
SWATCH = 40.0
"""What a name takes beside its letters: the piece of line before it, and space."""


@dataclass(frozen=True)
class Tick:
    """A place on an axis and what is written there."""

    at: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Axis:
    """An axis: its ends in data and in the drawing, and what is written along it."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[Tick, ...] = ()
    label: str = ""
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return where a value stands in the drawing."""
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
    """A line or a row of dots, with the text that names it."""

    points: tuple[tuple[float, float], ...]
    kind: str
    """How it looks: a class of the style sheet."""
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
    """Everything that a drawing holds."""

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
        """The title, as much of it as fits in one line; browsers show the whole on hovering."""
        return shortened(self.title, self.width)


def shortened(title: str, width: float) -> str:
    """Return a title that is at most so wide, the middle left out: its ends tell most.

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
        Round numbers if they are not given.
    y_percent : bool
        Write shares as per cent.
    """
    placed = _spread(x, x_log)
    horizontal = Axis(*placed, LEFT, WIDTH - RIGHT, label=x_label, log=x_log)
    vertical = Axis(*_spread(y), HEIGHT - BOTTOM, TOP)
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
    """Return a chart with lines, and their names in a row below it, where no line runs."""
    x, named = LEFT, []
    for each in lines:
        named.append(replace(each, label_at=(round(x, 1), HEIGHT + 9)))
        x += SWATCH + LETTER * len(each.label)
    return replace(axes, lines=tuple(named), height=HEIGHT + ROOM)


def bar_chart(
    name: str, title: str, description: str, values: Sequence[tuple[str, float, str]]
) -> Chart:
    """Return a chart of bars: name, share of the full width, and text of each."""
    left, right = 50.0, 56.0
    x = Axis(0.0, 1.0, left, WIDTH - right)
    bars = tuple(
        Bar(round(TOP + k * ROW, 1), round(share * (x.stop - x.start), 1), label, text)
        for k, (label, share, text) in enumerate(values)
    )
    height = TOP + len(bars) * ROW + 6
    return Chart(name, title, description, x, Axis(0, 1, 0, height), bars=bars, height=height)


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return round numbers for a logarithmic axis: 1, 2, 5, or powers of ten if that is many."""
    powers = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    for digits in ((1, 2, 5), (1,)):
        values = [d * 10.0**k for k in powers for d in digits if low <= d * 10.0**k <= high]
        if len(values) <= 7:
            break
    return [(value, f"{value:,.0f}" if value >= 1 else f"{value:.4g}") for value in values]


def _spread(ends: tuple[float, float], log: bool = False) -> tuple[float, float]:
    """Return the ends of an axis, apart from each other even where the data are not."""
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
    if axis.stop > axis.start:  # along the x axis texts can run into each other
        placed = _apart([_inside(tick, axis) for tick in placed])
    return replace(axis, ticks=tuple(placed))


def _inside(tick: Tick, axis: Axis) -> Tick:
    """Return a tick whose text stays near the axis."""
    half = LETTER * len(tick.text) / 2
    if tick.at + half > axis.stop + RIGHT:
        return replace(tick, anchor="end")
    return replace(tick, anchor="start") if tick.at - half < axis.start - 10 else tick


def _apart(ticks: list[Tick]) -> list[Tick]:
    """Return the ticks whose texts do not run into that of a tick before them."""
    kept: list[Tick] = []
    free = -WIDTH
    for tick in sorted(ticks, key=lambda tick: tick.at):
        width = LETTER * len(tick.text)
        start = tick.at - {"start": 0.0, "middle": width / 2, "end": width}[tick.anchor]
        if start >= free:
            kept.append(tick)
            free = start + width + LETTER
    return kept
