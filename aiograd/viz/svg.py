"""Drawing a graph as SVG. No background and middle greys, so it reads on light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from aiograd.viz.layout import Key, Layout, arrange

if TYPE_CHECKING:
    from aiograd.viz.graph import Graph, GraphEdge, GraphNode

SHRINK = 0.6  # a picture wider than the page becomes smaller, but not smaller than this

HEIGHT, DISTANCE = 38.0, 74.0  # of a box, and from row to row
MARGIN, HEADER = 14.0, 30.0
LINE = "#8b93a1"  # grey enough for white paper and light enough for a dark page
CROSSING = "#e07b39"

# (fill, border) of each worker's boxes; text on them is always dark
PALETTE = (
    ("#dbe8fb", "#4a7fd0"),
    ("#dcf3e3", "#3f9a63"),
    ("#fdeccb", "#cf9325"),
    ("#f0e0f7", "#9358b5"),
    ("#fbdedd", "#cc5a55"),
    ("#d5f1f1", "#31918f"),
    ("#ece7dd", "#8d7d5b"),
    ("#e3e6ee", "#66708a"),
)
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"
_HEADS = (
    "<marker id='{0}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
    "orient='auto'><path d='M0,0.8 L7.5,4 L0,7.2 z' fill='{1}'/></marker>"
)


def page(width: float, height: float, parts: Sequence[str]) -> str:
    """A whole picture; on a narrow page it shrinks, within limits."""
    style = f"max-width:max(100%,{SHRINK * width:.0f}px);height:auto"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
            f"viewBox='0 0 {width:.0f} {height:.0f}' style='{style}' {FONT}>",
            *parts,
            "</svg>",
        ]
    )


def draw_graph(graph: Graph) -> str:
    """The whole picture."""
    workers = graph.workers
    lane = {worker: i for i, worker in enumerate(workers)}
    lane_of: dict[Key, int] = {node.id: lane.get(node.worker or "", 0) for node in graph.nodes}
    widths: dict[Key, float] = {node.id: _width(node) for node in graph.nodes}
    arrows = _merged(graph.edges)
    layout = arrange(widths, [(e.source, e.target) for e in arrows], lane_of, max(1, len(workers)))
    top = MARGIN + (HEADER if workers else 0) + (HEADER if graph.title else 0)
    depth = max((layout.row[node.id] for node in graph.nodes), default=0)
    width = max(layout.lanes[-1][1], 8.0 * len(graph.title)) + 2 * MARGIN
    height = top + depth * DISTANCE + HEIGHT + 2 * MARGIN
    parts = ["<defs>" + _HEADS.format("head", LINE) + _HEADS.format("cross", CROSSING) + "</defs>"]
    if graph.title:
        parts.append(text(MARGIN, MARGIN + 12, graph.title, 13, LINE, anchor="start", weight=600))
    parts += _lanes(workers, layout, top, height)
    ys = {key: top + MARGIN / 2 + row * DISTANCE + HEIGHT / 2 for key, row in layout.row.items()}
    for edge, path in zip(arrows, layout.paths, strict=True):
        points = [(layout.x[key] + MARGIN, ys[key]) for key in path]
        parts.append(_edge(edge, points))
    for node in graph.nodes:
        colours = PALETTE[lane_of[node.id] % len(PALETTE)]
        parts.append(_box(node, layout.x[node.id] + MARGIN, ys[node.id], widths[node.id], colours))
    return page(width, height, parts)


def text(
    x: float,
    y: float,
    words: str,
    size: float,
    colour: str,
    *,
    anchor: str = "middle",
    weight: int = 400,
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{colour}' "
        f"text-anchor='{anchor}' font-weight='{weight}'>{escape(words)}</text>"
    )


def _merged(edges: Sequence[GraphEdge]) -> list[GraphEdge]:
    """One arrow between two boxes, with all the labels, however often they are connected."""
    labels: dict[GraphEdge, list[str]] = {}
    for edge in edges:
        labels.setdefault(replace(edge, label=""), []).append(edge.label)
    return [replace(edge, label=" ".join(filter(None, all_))) for edge, all_ in labels.items()]


def _width(node: GraphNode) -> float:
    return max(62.0, 7.4 * len(node.label) + 26, 5.9 * len(node.detail) + 26)


def _lanes(workers: Sequence[str], layout: Layout, top: float, height: float) -> list[str]:
    parts = []
    for number, worker in enumerate(workers):
        left, right = layout.lanes[number]
        _, border = PALETTE[number % len(PALETTE)]
        x, y = left + MARGIN + 3, top - HEADER + 4
        parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{right - left - 6:.1f}' "
            f"height='{height - y - 6:.1f}' rx='10' fill='{border}' fill-opacity='0.09' "
            f"stroke='{border}' stroke-opacity='0.45'/>"
        )
        middle = (left + right) / 2 + MARGIN
        parts.append(text(middle, top - HEADER + 22, worker, 13, border, weight=700))
    return parts


def _edge(edge: GraphEdge, points: Sequence[tuple[float, float]]) -> str:
    colour, head = (CROSSING, "cross") if edge.crossing else (LINE, "head")
    dashed = " stroke-dasharray='6 4'" if edge.crossing else ""
    drawn = (
        f"<path d='{_curve(points)}' fill='none' stroke='{colour}' stroke-width='1.5'{dashed} "
        f"marker-end='url(#{head})'/>"
    )
    if edge.label:
        (x0, y0), (x1, y1) = points[-2:]
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        aside = abs(x1 - x0) < DISTANCE  # beside a steep line, above a flat one
        onwards = "start" if x1 > x0 else "end"  # the line has sunk below there
        x, y, anchor = (x + 8, y + 3, "start") if aside else (x, y - 4, onwards)
        drawn += text(x, y, edge.label, 10, colour, anchor=anchor)
    return drawn


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """From the lower edge of the first box to the upper edge of the last, straight up and down."""
    (x0, y0), *rest = points
    y0 += HEIGHT / 2
    path = f"M{x0:.1f},{y0:.1f}"
    for number, (x, y) in enumerate(rest):
        if number == len(rest) - 1:
            y -= HEIGHT / 2 + (0 if y >= points[0][1] else -HEIGHT)
        middle = (y0 + y) / 2
        path += f" C{x0:.1f},{middle:.1f} {x:.1f},{middle:.1f} {x:.1f},{y:.1f}"
        x0, y0 = x, y
    return path


def _box(node: GraphNode, x: float, y: float, width: float, colours: tuple[str, str]) -> str:
    fill, border = colours
    stroke, radius, weight = 1.2, 7.0, 500
    extra: Mapping[str, str] = {}
    if node.kind == "leaf":
        radius, stroke, weight, fill = HEIGHT / 2, 2.2, 700, "#ffffff"
    elif node.kind == "root":
        stroke, weight, fill = 2.4, 700, border
    elif node.kind in ("send", "recv"):
        fill, border = "#fff3e8", CROSSING
    elif node.kind == "more":
        extra = {"stroke-dasharray": "3 3"}
    ink, faint = ("#ffffff", "#f2f4f8") if node.kind == "root" else ("#1d2430", "#4d5666")
    attributes = "".join(f" {key}='{value}'" for key, value in extra.items())
    drawn = (
        f"<g><title>{escape(f'{node.label} {node.detail}'.strip())}</title>"
        f"<rect x='{x - width / 2:.1f}' y='{y - HEIGHT / 2:.1f}' width='{width:.1f}' "
        f"height='{HEIGHT:g}' rx='{radius:g}' fill='{fill}' stroke='{border}' "
        f"stroke-width='{stroke}'{attributes}/>"
    )
    if node.detail:
        drawn += text(x, y - 2, node.label, 12.5, ink, weight=weight)
        drawn += text(x, y + 12, node.detail, 10, faint)
    else:
        drawn += text(x, y + 4.5, node.label, 12.5, ink, weight=weight)
    return drawn + "</g>"
