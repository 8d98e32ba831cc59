"""Timeline: what each worker did when, one lane per worker, as SVG."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from aiograd.viz.svg import LINE, PALETTE, page, text

BAR, SPACE, LABEL, WIDTH = 18.0, 6.0, 110.0, 720.0


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds of one common clock.

    >>> ag.viz.timeline([ag.viz.Span("worker0", "load", 0.0, 1.5)]).svg[:4]
    '<svg'
    """

    worker: str
    name: str
    start: float
    end: float


class Timeline:
    """A picture of spans; those of one worker that overlap stand below each other.

    >>> with ag.profile() as prof:
    ...     result = await ag.rpc_async("worker1", abs, args=(-1,))
    >>> ag.viz.timeline(prof.events).svg[:4]
    '<svg'
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        # By their start, on which `rows` relies.
        self.spans: list[Span] = sorted(spans, key=lambda span: (span.start, span.end))
        for span in self.spans:
            if span.end < span.start:
                raise ValueError(f"{span.name} on {span.worker} ends before it starts")

    def rows(self) -> dict[str, list[list[Span]]]:
        """Per worker, rows of spans that do not overlap: each span in the first row with room."""
        lanes: dict[str, list[list[Span]]] = {}
        for span in self.spans:
            lines = lanes.setdefault(span.worker, [])
            # The first row with room: spans are sorted by their start, so that this takes the
            # fewest rows possible.
            for line in lines:
                if line[-1].end <= span.start:
                    line.append(span)
                    break
            else:
                lines.append([span])
        return lanes

    @property
    def svg(self) -> str:
        """The picture as SVG, legible on light and dark backgrounds."""
        begin = min((span.start for span in self.spans), default=0.0)
        finish = max((span.end for span in self.spans), default=begin)
        # A single moment has no length.
        scale = WIDTH / ((finish - begin) or 1.0)
        y, parts = 10.0, []
        for number, (worker, lines) in enumerate(self.rows().items()):
            fill, border = PALETTE[number % len(PALETTE)]
            height = len(lines) * (BAR + SPACE) + SPACE
            parts.append(
                f"<rect x='{LABEL:g}' y='{y:g}' width='{WIDTH:g}' height='{height:g}' rx='6' "
                f"fill='{border}' fill-opacity='0.09'/>"
            )
            parts.append(text(LABEL - 10, y + 18, worker, 12, border, anchor="end", weight=700))
            for row, line in enumerate(lines):
                top = y + SPACE + row * (BAR + SPACE)
                parts += [_bar(span, begin, scale, top, fill, border) for span in line]
            y += height + SPACE
        parts += _axis(finish - begin, y)
        return page(LABEL + WIDTH + 30, y + 26, parts)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.spans)} spans>"


def timeline(spans: Iterable[Span]) -> Timeline:
    """Draw what each worker did when.

    >>> with ag.profile() as prof:
    ...     result = await ag.rpc_async("worker1", abs, args=(-1,))
    >>> ag.viz.timeline(prof.events).svg[:4]
    '<svg'
    """
    return Timeline(spans)


def _bar(span: Span, begin: float, scale: float, top: float, fill: str, border: str) -> str:
    """Draw one span; its name shows in full when the pointer rests on it."""
    # At least a thin line: a short span must be seen too.
    left, width = LABEL + (span.start - begin) * scale, max(1.5, (span.end - span.start) * scale)
    drawn = (
        f"<g><title>{escape(f'{span.name}: {_duration(span.end - span.start)}')}</title>"
        f"<rect x='{left:.1f}' y='{top:.1f}' width='{width:.1f}' height='{BAR:g}' rx='4' "
        f"fill='{fill}' stroke='{border}'/>"
    )
    # About six units per letter; a name that is cut to one letter says nothing.
    room = int((width - 8) / 6)
    if room >= 2:
        name = span.name if len(span.name) <= room else span.name[: room - 1] + "…"
        drawn += text(left + 5, top + 13, name, 10.5, "#1d2430", anchor="start")
    return drawn + "</g>"


def _axis(length: float, y: float) -> list[str]:
    """Draw the axis, from the first start to the last end."""
    parts = [f"<line x1='{LABEL:g}' y1='{y:g}' x2='{LABEL + WIDTH:g}' y2='{y:g}' stroke='{LINE}'/>"]
    for tick in range(5):
        x = LABEL + WIDTH * tick / 4
        parts.append(text(x, y + 15, _duration(length * tick / 4), 10, LINE))
    return parts


def _duration(seconds: float) -> str:
    """Return a duration in a unit that fits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return (
        f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"
    )
