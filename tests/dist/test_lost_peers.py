"""The order of losses: the first one of a peer counts, until it is back or long forgotten."""

from __future__ import annotations

import math

from aiograd.dist.lost_peers import LostPeers
from aiograd.rpc.directory import LOST_PEERS


def test_losses_are_numbered_in_their_order():
    lost = LostPeers()
    lost.add(b"a", "w")
    lost.add(b"b", "w")
    assert (lost.order(b"a"), lost.order(b"b"), lost.order(b"c")) == (1, 2, math.inf)
    assert b"a" in lost
    assert b"c" not in lost
    assert len(lost) == 2


def test_a_peer_that_is_lost_again_keeps_the_number_of_its_first_loss():
    lost = LostPeers()
    for incarnation in (b"a", b"b", b"a"):
        lost.add(incarnation, "w")
    assert lost.order(b"a") == 1
    assert lost.count == 3


def test_a_peer_that_is_back_is_not_lost():
    lost = LostPeers()
    lost.add(b"a", "w")
    lost.discard(b"a")
    lost.discard(b"never lost")
    assert b"a" not in lost
    lost.add(b"a", "w")
    assert lost.order(b"a") == 2


def test_only_the_latest_losses_are_remembered():
    lost = LostPeers()
    for number in range(2 * LOST_PEERS + 1):
        lost.add(number.to_bytes(16, "big"), "w")
    assert len(lost) == 2 * LOST_PEERS
    assert bytes(16) not in lost
    assert (2 * LOST_PEERS).to_bytes(16, "big") in lost
