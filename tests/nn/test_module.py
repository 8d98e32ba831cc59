"""Modules: trees of parts with parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import aiograd as ag


class Net(ag.nn.Module):
    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.first = ag.nn.Linear(3, hidden, generator=rng)
        self.second = ag.nn.Linear(hidden, 2, bias=False, generator=rng)
        self.scale = ag.nn.Parameter(2.0)
        self.register_buffer("calls", ag.tensor(0))
        self.register_buffer("scratch", ag.zeros(1), persistent=False)
        self.note = ag.ones(3)  # a plain tensor is neither

    def forward(self, x: Any) -> Any:
        self.calls = ag.tensor(int(self.calls) + 1)
        return self.second(ag.tanh(self.first(x))) * self.scale


NAMES = ["scale", "first.weight", "first.bias", "second.weight"]


def test_parameters_and_parts_are_found_by_name() -> None:
    net = Net()
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert [p.shape for p in net.parameters()] == [(), (4, 3), (4,), (2, 4)]
    assert [name for name, _ in net.named_modules()] == ["", "first", "second"]
    assert [name for name, _ in net.named_children()] == ["first", "second"]
    assert [name for name, _ in net.named_buffers()] == ["calls", "scratch"]
    assert [name for name, _ in net.named_parameters(recurse=False)] == ["scale"]
    assert len(list(net.buffers())) == 2
    assert len(list(net.modules())) == 3
    assert net.get_submodule("first") is net.first
    with pytest.raises(AttributeError, match="third"):
        net.get_submodule("third")


def test_shared_parts_and_parameters_appear_once() -> None:
    shared = ag.nn.Linear(2, 2)
    net = ag.nn.Sequential(shared, shared)
    assert len(list(net.parameters())) == 2
    assert len(list(net.modules())) == 2
    tied = ag.nn.Sequential(ag.nn.Linear(2, 2), ag.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert len(list(tied.parameters())) == 3


def test_calling_runs_forward_and_trains() -> None:
    net = Net()
    x = np.random.default_rng(1).normal(size=(5, 3))
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert int(net.calls) == 1
    net.zero_grad(set_to_none=False)
    assert all((p.grad.numpy() == 0).all() for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(NotImplementedError, match="Module"):
        ag.nn.Module()(x)


def test_a_state_moves_to_another_module() -> None:
    source, target = Net(), Net()
    for p in source.parameters():
        p.data += 1.0
    state = source.state_dict()
    assert list(state) == ["scale", "calls", "first.weight", "first.bias", "second.weight"]
    assert not any(tensor.requires_grad for tensor in state.values())
    result = target.load_state_dict(state)
    assert result == ([], [])
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
        assert a.numpy() is not b.numpy()


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net = Net()
    before = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
    whole = {name: array + 1 for name, array in before.items()}
    for state, word in [
        ({k: v for k, v in whole.items() if k != "scale"}, "missing: scale"),
        ({**whole, "other": np.zeros(1)}, "unexpected: other"),
        ({**whole, "second.weight": np.zeros((2, 5))}, "second.weight has shape"),
    ]:
        with pytest.raises(RuntimeError, match=word):
            net.load_state_dict(state)
        for name, tensor in net.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), before[name])
    loose = {"scale": 7.0, "other": 1.0}
    result = net.load_state_dict(loose, strict=False)
    assert result.unexpected_keys == ["other"]
    assert "first.weight" in result.missing_keys
    assert float(net.scale) == 7.0


def test_training_and_use_reach_all_parts() -> None:
    net = ag.nn.Sequential(ag.nn.Dropout(0.5), ag.nn.Sequential(ag.nn.Dropout(0.5)))
    assert all(m.training for m in net.modules())
    assert net.eval() is net
    assert not any(m.training for m in net.modules())
    x = ag.ones(100)
    assert (net(x).numpy() == 1).all()
    net.train()
    assert (net(x).numpy() == 0).any()


def test_gradients_can_be_switched_off() -> None:
    net = Net().requires_grad_(False)
    assert not net(np.ones((1, 3))).requires_grad
    assert net.requires_grad_()(np.ones((1, 3))).requires_grad


def test_apply_visits_children_first() -> None:
    seen: list[str] = []
    ag.nn.Sequential(ag.nn.ReLU(), ag.nn.Tanh()).apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["ReLU", "Tanh", "Sequential"]


@pytest.mark.parametrize("codec", [pickle, cloudpickle])
def test_modules_survive_pickle(codec: Any) -> None:
    net = ag.nn.Sequential(
        ag.nn.Linear(3, 4), ag.nn.ReLU(), ag.nn.BatchNorm1d(4), ag.nn.Dropout(0.1)
    )
    twin = pickle.loads(codec.dumps(net.eval()))
    x = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_array_equal(net(x).numpy(), twin(x).numpy())
    assert all(isinstance(p, ag.nn.Parameter) and p.requires_grad for p in twin.parameters())
    assert list(twin.state_dict()) == list(net.state_dict())


def test_a_deep_copy_is_independent() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    twin.scale.data += 1.0
    assert float(net.scale) == 2.0
    assert isinstance(twin.scale, ag.nn.Parameter)


def test_dtypes_change_in_place() -> None:
    net = Net()
    weight = net.first.weight
    net.float()
    assert net.first.weight is weight
    assert {p.dtype for p in net.parameters()} == {np.dtype(np.float32)}
    assert net.calls.dtype.kind == "i"
    net(np.ones((1, 3), np.float32)).sum().backward()
    assert weight.grad.dtype == np.float32
    assert {p.dtype for p in net.double().parameters()} == {np.dtype(np.float64)}


def test_hooks_see_and_change_what_passes() -> None:
    layer = ag.nn.ReLU()
    seen: list[Any] = []
    before = layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    after = layer.register_forward_hook(lambda module, args, result: seen.append(result) or -result)
    assert layer(ag.tensor([1.0])).tolist() == [-2.0]
    assert len(seen) == 1
    before.remove()
    after.remove()
    assert layer(ag.tensor([1.0])).tolist() == [1.0]
    assert not ag.nn.ReLU()._forward_hooks


def test_a_parameter_is_a_tensor_that_requires_grad() -> None:
    p = ag.nn.Parameter([1, 2])
    assert isinstance(p, ag.Tensor)
    assert p.requires_grad
    assert p.dtype == np.float64
    assert "Parameter" in repr(p)
    assert type(p * 2) is ag.Tensor
    assert not ag.nn.Parameter([1.0], requires_grad=False).requires_grad


def test_the_tree_is_shown() -> None:
    text = repr(ag.nn.Sequential(ag.nn.Linear(3, 4), ag.nn.Sequential(ag.nn.ReLU())))
    assert text == (
        "Sequential(\n"
        "  (0): Linear(in_features=3, out_features=4, bias=True)\n"
        "  (1): Sequential(\n"
        "    (0): ReLU()\n"
        "  )\n"
        ")"
    )
