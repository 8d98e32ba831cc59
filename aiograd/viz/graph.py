"""Graph: nodes and edges as plain data, and the same drawn as SVG, Graphviz dot or Mermaid.

Whoever has a graph (the tape of one process, a distributed context) fills the two lists. Data flows
downwards along the edges. Nodes of several workers stand in one lane per worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aiograd.viz.svg import draw_graph


@dataclass(frozen=True)
class GraphNode:
    """One box. `kind` is "op", "leaf", "root", "send", "recv" or "more"."""

    id: str
    label: str
    detail: str = ""
    kind: str = "op"
    worker: str | None = None


@dataclass(frozen=True)
class GraphEdge:
    """One arrow, from where data comes from to where it is used."""

    source: str
    target: str
    label: str = ""
    crossing: bool = False  # goes from one worker to another


@dataclass(frozen=True)
class Graph:
    """A picture of nodes and edges; a notebook shows it by itself."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    title: str = field(default="")

    def __init__(
        self, nodes: Iterable[GraphNode], edges: Iterable[GraphEdge], title: str = ""
    ) -> None:
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
        return draw_graph(self)

    def _repr_svg_(self) -> str:
        return self.svg

    @property
    def dot(self) -> str:
        """The picture in Graphviz' language."""
        shapes = {"leaf": "ellipse", "root": "box", "send": "cds", "recv": "cds"}
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
                text = _entities(node.label)
                text += f"<br/>{_entities(node.detail)}" if node.detail else ""
                lines.append(f'{indent}{names[node.id]}{left}"{text}"{right}')
            if worker is not None:
                lines.append("  end")
        for edge in self.edges:
            arrow = "-.->" if edge.crossing else "-->"
            text = f'|"{_entities(edge.label)}"|' if edge.label else ""
            lines.append(f"  {names[edge.source]} {arrow}{text} {names[edge.target]}")
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
    return f"{node.label}\n{node.detail}" if node.detail else node.label


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _entities(text: str) -> str:
    return (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    )
