"""Pictures: what backward will do (`graph`), who did what when (`timeline`), numbers (`chart`)."""

from aiograd.viz.chart import Chart, chart
from aiograd.viz.graph import Graph, GraphEdge, GraphNode, graph
from aiograd.viz.timeline import Span, Timeline, timeline

__all__ = [
    "Chart",
    "Graph",
    "GraphEdge",
    "GraphNode",
    "Span",
    "Timeline",
    "chart",
    "graph",
    "timeline",
]
