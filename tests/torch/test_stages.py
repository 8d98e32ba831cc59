"""Condensing: which torch nodes run together, and what needs no run at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiograd.autograd.graph import Part
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.errors import GradError
from aiograd.torch.nodes import Leaf, Port, receive
from aiograd.torch.stages import Condensed, EndEntry, Stage, condense

HERE, THERE = b"here", b"there"


def received(*shape: int) -> torch.Tensor:
    tensor = torch.ones(*shape)
    receive(RecvNode(1, 1, "there", THERE, 1), [0], [tensor])
    return tensor


def sent(*tensors: torch.Tensor) -> dict[int, SendNode]:
    """Each tensor in a message of its own."""
    return {
        edge: SendNode(edge, "there", THERE, (Port(tensor),)) for edge, tensor in enumerate(tensors)
    }


def condensed(*tensors: torch.Tensor) -> tuple[Condensed, list[Any]]:
    made = condense([], sent(*tensors), [], True)
    return made, [made.stands[Port(tensor)] for tensor in tensors]


def stage_of(part: Any) -> Stage:
    assert part.__class__ is Part
    stage = part.joint
    assert isinstance(stage, Stage)
    return stage


def test_a_received_tensor_that_is_passed_on_needs_no_stage():
    made, (entry,) = condensed(received(2, 2))
    assert isinstance(entry, EndEntry)
    (end,) = entry.parents
    assert end.joint.__class__ is RecvNode
    gradient = torch.ones(2, 2)
    assert entry.run(gradient, False, False) == (gradient,)
    assert made.fits(True)


def test_a_gradient_of_another_shape_or_kind_is_refused_where_it_comes_in():
    _, (entry,) = condensed(received(2, 2))
    with pytest.raises(GradError, match="does not fit a tensor of shape"):
        entry.run(torch.ones(3), False, False)
    with pytest.raises(GradError, match="of shape int does not fit"):
        entry.run(1, False, False)


def test_a_gradient_of_another_dtype_is_converted_where_it_comes_in():
    _, (entry,) = condensed(received(2))
    (gradient,) = entry.run(torch.ones(2, dtype=torch.float64), False, False)
    assert gradient.dtype is torch.float32


def test_a_received_tensor_that_is_passed_on_is_run_if_something_observes_it():
    tensor = received(2)
    made, _ = condensed(tensor)
    tensor.register_hook(lambda gradient: None)
    assert not made.fits(True)
    _, (entry,) = condensed(tensor)
    assert stage_of(entry).border is None


def test_calls_that_do_not_use_each_others_results_are_a_stage_each():
    weight, one, two = torch.ones(2, requires_grad=True), received(2), received(2)
    _, (first, second) = condensed(one * weight, two * weight)
    assert stage_of(first) is not stage_of(second)
    assert stage_of(first).border is None
    assert stage_of(second).border is None
    leaves = [
        [parent for parent in stage_of(part).parents if isinstance(parent, Leaf)]
        for part in (first, second)
    ]
    assert leaves[0] == leaves[1]


@pytest.mark.parametrize("hooked", [False, True], ids=["unobserved", "observed"])
def test_a_received_tensor_ends_several_stages_if_nothing_observes_it(hooked: bool):
    tensor = received(2)
    if hooked:
        tensor.retain_grad()
    made, (first, second) = condensed(tensor.exp(), tensor.sin())
    assert (stage_of(first).border is None) is not hooked
    assert (stage_of(second).border is None) is not hooked
    tensor.retain_grad()
    assert made.fits(True) is hooked


def test_stages_whose_graphs_meet_are_divided_there():
    tensor = received(2).exp()
    _, (first, second) = condensed(tensor.sin(), tensor.cos())
    (shared,) = stage_of(first).parents
    assert stage_of(second).parents == (shared,)
    assert isinstance(stage_of(shared), Stage)


def test_the_sink_of_a_leaf_that_was_only_sent_can_be_captured():
    leaf = torch.ones(2, requires_grad=True)
    port = Port(leaf)
    made = condense([], sent(leaf), [port], True)
    assert made.wanted[port] == made.stands[port].parents[0]
