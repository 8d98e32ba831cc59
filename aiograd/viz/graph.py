"""Graph: nodes and edges as plain data, drawn as SVG, Graphviz dot or Mermaid.

`graph(tensor)` makes one from the tape of this process; a distributed context makes its own from
the tapes of all workers. Data flows downwards along the edges. Nodes of several workers stand in
one lane per worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from aiograd.autograd.graph import Accumulate, Joint, Node
from aiograd.autograd.op import parent_of
from aiograd.autograd.tensor import Tensor
from aiograd.viz.layout import Key, Layout, arrange
from aiograd.viz.svg import LINE, PALETTE, page, text

HEIGHT, DISTANCE = 38.0, 74.0  # of a box, and from row to row
MARGIN, HEADER = 14.0, 30.0
# The one colour that is no worker's: edges between workers are what a picture is looked at for.
CROSSING = "#e07b39"
# Arrow heads are defined once per picture and referred to by each edge.
_HEADS = (
    "<marker id='{0}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
    "orient='auto'><path d='M0,0.8 L7.5,4 L0,7.2 z' fill='{1}'/></marker>"
)


@dataclass(frozen=True)
class GraphNode:
    """One box. `kind` is "op", "leaf", "root", "send", "recv" or "more".

    >>> x = ag.ones(2, requires_grad=True)
    >>> {node.kind for node in ag.viz.graph((x * 2).sum()).nodes}
    {...}
    """

    id: str
    label: str
    detail: str = ""
    kind: str = "op"
    worker: str | None = None


@dataclass(frozen=True)
class GraphEdge:
    """One arrow, from where data comes from to where it is used.

    >>> x = ag.ones(2, requires_grad=True)
    >>> len(ag.viz.graph(x * 2).edges) > 0
    True
    """

    source: str
    target: str
    label: str = ""
    crossing: bool = False  # goes from one worker to another


@dataclass(frozen=True)
class Graph:
    """A picture of nodes and edges; a notebook shows it by itself.

    >>> x = ag.ones(2, requires_grad=True)
    >>> ag.viz.graph(x * 2).dot.startswith("digraph")
    True
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    title: str = field(default="")

    def __init__(
        self, nodes: Iterable[GraphNode], edges: Iterable[GraphEdge], title: str = ""
    ) -> None:
        # Frozen, and yet checked: an edge without ends would only fail in the drawing.
        object.__setattr__(self, "nodes", tuple(nodes))
        object.__setattr__(self, "edges", tuple(edges))
        object.__setattr__(self, "title", title)
        known = {node.id for node in self.nodes}
        if len(known) != len(self.nodes):
            raise ValueError("two nodes have the same id")
        for edge in self.edges:
            if edge.source not in known or edge.target not in known:
                raise ValueError(f"the edge {edge.source} → {edge.target} has an end without node")

    @property
    def workers(self) -> list[str]:
        """The workers that take part, in order of appearance."""
        return list(dict.fromkeys(n.worker for n in self.nodes if n.worker is not None))

    @property
    def svg(self) -> str:
        """The picture as SVG, legible on light and dark backgrounds."""
        return _draw(self)

    def _repr_svg_(self) -> str:
        return self.svg

    @property
    def dot(self) -> str:
        """The picture in Graphviz' language."""
        shapes = {"leaf": "ellipse", "root": "box", "send": "cds", "recv": "cds"}
        # Ids may hold any character; numbers need no quoting.
        names = {node.id: f"n{i}" for i, node in enumerate(self.nodes)}
        lines = ["digraph {", "  node [shape=box, style=rounded, fontname=Helvetica];"]
        for number, (worker, nodes) in enumerate(self._by_worker()):
            inner = [
                f"{names[n.id]} [label={_quoted(_two_lines(n))}"
                + (f", shape={shapes[n.kind]}];" if n.kind in shapes else "];")
                for n in nodes
            ]
            if worker is None:
                lines += [f"  {line}" for line in inner]
            else:
                # Graphviz draws a frame only around subgraphs whose name begins with "cluster".
                lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(worker)};"]
                lines += [f"    {line}" for line in inner] + ["  }"]
        for edge in self.edges:
            options = [f"label={_quoted(edge.label)}"] if edge.label else []
            options += ["style=dashed"] if edge.crossing else []
            tail = f" [{', '.join(options)}]" if options else ""
            lines.append(f"  {names[edge.source]} -> {names[edge.target]}{tail};")
        return "\n".join([*lines, "}"])

    @property
    def mermaid(self) -> str:
        """The picture in Mermaid's language, as Markdown pages show it."""
        brackets = {"leaf": ("([", "])"), "send": ("[/", "/]"), "recv": ("[/", "/]")}
        names = {node.id: f"n{i}" for i, node in enumerate(self.nodes)}
        lines = ["flowchart TD"]
        for number, (worker, nodes) in enumerate(self._by_worker()):
            indent = "  "
            if worker is not None:
                lines.append(f'  subgraph w{number}["{_entities(worker)}"]')
                indent = "    "
            for node in nodes:
                left, right = brackets.get(node.kind, ("[", "]"))
                words = _entities(node.label)
                words += f"<br/>{_entities(node.detail)}" if node.detail else ""
                lines.append(f'{indent}{names[node.id]}{left}"{words}"{right}')
            if worker is not None:
                lines.append("  end")
        for edge in self.edges:
            arrow = "-.->" if edge.crossing else "-->"
            label = f'|"{_entities(edge.label)}"|' if edge.label else ""
            lines.append(f"  {names[edge.source]} {arrow}{label} {names[edge.target]}")
        return "\n".join(lines)

    def _by_worker(self) -> list[tuple[str | None, list[GraphNode]]]:
        groups: dict[str | None, list[GraphNode]] = {}
        for node in self.nodes:
            groups.setdefault(node.worker, []).append(node)
        return list(groups.items())

    def __repr__(self) -> str:
        where = f" on {', '.join(self.workers)}" if self.workers else ""
        return f"<Graph of {len(self.nodes)} nodes and {len(self.edges)} edges{where}>"


