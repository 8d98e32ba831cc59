"""Pictures for notebooks, as SVG without any dependency.

    layout      where the boxes of a graph go: numbers in, numbers out
    svg         the page, text and colours that all pictures share
    graph       what backward will do: Graph, and the tape behind a tensor as one
    timeline    what each worker did when
    chart       numbers that change from step to step

Knows the tape and no workers; `dist` draws its contexts with `Graph`.
"""

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
