"""Tensors on the way: the general form and the array form of one tensor say the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.op import parent_of
from aiograd.dist.nodes import RecvNode
from aiograd.dist.travellers import EDGE, LOOPS, TensorTraveller
from aiograd.errors import ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival, Departure

PEER = PeerInfo("peer", 1, bytes(16))
TRAVELLER = TensorTraveller()


def carried(**hooks: Any) -> Any:
    return SimpleNamespace(id=7, hooks=hooks)


def general(tensor: ag.Tensor, departure: Departure, arrival: Arrival) -> ag.Tensor:
    return TRAVELLER.arrive(TRAVELLER.depart(tensor, departure), arrival)


def as_array(tensor: ag.Tensor, departure: Departure, arrival: Arrival) -> ag.Tensor:
    opened = TRAVELLER.open(tensor, departure)
    assert opened is not None
    return TRAVELLER.close(*opened, arrival)


@pytest.mark.parametrize("form", [general, as_array])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_outside_a_context_a_tensor_arrives_as_a_leaf_with_its_flag(form, requires_grad):
    tensor = ag.tensor([1.0, 2.0], requires_grad=requires_grad)
    departure = Departure(PEER, "call")
    arrived = form(tensor, departure, Arrival(PEER, "call", restricted=False))
    assert arrived.is_leaf
    assert arrived.requires_grad is requires_grad
    assert EDGE not in departure.scratch


@pytest.mark.parametrize("form", [general, as_array])
def test_in_a_context_tensors_that_need_grad_join_the_edge_of_their_message(form):
    departure = Departure(PEER, "call", carried())
    arrival = Arrival(PEER, "call", restricted=False)
    arrival.scratch[EDGE] = end = RecvNode(7, 1, "peer", bytes(16), 2)
    tensors = [ag.tensor([1.0], requires_grad=flag) for flag in (True, False, True)]
    first, plain, second = [form(tensor, departure, arrival) for tensor in tensors]
    assert departure.scratch[EDGE] == [parent_of(tensors[0]), parent_of(tensors[2])]
    parts = [parent_of(first), parent_of(second)]
    assert [(part.joint, part.index) for part in parts] == [(end, 0), (end, 1)]
    assert not plain.requires_grad
    assert not end.loops


@pytest.mark.parametrize("form", [general, as_array])
def test_a_tensor_that_goes_back_unchanged_is_marked_as_a_loop_at_both_ends(form):
    came = Arrival(PEER, "call", restricted=False)
    came.scratch[EDGE] = RecvNode(7, 1, PEER.name, PEER.incarnation, 1)
    tensor = TRAVELLER.close(np.ones(2), 2, came)
    departure, arrival = Departure(PEER, "reply", carried()), Arrival(PEER, "reply", restricted=False)
    arrival.scratch[EDGE] = end = RecvNode(7, 2, "other", b"o" * 16, 1)
    form(tensor, departure, arrival)
    assert departure.scratch[LOOPS] == end.loops == 1


def test_a_tensor_that_a_boundary_hook_may_change_needs_the_general_form():
    departure = Departure(PEER, "call", carried(hook=lambda crossing, array: None))
    assert TRAVELLER.open(ag.tensor([1.0], requires_grad=True), departure) is None
    assert TRAVELLER.open(ag.tensor([1.0]), departure) is not None
    assert EDGE not in departure.scratch


@pytest.mark.parametrize(
    "data",
    [
        ("no array", 0, None, None),
        (np.ones(1), 4, None, None),  # the edge has one tensor, not two
        (np.ones(1), 0, dict, None),
        (np.ones(1), 0, None, "O"),
    ],
)
def test_a_malformed_tensor_is_refused(data):
    arrival = Arrival(PEER, "call", restricted=False)
    arrival.scratch[EDGE] = RecvNode(7, 1, "peer", bytes(16), 1)
    with pytest.raises(ProtocolError):
        TRAVELLER.arrive(data, arrival)