def _two_lines(node: GraphNode) -> str:
    """Return label and detail of a box."""
    return f"{node.label}\n{node.detail}" if node.detail else node.label


def _quoted(label: str) -> str:
    escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _entities(label: str) -> str:
    return (
        label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    )


# ── the tape behind a tensor ────────────────────────────────────────────────────────────────────


def graph(
    tensor: Tensor,
    names: Mapping[str, Tensor] | None = None,
    *,
    max_nodes: int = 300,
    worker: str | None = None,
) -> Graph:
    """Draw how `tensor` was made, leaves on top and the tensor at the bottom.

    `names` gives leaves their names, e.g. `dict(model.named_parameters())`. Beyond `max_nodes` the
    rest of the tape is left out and marked with "…".

        >>> x = ag.ones(2, requires_grad=True)
        >>> ag.viz.graph((x * 2).sum(), names={"x": x}).svg[:4]
        '<svg'
    """
    # By identity, as `==` of tensors is elementwise.
    called = {id(leaf): name for name, leaf in (names or {}).items()}
    # None if nothing was recorded: a single box then says so.
    start = parent_of(tensor)
    if start is None:
        only = GraphNode("tensor", "constant", _detail(tensor.shape, tensor.dtype), "root", worker)
        return Graph([only], [])
    root = tensor.grad_fn or start
    nodes: dict[Node, GraphNode] = {}
    edges: list[GraphEdge] = []
    # Breadth first, so that what is left out is what lies farthest from the tensor.
    waiting = [root]
    found = {root}
    cut = False
    while waiting:
        node = waiting.pop(0)
        nodes[node] = _tape_node(
            node, called, worker, root if tensor.grad_fn is root else None, tensor
        )
        for parent, index in node.next_nodes:
            if parent not in found:
                if len(found) >= max_nodes:
                    cut = True
                    edges.append(GraphEdge("more", _key(node)))
                    continue
                found.add(parent)
                waiting.append(parent)
            label = f"[{index}]" if isinstance(parent, Joint) and parent.outputs > 1 else ""
            edges.append(GraphEdge(_key(parent), _key(node), label))
    boxes = list(nodes.values())
    if cut:
        boxes.append(GraphNode("more", "…", "left out", "more", worker))
    # An operation may use one tensor twice; equal edges are drawn once.
    return Graph(boxes, dict.fromkeys(edges))


def _key(node: Node) -> str:
    """Return an id for a node that is unique while the graph lives."""
    return f"{id(node):x}"


def _tape_node(
    node: Node, called: Mapping[int, str], worker: str | None, root: Node | None, tensor: Tensor
) -> GraphNode:
    """Return the box of a node of the tape."""
    if isinstance(node, Accumulate):
        leaf = node.variable
        label = called.get(id(leaf), "leaf")
        return GraphNode(_key(node), label, _detail(leaf.shape, leaf.dtype), "leaf", worker)
    kind = {"Send": "send", "Recv": "recv"}.get(node.name, "op")
    if node is root:
        return GraphNode(_key(node), node.name, _detail(tensor.shape, tensor.dtype), "root", worker)
    if isinstance(node, Joint):
        detail = f"{node.outputs} outputs" if node.outputs > 1 else ""
    else:
        detail = _detail(node.shape, node.dtype)
    return GraphNode(_key(node), node.name, detail, kind, worker)


