"""What all optimisers share."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GradError


def leaf(*values: float) -> Any:
    return ag.tensor(list(values), requires_grad=True)


def test_a_step_follows_backward_and_zero_grad_starts_anew() -> None:
    w = leaf(1.0)
    optimizer = ag.optim.SGD([w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()
    assert w.item() == pytest.approx(0.8**3)
    optimizer.zero_grad(set_to_none=False)
    assert w.grad.tolist() == [0.0]
    optimizer.zero_grad()
    assert w.grad is None


def test_groups_have_their_own_settings() -> None:
    a, b = leaf(1.0), leaf(1.0)
    optimizer = ag.optim.SGD([{"params": a}, {"params": [b], "lr": 0.5}], lr=0.1)
    optimizer.step({a: ag.tensor([1.0]), b: ag.tensor([1.0])})
    assert (a.item(), b.item()) == (0.9, 0.5)
    c = leaf(1.0)
    optimizer.add_param_group({"params": [c], "lr": 1.0})
    optimizer.step({c: ag.tensor([1.0])})
    assert c.item() == 0.0


def test_a_closure_computes_the_gradients_first() -> None:
    w = leaf(2.0)
    optimizer = ag.optim.SGD([w], lr=0.1)

    def closure() -> Any:
        loss = (w * w).sum()
        loss.backward()
        return loss

    with ag.no_grad():
        loss = optimizer.step(closure)
    assert (loss.item(), w.item()) == (4.0, pytest.approx(1.6))


def test_a_step_counts_as_a_write() -> None:
    w = leaf(1.0)
    y = (w * w).sum()
    ag.optim.SGD([w], lr=0.1).step({w: ag.tensor([1.0])})
    with pytest.raises(GradError) as caught:
        y.backward()
    assert caught.value.reason == "modified"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ([], ValueError),
        (leaf(1.0), TypeError),
        ([np.ones(2)], TypeError),
        ([leaf(1.0) * 2], ValueError),
        ([{"params": []}, {"params": [1.0]}], TypeError),
    ],
)
def test_parameters_must_be_leaf_tensors(params: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ag.optim.SGD(params)


def test_a_parameter_given_twice_is_refused() -> None:
    w = leaf(1.0)
    with pytest.raises(ValueError, match="twice"):
        ag.optim.SGD([w, w])
    with pytest.raises(ValueError, match="twice"):
        ag.optim.SGD([{"params": [w]}, {"params": [w]}])


def test_a_rule_of_ones_own_is_one_method() -> None:
    class Sign(ag.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def update(self, param: Any, grad: Any, state: Any, group: Any) -> None:
            state["steps"] = state.get("steps", 0) + 1
            param -= group["lr"] * np.sign(grad)

    w = leaf(1.0, 1.0)
    optimizer = Sign([w], lr=0.25)
    optimizer.step({w: ag.tensor([5.0, -3.0])})
    assert w.tolist() == [0.75, 1.25]
    assert optimizer.state[w] == {"steps": 1}
    with pytest.raises(NotImplementedError, match="Optimizer"):
        ag.optim.Optimizer([w], {}).step({w: ag.tensor([1.0, 1.0])})


def test_given_gradients_reach_a_step_of_ones_own() -> None:
    class Plain(ag.optim.Optimizer):
        def step(self) -> None:  # as it is written for torch
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data -= group["lr"] * param.grad.data

    a, b = leaf(1.0), leaf(1.0)
    a.grad = ag.tensor([100.0])
    b.grad = ag.tensor([100.0])
    Plain([a, b], {"lr": 0.5}).step_with({a: ag.tensor([1.0])})
    assert (a.item(), b.item()) == (0.5, 1.0)
    assert (a.grad.item(), b.grad.item()) == (100.0, 100.0)
    ag.optim.SGD([a], lr=0.5).step_with({a: ag.tensor([1.0])})
    assert a.item() == 0.0


def test_a_state_of_other_parameters_is_refused() -> None:
    saved = ag.optim.SGD([leaf(1.0)]).state_dict()
    with pytest.raises(ValueError, match="groups"):
        ag.optim.SGD([leaf(1.0), leaf(2.0)]).load_state_dict(saved)


def test_the_state_is_plain_data() -> None:
    w = leaf(1.0)
    optimizer = ag.optim.Adam([w])
    optimizer.step({w: ag.tensor([1.0])})
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert state["param_groups"][0]["params"] == [0]
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "lr: 0.001" in repr(optimizer)


def test_a_sparse_parameter_is_refused() -> None:
    t = ag.sparse.coo_tensor([[0]], [1.0], (3,), requires_grad=True)
    ag.sparse.sum(t).backward()
    with pytest.raises(TypeError, match="sparse"):
        ag.optim.SGD([t]).step()
