"""Graphs as pictures, and the tape behind a tensor as one."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.viz import Graph, GraphEdge, GraphNode

SVG = "{http://www.w3.org/2000/svg}"

NODES = [
    GraphNode("w", "w", "784 × 10", "leaf", "driver"),
    GraphNode("s", "Send", "1 tensor", "send", "driver"),
    GraphNode("r", "Recv", "", "recv", "worker<1>"),
    GraphNode("t", 'tanh "fast"', "64 × 10", "op", "worker<1>"),
    GraphNode("sum", "sum", "scalar", "root", "worker<1>"),
]
EDGES = [
    GraphEdge("w", "s"),
    GraphEdge("s", "r", "edge 1", crossing=True),
    GraphEdge("r", "t", "[0]"),
    GraphEdge("r", "t", "[1]"),
    GraphEdge("t", "sum"),
    GraphEdge("r", "sum"),
]


def drawn(graph: Graph) -> ET.Element:
    return ET.fromstring(graph.svg)


def boxes(graph: Graph) -> dict[str, tuple[float, float, float, float]]:
    """Left, top, right and bottom of each box, by its title."""
    found = {}
    for group in drawn(graph).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        found[group.find(f"{SVG}title").text] = (x, y, x + w, y + h)
    return found


def test_every_node_is_a_box_and_data_flows_downwards() -> None:
    found = boxes(Graph(NODES, EDGES))
    assert list(found) == [
        "w 784 × 10",
        "Send 1 tensor",
        "Recv",
        'tanh "fast" 64 × 10',
        "sum scalar",
    ]
    tops = [top for _, top, _, _ in found.values()]
    assert tops == sorted(tops)
    assert len(set(tops)) == 5


def test_boxes_do_not_overlap() -> None:
    many = [GraphNode(str(i), f"node {i}", "x" * (i % 7)) for i in range(40)]
    edges = [GraphEdge(str(i // 3), str(i)) for i in range(1, 40)]
    edges += [GraphEdge("0", "39"), GraphEdge("1", "20")]
    found = list(boxes(Graph(many, edges)).values())
    for i, (left, top, right, bottom) in enumerate(found):
        for other in found[:i]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart


def test_each_worker_has_a_lane_with_its_boxes() -> None:
    graph = Graph(NODES, EDGES, "a title")
    assert graph.workers == ["driver", "worker<1>"]
    texts = [text.text for text in drawn(graph).iter(f"{SVG}text")]
    assert texts[0] == "a title"
    assert {"driver", "worker<1>"} <= set(texts)
    lanes = [rect for rect in drawn(graph).iter(f"{SVG}rect") if rect.get("fill-opacity")]
    first, second = ((float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in lanes)
    assert first[1] <= second[0]
    found = boxes(graph)
    for node in NODES:
        left, _, right, _ = found[f"{node.label} {node.detail}".strip()]
        low, high = first if node.worker == "driver" else second
        assert low < left < right < high


def test_arrows_between_the_same_boxes_are_drawn_once_with_all_labels() -> None:
    paths = [path for path in drawn(Graph(NODES, EDGES)).iter(f"{SVG}path") if path.get("stroke")]
    assert len(paths) == 5
    assert sum(path.get("stroke-dasharray") is not None for path in paths) == 1
    texts = [text.text for text in drawn(Graph(NODES, EDGES)).iter(f"{SVG}text")]
    assert "[0] [1]" in texts


def test_a_circle_is_drawn_too() -> None:
    nodes = [GraphNode(key, key) for key in "abc"]
    graph = Graph(nodes, [GraphEdge("a", "b"), GraphEdge("b", "c"), GraphEdge("c", "b")])
    assert len(boxes(graph)) == 3


def test_a_long_title_has_room() -> None:
    picture = drawn(Graph([GraphNode("a", "a")], [], "a title that is wider than the one box"))
    assert float(picture.get("width")) > 300


def test_nothing_is_a_picture_as_well() -> None:
    assert drawn(Graph([], [])).tag == f"{SVG}svg"


def test_dot_groups_workers_and_escapes() -> None:
    text = Graph(NODES, EDGES).dot
    assert text.startswith("digraph {")
    assert text.count("subgraph cluster_") == 2
    assert 'label="tanh \\"fast\\"\\n64 × 10"' in text
    assert 'n1 -> n2 [label="edge 1", style=dashed];' in text


def test_mermaid_groups_workers_and_escapes() -> None:
    lines = Graph(NODES, EDGES).mermaid.splitlines()
    assert lines[0] == "flowchart TD"
    assert '  subgraph w1["worker&lt;1&gt;"]' in lines
    assert '    n3["tanh &quot;fast&quot;<br/>64 × 10"]' in lines
    assert '    n0(["w<br/>784 × 10"])' in lines
    assert '  n1 -.->|"edge 1"| n2' in lines


def test_a_notebook_shows_it_by_itself() -> None:
    graph = Graph(NODES, EDGES)
    assert graph._repr_svg_() == graph.svg
    assert repr(graph) == "<Graph of 5 nodes and 6 edges on driver, worker<1>>"


def test_ends_without_a_node_are_refused() -> None:
    with pytest.raises(ValueError, match="without node"):
        Graph(NODES, [GraphEdge("w", "nowhere")])
    with pytest.raises(ValueError, match="same id"):
        Graph([NODES[0], NODES[0]], [])


# ── the tape behind a tensor ────────────────────────────────────────────────────────────────────


def described(graph: Any) -> list[tuple[str, str, str]]:
    return sorted((node.kind, node.label, node.detail) for node in graph.nodes)


def test_a_loss_is_shown_with_its_operations_and_leaves() -> None:
    w = ag.nn.Parameter(np.ones((3, 2), np.float32))
    x = ag.ones(4, 3, requires_grad=True)
    graph = ag.viz.graph(ag.tanh(x @ w).sum(), names={"w": w})
    assert described(graph) == [
        ("leaf", "leaf", "4 × 3"),
        ("leaf", "w", "3 × 2 · float32"),
        ("op", "matmul", "4 × 2"),
        ("op", "tanh", "4 × 2"),
        ("root", "sum", "scalar"),
    ]
    names = {node.id: node.label for node in graph.nodes}
    assert sorted((names[e.source], names[e.target]) for e in graph.edges) == [
        ("leaf", "matmul"),
        ("matmul", "tanh"),
        ("tanh", "sum"),
        ("w", "matmul"),
    ]
    assert "<svg" in graph.svg


def test_a_model_gives_its_parameters_their_names() -> None:
    net = ag.nn.Sequential(ag.nn.Linear(3, 2), ag.nn.ReLU())
    graph = ag.viz.graph(net(ag.ones(1, 3)).sum(), dict(net.named_parameters()))
    leaves = {node.label for node in graph.nodes if node.kind == "leaf"}
    assert leaves == {"0.weight", "0.bias"}


def test_an_operation_with_several_results_numbers_them() -> None:
    x = ag.ones(4, requires_grad=True)
    first, second = ag.split(x, 2)
    graph = ag.viz.graph((first * second).sum())
    assert {edge.label for edge in graph.edges if edge.label} == {"[0]", "[1]"}
    assert ("op", "split", "2 outputs") in described(graph)


def test_a_long_tape_is_cut() -> None:
    y = x = ag.ones(1, requires_grad=True)
    for _ in range(50):
        y = y + x
    graph = ag.viz.graph(y.sum(), max_nodes=10)
    assert len(graph.nodes) == 11
    assert [node.label for node in graph.nodes if node.kind == "more"] == ["…"]


def test_leaves_and_constants_are_pictures_too() -> None:
    assert described(ag.viz.graph(ag.ones(2, requires_grad=True))) == [("leaf", "leaf", "2")]
    assert described(ag.viz.graph(ag.ones(2))) == [("root", "constant", "2")]
