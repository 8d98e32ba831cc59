"""Modules made of modules."""

from __future__ import annotations

import pytest

import aiograd as ag


def test_a_sequence_applies_one_after_the_other() -> None:
    net = ag.nn.Sequential(ag.nn.ReLU(), ag.nn.Flatten(0))
    assert net(ag.tensor([[-1.0], [2.0]])).tolist() == [0.0, 2.0]
    assert len(net) == 2
    assert isinstance(net[1], ag.nn.Flatten)
    assert [type(m).__name__ for m in net] == ["ReLU", "Flatten"]


def test_a_sequence_can_have_names() -> None:
    net = ag.nn.Sequential({"in": ag.nn.Linear(2, 3), "out": ag.nn.Linear(3, 1)})
    assert [name for name, _ in net.named_parameters()] == [
        "in.weight",
        "in.bias",
        "out.weight",
        "out.bias",
    ]


def test_lists_hold_parts() -> None:
    parts = ag.nn.ModuleList(ag.nn.Linear(1, 1) for _ in range(12))
    parts.append(ag.nn.ReLU()).extend([ag.nn.Tanh()])
    assert len(parts) == 14
    assert len(list(parts.parameters())) == 24
    assert isinstance(parts[-1], ag.nn.Tanh)
    with pytest.raises(TypeError, match="int"):
        parts.append(3)


def test_dicts_hold_parts() -> None:
    parts = ag.nn.ModuleDict({"a": ag.nn.Linear(1, 1)})
    parts["b"] = ag.nn.ReLU()
    assert list(parts) == ["a", "b"]
    assert "b" in parts
    assert "c" not in parts
    assert len(parts) == 2
    assert isinstance(parts["b"], ag.nn.ReLU)
    with pytest.raises(KeyError):
        parts["training"]
    with pytest.raises(KeyError, match="method"):
        parts["forward"] = ag.nn.ReLU()
