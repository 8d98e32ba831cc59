"""Curves: how numbers change from step to step, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from aiograd.viz.svg import LINE, PALETTE, page, text

WIDTH, HEIGHT = 560.0, 240.0
LEFT, TOP, RIGHT, BOTTOM = 62.0, 14.0, 150.0, 42.0
TICKS = 4  # the least number of steps along an axis

Points = list[tuple[float, float]]
Numbers = Sequence[float] | tuple[Sequence[float], Sequence[float]]


class Chart:
    """A picture of named lines and dots over one pair of axes.

    >>> picture = ag.viz.chart({"loss": [3.0, 2.0, 1.0]})
    >>> picture.svg.startswith("<svg")
    True
    """

    x: str
    y: str

    def __init__(
        self, lines: Mapping[str, Numbers], dots: Mapping[str, Numbers], x: str, y: str
    ) -> None:
        self.lines: dict[str, list[tuple[float, float]]] = {
            name: _points(numbers) for name, numbers in lines.items()
        }
        self.dots: dict[str, list[tuple[float, float]]] = {
            name: _points(numbers) for name, numbers in dots.items()
        }
        self.x, self.y = x, y

    @property
    def svg(self) -> str:
        """The picture as SVG, legible on light and dark backgrounds."""
        points = [p for each in (*self.lines.values(), *self.dots.values()) for p in each]
        across = _ticks([x for x, _ in points])
        upward = _ticks([y for _, y in points])

        def place(x: float, y: float) -> tuple[float, float]:
            """Return where a point lies in the picture; y points down in SVG."""
            right = (x - across[0]) / (across[-1] - across[0])
            up = (y - upward[0]) / (upward[-1] - upward[0])
            return LEFT + WIDTH * right, TOP + HEIGHT * (1 - up)

        parts = _grid([place(x, upward[0])[0] for x in across], across, sideways=False)
        parts += _grid([place(across[0], y)[1] for y in upward], upward, sideways=True)
        parts.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, self.x, 11.5, LINE))
        parts.append(
            f"<g transform='rotate(-90 14 {TOP + HEIGHT / 2:g})'>"
            f"{text(14, TOP + HEIGHT / 2 + 4, self.y, 11.5, LINE)}</g>"
        )
        colours = {
            name: PALETTE[number % len(PALETTE)][1]
            # By name: a line and dots of one name share a colour and an entry of the legend.
            for number, name in enumerate(dict.fromkeys([*self.lines, *self.dots]))
        }
        for name, line in self.lines.items():
            # A tenth of a unit is less than a pixel; more digits only make the file larger.
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
            parts.append(
                f"<polyline points='{path}' fill='none' stroke='{colours[name]}' stroke-width='2' "
                "stroke-linejoin='round'/>"
            )
        for name, dots in self.dots.items():
            parts += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.2' fill='{colours[name]}'/>"
                for x, y in (place(*p) for p in dots)
            ]
        for row, (name, colour) in enumerate(colours.items()):
            y = TOP + 14 + 20 * row
            parts.append(
                f"<rect x='{LEFT + WIDTH + 14:g}' y='{y - 8:g}' width='14' height='4' rx='2' "
                f"fill='{colour}'/>"
            )
            parts.append(text(LEFT + WIDTH + 34, y - 2, name, 11.5, colour, anchor="start"))
        return page(LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM, parts)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Chart of {', '.join(dict.fromkeys([*self.lines, *self.dots])) or 'nothing'}>"


def chart(
    lines: Mapping[str, Numbers] | None = None,
    *,
    dots: Mapping[str, Numbers] | None = None,
    x: str = "step",
    y: str = "",
) -> Chart:
    """Draw numbers over their index, or pairs `(xs, ys)`; each name has a colour.

    >>> ag.viz.chart({"loss": [3.0, 2.0, 1.0]}).svg[:4]
    '<svg'
    """
    return Chart(lines or {}, dots or {}, x, y)


def _points(numbers: Numbers) -> Points:
    """Return pairs, with the index as x where none is given."""
    if isinstance(numbers, tuple):
        xs, ys = numbers
    else:
        xs, ys = range(len(numbers)), numbers
    pairs = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
    # A loss that has become nan must not make the whole picture empty.
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def _ticks(values: Iterable[float]) -> list[float]:
    """Round numbers, at equal distances, that enclose all values."""
    # An empty chart still has axes.
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    # A constant gets an axis around it.
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    # 1, 2 or 5 times a power of ten; the slack is for steps that are exact but for rounding.
    step = max(s * power for s in (1, 2, 5) if s * power <= rough * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]


def _grid(places: list[float], values: list[float], sideways: bool) -> list[str]:
    """Draw lines and labels of one axis."""
    parts = []
    for place, value in zip(places, values, strict=True):
        if sideways:
            ends = f"x1='{LEFT:g}' y1='{place:.1f}' x2='{LEFT + WIDTH:g}' y2='{place:.1f}'"
            label = text(LEFT - 8, place + 4, f"{value:.6g}", 10, LINE, anchor="end")
        else:
            ends = f"x1='{place:.1f}' y1='{TOP:g}' x2='{place:.1f}' y2='{TOP + HEIGHT:g}'"
            label = text(place, TOP + HEIGHT + 16, f"{value:.6g}", 10, LINE)
        parts += [f"<line {ends} stroke='{LINE}' stroke-opacity='0.22'/>", label]
    return parts
