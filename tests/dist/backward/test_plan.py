"""What a pass visits is found anew exactly when something has changed."""

from __future__ import annotations

import aiograd as ag
from aiograd.autograd.op import parent_of
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.dist.backward.plan import Topology

PEER = bytes(16)


def test_it_fits_the_next_pass_until_roots_edges_hooks_or_deaths_change():
    x = ag.tensor([1.0], requires_grad=True)
    middle = x * 2.0
    root = parent_of(middle.sum())
    assert root is not None
    sends = {1: SendNode(1, "b", PEER, (parent_of(middle),))}
    receives = {2: RecvNode(7, 2, "b", PEER, 1)}
    found = Topology(sends, receives, [root])
    assert found.fits([root], [], 1, 1)
    assert not found.fits([root, root], [], 1, 1)
    assert not found.fits([], [], 1, 1)
    assert not found.fits([root], [], 2, 1)
    assert not found.fits([root], [], 1, 2)
    assert not found.fits([root], [PEER], 1, 1)
    handle = x.register_hook(lambda gradient: None)
    assert not found.fits([root], [], 1, 1)
    handle.remove()
    assert found.fits([root], [], 1, 1)
    middle.register_hook(lambda gradient: None)
    assert not found.fits([root], [], 1, 1)


def test_edges_to_the_dead_are_not_awaited_and_unused_ones_are_answered():
    x = ag.tensor([1.0], requires_grad=True)
    sends = {1: SendNode(1, "b", PEER, (parent_of(x),)), 2: SendNode(2, "c", b"c", (None,))}
    receives = {3: RecvNode(7, 3, "c", b"c", 1)}
    found = Topology(sends, receives, gone=[PEER])
    assert list(found.awaited) == [2]
    assert found.dead == [sends[1]]
    assert found.unreached == [receives[3]]
