"""The owner's table: abandoned creations, and requests that arrive several times."""

from __future__ import annotations

import random

from aiograd.rref.refcount.owner import OwnerTable, SeenRequests
from aiograd.rref.refcount.records import BY_CREATOR
from tests.support.refcount import party

OWNER, FRIEND = party(0), party(2)
REF, FORK, CHILD = (1, 1, 0), (1, 1, 1), (1, 1, 2)


def test_the_last_fork_of_an_abandoned_creation_frees_it_and_fails_its_waiters() -> None:
    table = OwnerTable(OWNER)
    woken = []
    table.request(FRIEND.incarnation, 0, 0, [(REF, CHILD, BY_CREATOR)])
    record = table.look_up(FRIEND, REF, CHILD, BY_CREATOR)
    record.waiters[FRIEND] = lambda: woken.append(record.error)
    table.release([(REF, FORK, True)])  # the creator timed out before its call had left
    assert REF in table.records
    table.release([(REF, CHILD, False)])
    assert "given up" in str(woken[0])
    assert not table.records


def test_each_request_number_counts_once_in_any_order() -> None:
    copies = [*range(20), *range(20)]
    random.Random(7).shuffle(copies)
    seen = SeenRequests()
    taken = [number for number in copies if seen.take(number, 0)]
    assert sorted(taken) == list(range(20))


def test_numbers_that_the_sender_has_answers_to_are_forgotten_and_stay_copies() -> None:
    seen = SeenRequests()
    for number in range(1000):
        assert seen.take(number, low=number)
    assert seen._taken == {999}
    assert not any(seen.take(number, low=0) for number in range(1000))
