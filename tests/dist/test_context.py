"""One worker's part of a context: which gradients it shows, and when it raises instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.dist.backward.outcomes import Report
from aiograd.dist.backward.plan import Topology
from aiograd.dist.backward.state import Pass, Terms
from aiograd.dist.context import Context
from aiograd.dist.lost_peers import LostPeers
from aiograd.errors import BackwardFailed, PassUndecided, UnknownContext
from aiograd.rpc.directory import PeerInfo

ME, PEER = PeerInfo("me", 0, b"m" * 16), PeerInfo("peer", 1, b"p" * 16)
FAILURE = BackwardFailed("peer", "", "on purpose")


def context() -> Context:
    home: Any = SimpleNamespace(steps=0, lost_peers=LostPeers(), channel=SimpleNamespace(name="me"))
    return Context(home, 7)


def joined(context: Context, number: int, leaf: ag.Tensor, gradient: float) -> Pass:
    """A pass of PEER in which this worker found a gradient."""
    state = Pass((7, number), PEER, ME, Terms(), Topology({}, {}))
    state.gradients[leaf] = np.array([gradient])
    state.retries = context.failure
    context.passes[number] = state
    return state


def leaf() -> ag.Tensor:
    return ag.tensor([1.0], requires_grad=True)


def test_gradients_of_a_pass_are_shown_when_it_is_known_to_have_ended_well():
    ctx, x = context(), leaf()
    for number, gradient in ((1, 2.0), (2, 3.0)):
        joined(ctx, number, x, gradient)
        with pytest.raises(PassUndecided):
            _ = ctx.gradients
        ctx.ended_well(PEER.incarnation, number)
    assert ctx.gradients[x].tolist() == [5.0]


def test_an_undecided_pass_of_a_lost_originator_says_so():
    ctx = context()
    joined(ctx, 1, leaf(), 2.0)
    ctx.home.lost_peers.add(PEER.incarnation, PEER.name)
    with pytest.raises(PassUndecided, match="lost"):
        _ = ctx.gradients


def test_a_failed_pass_hides_all_gradients_until_a_later_one_ends_well():
    ctx, x = context(), leaf()
    joined(ctx, 1, x, 2.0)
    ctx.ended_well(PEER.incarnation, 1)
    joined(ctx, 2, x, 100.0)
    assert ctx.ended_badly(PEER.incarnation, 2, FAILURE)
    assert not ctx.ended_badly(PEER.incarnation, 2, FAILURE), "known already"
    with pytest.raises(BackwardFailed):
        _ = ctx.gradients
    joined(ctx, 3, x, 3.0)
    ctx.ended_well(PEER.incarnation, 3)
    assert ctx.gradients[x].tolist() == [5.0]


def test_an_abort_that_arrives_after_a_later_success_hides_nothing():
    ctx, x = context(), leaf()
    ctx.outcomes.learn(Report(PEER.incarnation, "peer", 1, 3, 2, (), (1,)), PEER.incarnation)
    joined(ctx, 1, x, 2.0)
    ctx.ended_badly(PEER.incarnation, 1, FAILURE)
    assert ctx.gradients == {}


def test_a_pass_of_another_originator_ends_a_failure_only_if_it_began_after_it():
    ctx, x = context(), leaf()
    joined(ctx, 5, x, 2.0)  # it runs already
    ctx.ended_badly(b"o" * 16, 1, FAILURE)
    ctx.ended_well(PEER.incarnation, 5)
    with pytest.raises(BackwardFailed):
        _ = ctx.gradients
    joined(ctx, 6, x, 3.0)
    ctx.ended_well(PEER.incarnation, 6)
    assert ctx.gradients[x].tolist() == [5.0]


def test_a_lost_recipient_gets_no_release_but_stays_a_known_worker():
    ctx = context()
    ctx.recipients["peer"] = PEER
    ctx.cut_off(PeerInfo("peer", 1, b"another" + bytes(9)))
    assert ctx.recipients
    ctx.cut_off(PEER)
    assert not ctx.recipients
    assert ctx.lost == {PEER.incarnation}
    assert ctx.known_workers == {"peer"}


def test_a_released_context_shows_no_gradients():
    ctx = context()
    ctx.released = True
    with pytest.raises(UnknownContext):
        _ = ctx.gradients
