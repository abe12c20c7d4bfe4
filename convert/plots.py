"""Plots as inline SVG text: pure geometry from numbers to coordinates.

Colours come from classes `k0` to `k5` of the page's style sheet, so that one drawing serves light and dark; hover
texts are `<title>` elements. Every coordinate lies inside the view box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 16, 30, 44  # where drawings begin and end; BOTTOM from below
BAR_LEFT = 400  # the same for bars with names beside them
BAR_HEIGHT = 20
N_COLOURS = 6
CHARACTER_WIDTH = 7  # about; labels keep their distance by it

Show = Callable[[float], str]  # a value in words
Series = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Scale:
    """A linear map from [low, high] to coordinates [start, end]; values outside land on its ends."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The coordinate of `value`."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """At most `most` and one round values inside, 1, 2 or 5 times a power of ten apart."""
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


@dataclass(frozen=True)
class Axis:
    """A scale with its ticks in words, and what it measures."""

    scale: Scale
    ticks: Mapping[float, str]
    label: str

    @classmethod
    def of_values(cls, values: Iterable[float], label: str, show: Show, ends: tuple[float, float]) -> Axis:
        """From zero when that is near, with room around `values`; `ends` are the coordinates of its ends."""
        found = list(values) or [0.0]
        low, high = min(found), max(found)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        scale = Scale(0.0 if low < 0.5 * high else max(0.0, low - room), high + room, *ends)
        ticks = next((ticks for most in (6, 4, 2) if _differ(ticks := scale.ticks(most), show)), scale.ticks()[:1])
        return cls(scale, {tick: show(tick) for tick in ticks}, label)


def _differ(ticks: Sequence[float], show: Show) -> bool:
    """True when no two ticks are the same in words: values very close together bear few ticks."""
    return len({show(tick) for tick in ticks}) == len(ticks)


@dataclass(frozen=True)
class Slots:
    """Equal places along the x axis, one for each label."""

    labels: Sequence[str]
    name: str  # of what the labels number

    @property
    def width(self) -> float:
        """Of one slot."""
        return (RIGHT - LEFT) / max(1, len(self.labels))

    def centre(self, n: int) -> float:
        """The middle of slot `n`."""
        return LEFT + (n + 0.5) * self.width

    def shown(self) -> Iterator[tuple[float, str]]:
        """(centre, label) of as many labels as fit."""
        widest = CHARACTER_WIDTH * (max(map(len, self.labels), default=0) + 1)
        every = max(1, math.ceil(widest / self.width))
        yield from ((self.centre(n), self.labels[n]) for n in range(0, len(self.labels), every))


@dataclass
class Plot:
    """An SVG drawing with a title, and a description for those who cannot see it."""

    title: str
    description: str
    height: float = 300
    left: float = LEFT
    parts: list[str] = field(default_factory=list)

    @property
    def upwards(self) -> tuple[float, float]:
        """The ends of a y axis."""
        return self.height - BOTTOM, TOP

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """A straight line."""
        self.parts.append(f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def rect(self, x: float, y: float, width: float, height: float, style: str, hover: str, opacity: float = 1) -> None:
        """A filled rectangle."""
        faded = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
        self.parts.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{faded}>'
            f"<title>{escape(hover)}</title></rect>"
        )

    def dot(self, x: float, y: float, style: str, hover: str) -> None:
        """A point of a line."""
        self.parts.append(
            f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{escape(hover)}</title></circle>'
        )

    def polyline(self, points: Iterable[tuple[float, float]], style: str) -> None:
        """A line through `points`."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{style}" points="{path}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        """A label."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def y_axis(self, axis: Axis) -> None:
        """Grid lines with their values; what they measure stands above them."""
        for value, text in axis.ticks.items():
            y = axis.scale.at(value)
            self.line(self.left, y, RIGHT, y, "grid")
            self.text(self.left - 6, y + 4, text, "end")
        self.text(0, 12, axis.label, "start")

    def x_axis(self, places: Iterable[tuple[float, str]], label: str) -> None:
        """Labels below the drawing, and what they stand for."""
        bottom = self.height - BOTTOM
        self.line(self.left, bottom, RIGHT, bottom, "axis")
        for x, text in places:
            self.text(x, bottom + 16, text)
        self.text((self.left + RIGHT) / 2, self.height - 8, label)

    def svg(self) -> str:
        """The element, to stand in a page."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" role="img">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>\n"
            + "\n".join(self.parts)
            + "</svg>"
        )


def colour(n: int) -> str:
    """The class of series `n`."""
    return f"k{n % N_COLOURS}"


def slot_lines(plot: Plot, slots: Slots, series: Series, label: str, show: Show) -> str:
    """One line per series over the slots, with a dot and a hover text for each value."""
    axis = Axis.of_values((value for values in series.values() for value in values), label, show, plot.upwards)
    plot.y_axis(axis)
    plot.x_axis(slots.shown(), slots.name)
    for n, (name, values) in enumerate(series.items()):
        points = [(slots.centre(place), axis.scale.at(value)) for place, value in enumerate(values)]
        plot.polyline(points, f"curve {colour(n)}")
        for (x, y), value, slot in zip(points, values, slots.labels, strict=True):
            plot.dot(x, y, colour(n), f"{slots.name} {slot}, {name}: {show(value)}")
    return plot.svg()


@dataclass(frozen=True)
class Box:
    """A distribution by five numbers, and what to say of it."""

    values: tuple[float, ...]  # least, lower quartile, median, upper quartile, greatest
    hover: str


def slot_boxes(plot: Plot, slots: Slots, boxes: Sequence[Box], axis: Axis, style: str) -> str:
    """For every slot a box from quartile to quartile with its median, on a line from the least to the greatest."""
    plot.y_axis(axis)
    plot.x_axis(slots.shown(), slots.name)
    half = min(12.0, 0.35 * slots.width)
    for n, box in enumerate(boxes):
        x = slots.centre(n)
        least, lower, median, upper, greatest = map(axis.scale.at, box.values)
        plot.line(x, least, x, greatest, f"whisker {style}")
        plot.rect(x - half, upper, 2 * half, max(1.0, lower - upper), style, box.hover)
        plot.line(x - half, median, x + half, median, "median")
        plot.rect(x - slots.width / 2, TOP, slots.width, plot.height - BOTTOM - TOP, "band", box.hover)
    return plot.svg()


def slot_stacks(plot: Plot, slots: Slots, series: Series, label: str, show: Show) -> str:
    """A bar for every slot, the series one upon the other."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    axis = Axis.of_values([0.0, *totals], label, show, plot.upwards)
    plot.y_axis(axis)
    plot.x_axis(slots.shown(), slots.name)
    width = min(48.0, 0.8 * slots.width)
    for n, slot in enumerate(slots.labels):
        below = 0.0
        for k, (name, values) in enumerate(series.items()):
            top, bottom = axis.scale.at(below + values[n]), axis.scale.at(below)
            hover = f"{slots.name} {slot}, {name}: {show(values[n])} of {show(totals[n])}"
            plot.rect(slots.centre(n) - width / 2, top, width, bottom - top, colour(k), hover)
            below += values[n]
    return plot.svg()


