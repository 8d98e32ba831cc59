"""The order of torch's engine that bordered runs rely on; fails if a new torch changes it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from aiograd.torch.engine import Border, is_alone, plus, run_bordered, run_plain


def test_the_engine_takes_ready_nodes_by_their_number_the_highest_first():
    order: list[int] = []
    leaf = torch.ones(1, requires_grad=True)
    made = [leaf * number for number in range(4)]
    for number, tensor in enumerate(made):
        tensor.grad_fn.register_hook(lambda *_, number=number: order.append(number))
    for number, tensor in zip((30, 10, 20, 40), made, strict=True):
        tensor.grad_fn._set_sequence_nr(number)
        assert tensor.grad_fn._sequence_nr() == number
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(made, leaf, [torch.ones(1)] * 4)  # all of them are ready at once
    assert order == [3, 0, 2, 1]


def residual() -> dict[str, Any]:
    """out = h + m * y, m = exp(h): the exits h and m, of which m leads to h."""
    x = torch.rand(3, requires_grad=True)
    y = torch.rand(3, requires_grad=True)
    h = x * 2
    m = h.exp()
    product = m * y
    out = h + product
    return {"x": x, "y": y, "h": h, "m": m, "product": product, "out": out}


def border(graph: dict[str, Any]) -> dict[Any, torch.Tensor]:
    h, m, y = graph["h"].grad_fn, graph["m"].grad_fn, get_gradient_edge(graph["y"]).node
    out, product = graph["out"].grad_fn, graph["product"].grad_fn
    makers = {out: [(0, (h, 0))], product: [(0, (m, 0)), (1, (y, 0))]}
    edges = [get_gradient_edge(graph["out"])]
    part = Border([(h, 0), (m, 0), (y, 0)], makers, (), ())
    return run_bordered(part, edges, [torch.ones(3)], False, False)


def test_a_bordered_run_stops_at_its_exits_and_calls_no_hook_behind_them():
    graph, called = residual(), []
    for name in ("h", "m"):
        graph[name].register_hook(lambda g, name=name: called.append(name))
        graph[name].retain_grad()
        graph[name].grad_fn.register_hook(lambda *_, name=name: called.append(name))
    numbers = [graph[name].grad_fn._sequence_nr() for name in ("h", "m")]
    m, y = graph["m"].detach().clone(), graph["y"].detach().clone()
    found = border(graph)
    assert not called
    assert graph["h"].grad is None
    assert torch.equal(found[graph["h"].grad_fn, 0], torch.ones(3))
    assert torch.equal(found[graph["m"].grad_fn, 0], y)
    assert torch.equal(found[get_gradient_edge(graph["y"]).node, 0], m)
    assert numbers == [graph[name].grad_fn._sequence_nr() for name in ("h", "m")]
    # What ran has freed what it saved; what did not run has not.
    with pytest.raises(RuntimeError, match="freed"):
        _ = graph["product"].grad_fn._saved_self
    assert graph["m"].grad_fn._saved_result is not None


def test_a_run_whose_node_fails_restores_the_numbers_and_removes_its_hooks():
    graph = residual()

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    graph["out"].grad_fn.register_prehook(fail)
    before = graph["h"].grad_fn._sequence_nr()
    with pytest.raises(ValueError, match="on purpose"):
        border(graph)
    assert graph["h"].grad_fn._sequence_nr() == before


def test_bordered_runs_in_several_threads_do_not_disturb_each_other():
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                graph = residual()
                found = border(graph)
                assert torch.equal(found[graph["m"].grad_fn, 0], graph["y"].detach())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_sentinel_makes_no_noise_in_anomaly_mode(recwarn):
    with torch.autograd.set_detect_anomaly(True):
        border(residual())
    assert not [w for w in recwarn if "Sentinel" in str(w.message)]


def test_a_gradient_that_somebody_holds_is_told_apart():
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    ends = [get_gradient_edge(leaf), get_gradient_edge(other)]
    alone = list(run_plain([get_gradient_edge(leaf * other)], [torch.ones(2)], ends, False, False))
    assert is_alone(alone, 0)
    assert is_alone(alone, 1)
    shared = list(run_plain([get_gradient_edge(leaf + other)], [torch.ones(2)], ends, False, False))
    assert not is_alone(shared, 0)
    assert not is_alone(shared, 1)


def test_sparse_and_dense_gradients_add_up_in_either_order():
    sparse, dense = torch.eye(2).to_sparse(), torch.ones(2, 2)
    assert torch.equal(plus(sparse, dense), plus(dense, sparse))