def _detail(shape: tuple[int, ...], dtype: Any) -> str:
    size = " × ".join(map(str, shape)) if shape else "scalar"
    # The default type is not worth its room.
    return size if str(dtype) == "float64" else f"{size} · {dtype}"


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────


def _draw(picture: Graph) -> str:
    """Return the whole picture as SVG."""
    workers = picture.workers
    lane = {worker: i for i, worker in enumerate(workers)}
    lane_of: dict[Key, int] = {node.id: lane.get(node.worker or "", 0) for node in picture.nodes}
    widths: dict[Key, float] = {node.id: _width(node) for node in picture.nodes}
    # `x * x` has two edges; two arrows would lie on each other.
    arrows = _merged(picture.edges)
    layout = arrange(widths, [(e.source, e.target) for e in arrows], lane_of, max(1, len(workers)))
    top = MARGIN + (HEADER if workers else 0) + (HEADER if picture.title else 0)
    depth = max((layout.row[node.id] for node in picture.nodes), default=0)
    width = max(layout.lanes[-1][1], 8.0 * len(picture.title)) + 2 * MARGIN
    height = top + depth * DISTANCE + HEIGHT + 2 * MARGIN
    parts = ["<defs>" + _HEADS.format("head", LINE) + _HEADS.format("cross", CROSSING) + "</defs>"]
    if picture.title:
        parts.append(text(MARGIN, MARGIN + 12, picture.title, 13, LINE, anchor="start", weight=600))
    parts += _lanes(workers, layout, top, height)
    ys = {key: top + MARGIN / 2 + row * DISTANCE + HEIGHT / 2 for key, row in layout.row.items()}
    for edge, path in zip(arrows, layout.paths, strict=True):
        points = [(layout.x[key] + MARGIN, ys[key]) for key in path]
        parts.append(_edge(edge, points))
    for node in picture.nodes:
        colours = PALETTE[lane_of[node.id] % len(PALETTE)]
        parts.append(_box(node, layout.x[node.id] + MARGIN, ys[node.id], widths[node.id], colours))
    return page(width, height, parts)


def _merged(edges: Sequence[GraphEdge]) -> list[GraphEdge]:
    """Return one arrow between two boxes, with all the labels, however often they are connected."""
    labels: dict[GraphEdge, list[str]] = {}
    for edge in edges:
        labels.setdefault(replace(edge, label=""), []).append(edge.label)
    return [replace(edge, label=" ".join(filter(None, all_))) for edge, all_ in labels.items()]


def _width(node: GraphNode) -> float:
    """Estimate the width of a box from the letters in it; SVG cannot measure text."""
    return max(62.0, 7.4 * len(node.label) + 26, 5.9 * len(node.detail) + 26)


def _lanes(workers: Sequence[str], layout: Layout, top: float, height: float) -> list[str]:
    """Draw a ground with the name of each worker."""
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
    """Draw an arrow and its label."""
    colour, head = (CROSSING, "cross") if edge.crossing else (LINE, "head")
    dashed = " stroke-dasharray='6 4'" if edge.crossing else ""
    drawn = (
        f"<path d='{_curve(points)}' fill='none' stroke='{colour}' stroke-width='1.5'{dashed} "
        f"marker-end='url(#{head})'/>"
    )
    # On the last stretch, which leads to the box that the label is about.
    if edge.label:
        (x0, y0), (x1, y1) = points[-2:]
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        aside = abs(x1 - x0) < DISTANCE  # beside a steep line, above a flat one
        onwards = "start" if x1 > x0 else "end"  # the line has sunk below there
        x, y, anchor = (x + 8, y + 3, "start") if aside else (x, y - 4, onwards)
        drawn += text(x, y, edge.label, 10, colour, anchor=anchor)
    return drawn


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return a path from the lower edge of the first box to the upper edge of the last."""
    (x0, y0), *rest = points
    y0 += HEIGHT / 2
    path = f"M{x0:.1f},{y0:.1f}"
    for number, (x, y) in enumerate(rest):
        if number == len(rest) - 1:
            # An edge of a circle goes up, and ends at the lower edge.
            y -= HEIGHT / 2 + (0 if y >= points[0][1] else -HEIGHT)
        # Control points straight below and above the ends: arrows leave and arrive upright.
        middle = (y0 + y) / 2
        path += f" C{x0:.1f},{middle:.1f} {x:.1f},{middle:.1f} {x:.1f},{y:.1f}"
        x0, y0 = x, y
    return path


def _box(node: GraphNode, x: float, y: float, width: float, colours: tuple[str, str]) -> str:
    """Draw a box; its kind shows in its shape and colours."""
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
    # Text is dark on light boxes and light on the root, on any page.
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