def slot_heat(plot: Plot, slots: Slots, rows: Series, show: Show) -> str:
    """A strip of cells for every row; the paler a cell, the nearer it is to the least value of all."""
    values = [value for row in rows.values() for value in row]
    low, high = min(values), max(values)
    plot.x_axis(slots.shown(), slots.name)
    cell = (plot.height - TOP - BOTTOM) / len(rows)
    for n, (name, row) in enumerate(rows.items()):
        y = TOP + n * cell
        plot.text(LEFT - 6, y + cell / 2 + 4, name, "end")
        for place, value in enumerate(row):
            depth = (value - low) / (high - low) if high > low else 1.0
            x, hover = (
                slots.centre(place) - slots.width / 2,
                f"{slots.name} {slots.labels[place]}, {name}: {show(value)}",
            )
            plot.rect(x, y, slots.width, cell, "k0", hover, 0.12 + 0.88 * depth)
    return plot.svg()


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with a hover text of its own."""

    low: float
    high: float
    hover: str


def curves(
    plot: Plot, x_axis: Axis, y_axis: Axis, series: Sequence[Sequence[tuple[float, float]]], bands: Sequence[Band]
) -> str:
    """One curve per series of points between two numeric axes."""
    plot.y_axis(y_axis)
    plot.x_axis(((x_axis.scale.at(value), text) for value, text in x_axis.ticks.items()), x_axis.label)
    for n, points in enumerate(series):
        plot.polyline(((x_axis.scale.at(x), y_axis.scale.at(y)) for x, y in points), f"curve {colour(n)}")
    for band in bands:
        x = x_axis.scale.at(band.low)
        plot.rect(x, TOP, x_axis.scale.at(band.high) - x, plot.height - BOTTOM - TOP, "band", band.hover)
    return plot.svg()


@dataclass(frozen=True)
class Bar:
    """A bar with its name, and a line from the least to the greatest of what it stands for."""

    name: str
    least: float
    median: float
    greatest: float
    hover: str


def bars_height(n_bars: int) -> float:
    """Height of a plot of so many bars."""
    return TOP + BAR_HEIGHT * n_bars + BOTTOM


def bars(plot: Plot, rows: Sequence[Bar], label: str, show: Show) -> str:
    """Horizontal bars from zero, named at the left; of a long name the end is shown."""
    axis = Axis.of_values([0.0, *(row.greatest for row in rows)], label, show, (plot.left, RIGHT))
    for value in axis.ticks:
        x = axis.scale.at(value)
        plot.line(x, TOP, x, plot.height - BOTTOM, "grid")
    plot.x_axis(((axis.scale.at(value), text) for value, text in axis.ticks.items()), label)
    most = int((plot.left - 12) / CHARACTER_WIDTH)
    for n, row in enumerate(rows):
        middle = TOP + (n + 0.5) * BAR_HEIGHT
        plot.text(plot.left - 6, middle + 4, row.name if len(row.name) <= most else f"…{row.name[1 - most :]}", "end")
        least, median, greatest = map(axis.scale.at, (row.least, row.median, row.greatest))
        plot.rect(plot.left, middle - 6, median - plot.left, 12, "k0", row.hover)
        plot.line(least, middle, greatest, middle, "median")
        plot.rect(0, middle - BAR_HEIGHT / 2, WIDTH, BAR_HEIGHT, "band", row.hover)
    return plot.svg()
