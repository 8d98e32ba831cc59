"""The user's table: request numbers, and callbacks of a fork."""

from __future__ import annotations

from aiograd.errors import RRefError
from aiograd.rref.refcount.records import BY_CONFIRMED, BY_OWNER, Use, with_callback
from aiograd.rref.refcount.user import RequestNumbers, UserTable
from tests.support.refcount import party

OWNER, PARENT = party(0), party(1)
REF, FORK = (0, 1, 0), (1, 1, 1)


def test_a_request_carries_the_lowest_unanswered_number() -> None:
    numbers = RequestNumbers()
    assert [numbers.issue() for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    numbers.close(1)
    assert numbers.issue() == (3, 0)
    numbers.close(0)
    assert numbers.issue() == (4, 2)
    numbers.close(0)  # a copy of its answer


def test_a_fork_from_the_owner_is_confirmed_at_once_and_notifies_nobody() -> None:
    table = UserTable()
    assert table.receive(REF, FORK, OWNER, OWNER, BY_OWNER).use is Use.CONFIRMED
    assert table.take() == []


def test_a_fork_from_a_user_is_requested_and_then_accepted() -> None:
    table = UserTable()
    record = table.receive(REF, FORK, OWNER, PARENT, BY_CONFIRMED)
    (request,) = table.take()
    assert (request.to, request.forks, record.use) == (OWNER, [record], Use.CONFIRMING)
    table.answered(record)
    (acceptance,) = table.take()
    assert (acceptance.to, acceptance.accepts) == (PARENT, [FORK])


def test_a_refused_fork_is_accepted_too_and_calls_both_kinds_of_callbacks() -> None:
    table = UserTable()
    record = table.receive(REF, FORK, OWNER, PARENT, BY_CONFIRMED)
    table.take()
    called: list[str] = []
    record.on_confirmed = with_callback(record.on_confirmed, lambda: called.append("confirmed"))
    record.on_failed = with_callback(record.on_failed, lambda: called.append("failed"))
    for _ in range(2):  # a second answer changes nothing
        table.answered(record, RRefError("no"))
    assert called == ["confirmed", "failed"]
    (acceptance,) = table.take()
    assert acceptance.accepts == [FORK]
