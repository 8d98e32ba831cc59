"""The tape behind a tensor as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag


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
