"""Access checks: a restricted peer speaks only of contexts it takes part in, and in the right form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.autograd.coo import Coo
from aiograd.dist.access import ContextAccess, CooTraveller
from aiograd.dist.context import Context
from aiograd.errors import BackwardFailed, NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.directory import Directory, PeerInfo
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.link.ledger import MEMORY, Accounts
from aiograd.rpc.observe.metrics import Limits
from aiograd.rpc.options import Options

PEER = PeerInfo("peer", 2, b"p" * 16)
STRANGER = PeerInfo("stranger", 3, b"s" * 16)
OTHER = PeerInfo("other", 5, b"o" * 16)
TRUSTED = PeerInfo("trusted", 4, b"t" * 16)
BODY = ([], None, (1, 0), 1)


class Worker:
    """One worker with a context that PEER brought; it restricts everybody but TRUSTED."""

    def __init__(self) -> None:
        self.limits = Limits()
        options = Options(partner_memory=10_000, partner_contexts=2, partner_values=8)
        self.accounts = Accounts("here", Budget(1 << 20, self.limits), options, self.limits, float)
        channel: Any = SimpleNamespace(
            name="here",
            directory=Directory(),
            restricts=lambda peer: peer is not TRUSTED,
            account=self.accounts.of,
        )
        channel.directory.add(PEER)
        home: Any = SimpleNamespace(steps=0, channel=channel)
        self.context = Context(home, 7)
        self.context.callers[PEER.incarnation] = "peer"
        self.context.receives[9] = None  # type: ignore[assignment]
        self.table = {7: self.context}
        self.served: list[Any] = []
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


def test_messages_of_passes_that_never_begin_count_for_their_sender():
    worker = Worker()

    def early(sender: PeerInfo, context_id: int, number: int, invitation: Any, body: Any) -> None:
        worker.context.early.setdefault(number, []).append(body)

    guarded = worker.access.guard_gradients(early)
    with pytest.raises(Overloaded):
        for number in range(100):
            guarded(PEER, 7, number, None, BODY)
    assert worker.limits[MEMORY] == 1
    kept = len(worker.context.early)
    assert 0 < kept < 20
    worker.context.callers[OTHER.incarnation] = OTHER.name
    guarded(OTHER, 7, 1000, None, BODY)  # has a share of its own
    worker.context.early.clear()  # their invitations came
    guarded(PEER, 7, 0, None, BODY)
    assert worker.accounts.of("peer").used < 10_000 / kept * 2


def test_passes_that_a_peer_invites_to_are_limited_until_they_end():
    worker = Worker()

    def join(sender: PeerInfo, context_id: int, number: int, invitation: Any, body: Any) -> None:
        worker.context.passes[number] = SimpleNamespace(hold=None, gradients={}, retries=None)

    guarded = worker.access.guard_gradients(join)
    invitation = ("w", 0, bytes(16), True, False, True)
    for number in range(8):
        guarded(PEER, 7, number, invitation, BODY)
    with pytest.raises(Overloaded):
        guarded(PEER, 7, 8, invitation, BODY)
    assert worker.limits["passes"] == 1
    worker.context.ended_well(bytes(16), 0)
    worker.context.ended_badly(bytes(16), 1, BackwardFailed("w", "", "why"))
    guarded(PEER, 7, 8, invitation, BODY)
    guarded(PEER, 7, 9, invitation, BODY)
    assert worker.accounts.of("peer").counts["passes"] == 8


def test_marks_of_aborted_passes_are_limited_and_only_of_passes_of_the_sender():
    worker = Worker()

    def drop(sender: PeerInfo, context_id: int, number: int, *rest: Any) -> bool:
        return worker.context.ended_badly(sender.incarnation, number, BackwardFailed("w", "", ""))

    guarded = worker.access.guard_abort(drop)
    own = PEER.rank << 48
    for number in range(32):
        guarded(PEER, 7, own + number, PEER.incarnation, None)
    with pytest.raises(Overloaded):
        guarded(PEER, 7, own + 32, PEER.incarnation, None)
    assert worker.limits["aborts"] == 1
    assert len(worker.context.aborted) == 32
    # Of a pass that is not known here, and of another worker: it is not believed.
    assert guarded(PEER, 7, 5 << 48, PEER.incarnation, None)
    assert guarded(PEER, 7, own + 33, OTHER.incarnation, None)
    assert len(worker.context.aborted) == 32


def test_a_peer_speaks_of_passes_under_way_only_if_it_takes_part_in_them():
    worker = Worker()
    state = SimpleNamespace(names=lambda incarnation: incarnation == OTHER.incarnation)
    worker.access.passes = {(7, 1): SimpleNamespace(state=state, inbox=[])}
    worker.context.callers[OTHER.incarnation] = OTHER.name
    abort, failed = (
        worker.access.guard_abort(worker.serve),
        worker.access.guard_failed(worker.serve),
    )
    with pytest.raises(NotAllowed):
        abort(PEER, 7, 1, OTHER.incarnation, None)
    with pytest.raises(NotAllowed):
        failed(PEER, 7, 1, "w", "op", None)
    abort(OTHER, 7, 1, OTHER.incarnation, None)
    failed(OTHER, 7, 1, "w", "op", None)
    assert len(worker.served) == 2


@pytest.mark.parametrize("number", [-1, 1 << 64, 1 << 4000, True, "1", None, 1.0])
def test_malformed_aborts_and_failures_are_refused(number):
    worker = Worker()
    with pytest.raises(ProtocolError):
        worker.access.guard_abort(worker.serve)(PEER, 7, number, bytes(16), None)
    with pytest.raises(ProtocolError):
        worker.access.guard_failed(worker.serve)(PEER, 7, number, "w", "op", None)
    for originator in (b"", bytes(15), "text", None):
        with pytest.raises(ProtocolError):
            worker.access.guard_abort(worker.serve)(PEER, 7, 1, originator, None)
    for worker_name, op in (("x" * 1000, ""), ("", "x" * 1000), (None, ""), ("", 1)):
        with pytest.raises(ProtocolError):
            worker.access.guard_failed(worker.serve)(PEER, 7, 1, worker_name, op, None)
    assert not worker.served


@pytest.mark.parametrize(
    "report",
    [
        (bytes(16), "w", 1, 1, -1, tuple(range(5000)), ()),
        (bytes(16), "w", 1, 1, -1, (), tuple(range(5000))),
        (bytes(16), "w w", 1, 1, -1, (), ()),
        (bytes(16), "w", 1 << 4000, 1, -1, (), ()),
        (bytes(15), "w", 1, 1, -1, (), ()),
        (bytes(16), "w", 1, 1, -1, (-2,), ()),
    ],
)
def test_malformed_and_endless_reports_are_refused(report):
    worker = Worker()
    with pytest.raises(ProtocolError):
        worker.access.guard_outcomes(worker.serve)(PEER, 7, [report])
    assert not worker.served


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


def test_the_contexts_and_edges_of_one_peer_are_limited():
    worker = Worker()
    for id in (20, 21):
        worker.access.may_bring(PEER, (id, 1, 1))
        worker.table[id] = context = Context(worker.context.home, id)
        worker.access.brought(PEER, context, 1, new=True)
    with pytest.raises(Overloaded):
        worker.access.may_bring(PEER, (22, 0, 0))
    worker.access.may_bring(OTHER, (22, 1, 1))  # of another one, who has a share of its own
    for edge in range(2, 8):
        worker.access.may_bring(PEER, (20, edge, 1))  # in one that is open already
        worker.access.brought(PEER, worker.table[20], edge, new=False)
    with pytest.raises(Overloaded):
        worker.access.may_bring(PEER, (20, 9, 1))
    assert (worker.limits["contexts"], worker.limits["edges"]) == (1, 1)
    for hold in worker.table[20].holds.values():
        hold.close()
    worker.access.may_bring(PEER, (22, 1, 1))


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
