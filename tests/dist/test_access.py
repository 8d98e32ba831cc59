"""Access checks: a restricted peer speaks only of contexts it takes part in, and in the right form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.autograd.coo import Coo
from aiograd.dist.access import CONTEXTS, EARLY, ContextAccess, CooTraveller
from aiograd.errors import NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.directory import Directory, PeerInfo

PEER = PeerInfo("peer", 2, b"p" * 16)
STRANGER = PeerInfo("stranger", 3, b"s" * 16)
TRUSTED = PeerInfo("trusted", 4, b"t" * 16)
BODY = ([], None, (1, 0), 1)


class Worker:
    """One worker with a context that PEER brought; it restricts everybody but TRUSTED."""

    def __init__(self) -> None:
        self.context: Any = SimpleNamespace(
            callers={PEER.incarnation: "peer"}, recipients={}, receives={9: None}, early={}
        )
        self.table = {7: self.context}
        self.served: list[Any] = []
        self.limits: list[str] = []
        channel: Any = SimpleNamespace(
            name="here",
            directory=Directory(),
            restricts=lambda peer: peer is not TRUSTED,
            limit_reached=self.limits.append,
        )
        self.access = ContextAccess(channel, self)

    def find(self, context_id: int) -> Any:
        return self.table.get(context_id)

    def all(self) -> list[Any]:
        return list(self.table.values())

    def serve(self, sender: PeerInfo, *args: Any) -> None:
        self.served.append(args)


@pytest.mark.parametrize("context_id", [7, 8])
def test_a_peer_that_takes_no_part_in_a_context_is_refused(context_id):
    worker = Worker()
    for guard in (worker.access.guard, worker.access.guard_gradients, worker.access.guard_outcomes):
        with pytest.raises(NotAllowed, match="takes no part"):
            guard(worker.serve)(STRANGER, context_id, [])
    assert not worker.served


def test_callers_recipients_and_the_worker_that_opened_a_context_take_part():
    worker = Worker()
    worker.access.takes_part(PEER, 7)
    worker.context.callers.clear()
    worker.context.recipients["peer"] = PEER
    worker.access.takes_part(PEER, 7)
    successor = PeerInfo("peer", 2, b"q" * 16)
    with pytest.raises(NotAllowed):
        worker.access.takes_part(successor, 7)


def test_messages_of_trusted_peers_are_not_checked():
    worker = Worker()
    worker.access.guard_gradients(worker.serve)(TRUSTED, 8, "anything")
    worker.access.guard_release(worker.serve)(TRUSTED, 8, 9)
    assert worker.served == [(8, "anything"), (8, 9)]


def test_a_well_formed_gradient_message_is_served():
    worker = Worker()
    gradient = np.ones(2)
    body = ([(9, [gradient, None], None), (10, None, [(0, 1, 0)])], [11], (3, 2), 1)
    worker.access.guard_gradients(worker.serve)(PEER, 7, 1, ("w", 0, bytes(16), True, False, True), body)
    assert worker.served[0][-1] is body


def test_a_peer_cannot_mention_any_number_of_passes_that_never_begin():
    worker = Worker()
    guarded = worker.access.guard_gradients(worker.serve)
    worker.context.early = dict.fromkeys(range(EARLY))
    guarded(PEER, 7, 0, None, BODY)  # of a pass that was mentioned before
    with pytest.raises(Overloaded):
        guarded(PEER, 7, EARLY, None, BODY)
    assert worker.limits == ["contexts"]


def test_only_a_peer_that_brought_a_context_may_release_it():
    worker = Worker()
    guarded = worker.access.guard_release(worker.serve)
    guarded(PEER, 7, 8)
    assert worker.served == [(7,)]  # 8 is unknown, and not remembered
    with pytest.raises(NotAllowed):
        guarded(STRANGER, 7)
    with pytest.raises(ProtocolError, match="a context id is an int"):
        guarded(PEER, "7")


@pytest.mark.parametrize("data", [None, (1, 2), (1, 2, "3"), (-1, 0, 0), (1 << 64, 0, 0), (7, 9, 1)])
def test_malformed_baggage_and_used_edges_are_refused(data):
    with pytest.raises(ProtocolError):
        Worker().access.may_bring(PEER, data)


def test_the_contexts_of_restricted_peers_are_limited():
    worker = Worker()
    worker.access.may_bring(PEER, (8, 1, 1))
    worker.table |= dict.fromkeys(range(100, 100 + CONTEXTS))
    with pytest.raises(Overloaded):
        worker.access.may_bring(PEER, (8, 1, 1))
    worker.access.may_bring(PEER, (7, 1, 1))  # one that is open already


def test_a_sparse_array_is_not_believed_to_be_coalesced():
    indices, values = np.array([[2, 0]]), np.array([1.0, 2.0])
    traveller = CooTraveller()
    found = traveller.arrive((indices, values, (3,), True), None)
    assert not found.coalesced
    again = traveller.arrive(traveller.depart(found.coalesce(), None), None)
    assert again.coalesced
    assert isinstance(again, Coo)


@pytest.mark.parametrize(
    "data",
    [
        ([[0]], np.ones(1), (3,), False),
        (np.array([[0]]), np.ones(1), [3], False),
        (np.array([0]), np.ones(1), (3,), False),
        (np.array([[0]]), np.ones(2), (3,), False),
        (np.array([[3]]), np.ones(1), (3,), False),
        (np.array([[-1]]), np.ones(1), (3,), False),
    ],
)
def test_parts_of_a_sparse_array_that_do_not_fit_are_refused(data):
    with pytest.raises(ProtocolError):
        CooTraveller().arrive(data, None)
