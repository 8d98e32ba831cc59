"""Pictures: what backward will do (`graph`), and who did what when (`timeline`)."""

from aiograd.viz.picture import Graph, GraphEdge, GraphNode
from aiograd.viz.spans import Span, Timeline, timeline
from aiograd.viz.tape import graph

__all__ = ["Graph", "GraphEdge", "GraphNode", "Span", "Timeline", "graph", "timeline"]
