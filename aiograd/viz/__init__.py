"""Pictures: what backward will do (`graph`), who did what when (`timeline`), numbers (`chart`)."""

from aiograd.viz.chart import Chart, chart
from aiograd.viz.picture import Graph, GraphEdge, GraphNode
from aiograd.viz.spans import Span, Timeline, timeline
from aiograd.viz.tape import graph

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
