"""The reference protocol by hand: every way to share, in every awkward order."""

from __future__ import annotations

import pytest

from aiograd.errors import OwnerLost, RRefError, RRefExpired, RRefReleased
from aiograd.rpc.directory import LOST_PEERS, PeerInfo
from aiograd.rref.refcount.owner import ABANDONED_LIMIT
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    BY_CONFIRMED,
    BY_CREATOR,
    UNKNOWN_SITE,
    Use,
)
from tests.support.refcount import (
    arrived_held,
    arrived_owned,
    created,
    party,
    tell_accepts,
    tell_forks,
    tell_releases,
)

# ── creation ────────────────────────────────────────────────────────────────────────────────────


def test_ids_of_references_and_forks_come_from_one_counter(a: Protocol, b: Protocol) -> None:
    first = a.own(1)
    second = a.create(b.me)
    assert [first.id[2], second.id[2], second.fork[2]] == [0, 1, 2]


def test_ids_of_a_restarted_worker_differ_from_those_of_its_predecessor() -> None:
    assert Protocol(party(0, start=0)).new_id() != Protocol(party(0, start=1)).new_id()


def test_a_created_value_is_kept_until_its_creator_lets_go(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    assert held.use is Use.CONFIRMED
    assert b.look_up(a.me, held.id, held.fork, held.known).value == "value"
    a.user_table.drop(held)
    assert tell_releases(a, b) == 1
    assert a.at_rest
    assert b.at_rest


def test_a_reference_dropped_before_the_answer_is_released_after_it(
    a: Protocol, b: Protocol
) -> None:
    held = a.create(b.me)
    a.user_table.drop(held)
    assert a.user_table.take() == []
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, 1)
    a.user_table.answered(held)
    tell_releases(a, b)
    assert a.at_rest
    assert b.at_rest


def test_a_local_value_enters_the_table_only_when_it_is_shared(a: Protocol, b: Protocol) -> None:
    owned = a.own("x")
    assert a.at_rest
    data = a.depart(owned, b.me)
    assert not a.at_rest
    held = arrived_held(b, data, a)
    assert held.use is Use.CONFIRMED
    b.user_table.drop(held)
    tell_releases(b, a)
    assert a.at_rest
    assert owned.value == "x"


def test_a_creation_for_oneself_keeps_itself_until_it_is_answered(a: Protocol) -> None:
    owned = a.create_here()
    assert not a.at_rest
    a.owner_table.expect(a.me.incarnation, owned.id, owned.id, UNKNOWN_SITE)
    a.owner_table.settle(owned.id, 5)
    assert not a.at_rest
    a.created_here(owned)
    assert a.at_rest
    assert owned.value == 5


@pytest.mark.parametrize("creator_error", [None, RRefError("RRef creation timed out")])
def test_who_waits_for_the_answer_to_a_creation_for_oneself_is_woken_once(
    a: Protocol, creator_error: Exception | None
) -> None:
    owned = a.create_here()
    woken: list[str] = []
    owned.on_answered = [lambda: woken.append("first"), lambda: woken.append("second")]
    for _ in range(2):
        a.created_here(owned, creator_error)
    assert woken == ["first", "second"]


def test_a_creation_for_oneself_that_never_came_leaves_nothing(a: Protocol) -> None:
    owned = a.create_here()
    a.created_here(owned, error=RRefError("RRef creation timed out"))
    assert a.at_rest
    with pytest.raises(RRefError, match="creation"):
        a.check(owned)
    a.owner_table.expect(a.me.incarnation, owned.id, owned.id, UNKNOWN_SITE)  # late after all
    a.owner_table.settle(owned.id, 5)
    assert a.at_rest


def test_a_creation_for_oneself_keeps_itself_also_when_others_come_and_go(
    a: Protocol, b: Protocol
) -> None:
    owned = a.create_here()
    held = arrived_held(b, a.depart(owned, b.me), a)
    a.released([(held.id, held.fork, False)])
    assert a.owner_table.records[owned.id] is owned


def test_a_value_tells_the_line_that_made_it_whoever_comes_first(a: Protocol, b: Protocol) -> None:
    made, late = ("made.py", 1), ("late.py", 2)
    held = a.create(b.me)
    early = b.look_up(a.me, held.id, held.fork, held.known)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, made)
    assert early.call_site == made
    owned = a.create_here(made)
    a.owner_table.expect(a.me.incarnation, owned.id, owned.id, late)
    assert owned.call_site == made


def test_a_given_up_creation_that_runs_all_the_same_is_cleaned(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    a.user_table.answered(held, RRefError("RRef creation timed out"))
    a.user_table.drop(held)
    tell_releases(a, b)
    assert not b.at_rest  # its function still runs
    b.owner_table.settle(held.id, 1)
    assert b.at_rest


def test_a_release_may_be_faster_than_the_creation_it_gives_up(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    a.user_table.answered(held, RRefError("RRef creation timed out"))
    a.user_table.drop(held)
    tell_releases(a, b)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, 1)
    assert b.at_rest
    assert not b.owner_table._abandoned


def test_the_dead_of_a_long_life_do_not_pile_up(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    for number in range(2 * LOST_PEERS - 1):
        a.lost(PeerInfo("lost", 9, number.to_bytes(16, "big")))
    a.lost(b.me)
    assert len(a.unreachable) == 2 * LOST_PEERS
    a.lost(PeerInfo("lost", 9, bytes([255] * 16)))
    assert len(a.unreachable) == 2 * LOST_PEERS
    with pytest.raises(OwnerLost):
        a.check(held)


def test_creators_whose_lease_ran_out_do_not_pile_up(b: Protocol) -> None:
    """Of the latest ones an owner knows that what they ask for will not come any more."""
    dead = [
        Protocol(PeerInfo(f"worker{i}", 2, (i + 1).to_bytes(8, "big") + bytes(8)))
        for i in range(2 * LOST_PEERS + 1)
    ]
    creations = [created(creator, b) for creator in dead]
    for creator in dead:
        b.lease_over(b.lost(creator.me))
    assert len(b.owner_table._expired) == 2 * LOST_PEERS
    for creator, held in zip(dead[1:], creations[1:], strict=True):
        with pytest.raises(RRefExpired):
            b.look_up(creator.me, held.id, held.fork, BY_CREATOR)


def test_given_up_creations_that_never_come_do_not_pile_up(a: Protocol, b: Protocol) -> None:
    ids = [(a.new_id(), a.new_id(), True) for _ in range(ABANDONED_LIMIT + 10)]
    b.released(ids)
    (forks,) = b.owner_table._abandoned.values()
    assert len(forks) == ABANDONED_LIMIT


def test_a_creator_that_abandons_many_pushes_out_its_own_only(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    ref_id, fork = c.new_id(), c.new_id()
    b.released([(ref_id, fork, True)])
    b.released([(a.new_id(), a.new_id(), True) for _ in range(ABANDONED_LIMIT + 10)])
    b.owner_table.expect(c.me.incarnation, ref_id, fork, ("f", 1))
    b.owner_table.settle(ref_id, "value")
    assert ref_id not in b.owner_table.records  # it was released before it came
    b.lost(a.me)
    assert not b.owner_table._abandoned


def test_the_error_of_the_creating_function_is_the_outcome(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, None, ValueError("no"))
    assert isinstance(b.look_up(a.me, held.id, held.fork, held.known).error, ValueError)


# ── the ways to share ───────────────────────────────────────────────────────────────────────────


def test_a_user_gives_a_reference_back_to_its_owner(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    data = a.depart(held, b.me)
    a.user_table.drop(held)
    assert a.user_table.take() == []  # kept until the owner has seen it
    owned = arrived_owned(b, data, a)
    assert owned.value == "value"
    tell_accepts(b, a)
    tell_releases(a, b)
    assert a.at_rest
    assert b.at_rest
    assert owned.value == "value"  # user code there still holds it


def test_a_user_shares_with_a_user_and_lets_go_only_when_the_owner_knows(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    a.user_table.drop(held)
    assert child.use is Use.CONFIRMING
    assert a.user_table.take() == []
    assert tell_forks(c, b) == [True]
    assert child.use is Use.CONFIRMED
    tell_accepts(c, a)
    tell_releases(a, b)
    assert b.look_up(c.me, child.id, child.fork, child.known).value == "value"
    c.user_table.drop(child)
    tell_releases(c, b)
    assert a.at_rest
    assert b.at_rest
    assert c.at_rest


def test_an_owner_that_sends_to_itself_keeps_no_fork(a: Protocol) -> None:
    owned = a.own("x")
    again = arrived_owned(a, a.depart(owned, a.me), a)
    assert again is owned
    assert a.at_rest


def test_a_child_dropped_while_the_owner_is_asked_is_released_afterwards(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    c.user_table.drop(child)
    tell_forks(c, b)
    batches = {batch.to.name: batch for batch in c.user_table.take()}
    assert batches["worker0"].accepts == [child.fork]
    assert batches["worker1"].releases == [child]


def test_what_never_left_is_undone(a: Protocol, b: Protocol, c: Protocol) -> None:
    owned = b.own("x")
    b.undo(b.depart(owned, a.me))
    assert b.at_rest
    held = created(a, b)
    a.undo(a.depart(held, c.me))
    a.user_table.drop(held)
    assert tell_releases(a, b) == 1
    assert len(a.audit) == len(b.audit) == 0


def test_what_never_left_gives_up_no_creation(a: Protocol, b: Protocol) -> None:
    owned = a.create_here()
    a.undo(a.depart(owned, b.me))
    assert not owned.abandoned
    assert not a.owner_table._abandoned
    assert list(owned.forks) == [owned.id]


def test_a_thousand_releases_are_one_message(a: Protocol, b: Protocol) -> None:
    for held in [created(a, b) for _ in range(1000)]:
        a.user_table.drop(held)
    assert tell_releases(a, b) == 1000
    assert b.at_rest


# ── uses that overtake the creation ─────────────────────────────────────────────────────────────


def test_a_fetch_that_overtakes_the_creation_waits_for_it(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    early = b.look_up(a.me, held.id, held.fork, held.known)
    woken: list[object] = []
    early.waiters["me"] = lambda: woken.append(early.value)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, 7)
    assert woken == [7]


def test_a_second_fetch_that_overtakes_the_creation_waits_for_the_same_value(
    a: Protocol, b: Protocol
) -> None:
    held = a.create(b.me)
    early = b.look_up(a.me, held.id, held.fork, BY_CREATOR)
    assert b.look_up(a.me, held.id, held.fork, BY_CREATOR) is early
    with pytest.raises(RRefExpired):  # who claims to be known must be
        b.look_up(a.me, held.id, held.fork, BY_CONFIRMED)


def test_a_fork_request_that_overtakes_the_creation_keeps_the_value(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = a.create(b.me)
    child = arrived_held(c, a.depart(held, c.me), a)
    assert tell_forks(c, b) == [True]
    tell_accepts(c, a)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, 7)
    a.user_table.answered(held)
    a.user_table.drop(held)
    tell_releases(a, b)
    assert b.look_up(c.me, child.id, child.fork, child.known).value == 7


def test_a_reference_given_back_before_its_creation_came_gets_the_value(
    a: Protocol, b: Protocol
) -> None:
    held = a.create(b.me)
    owned = arrived_owned(b, a.depart(held, b.me), a)
    assert not owned.ready
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, 7)
    assert owned.value == 7


def test_a_child_that_comes_and_goes_before_the_creation_leaves_nothing(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = a.create(b.me)
    child = arrived_held(c, a.depart(held, c.me), a)
    tell_forks(c, b)
    tell_accepts(c, a)
    c.user_table.drop(child)
    tell_releases(c, b)
    assert b.at_rest  # a late creation makes its own room
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.owner_table.settle(held.id, 7)
    assert b.look_up(a.me, held.id, held.fork, held.known).value == 7


def test_children_that_come_and_go_before_the_creation_take_nothing_from_who_waits(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    fetched, given, shared = (a.create(b.me) for _ in range(3))
    waiting = b.look_up(a.me, fetched.id, fetched.fork, BY_CREATOR)
    waiting.waiters["me"] = lambda: None
    back = arrived_owned(b, a.depart(given, b.me), a)
    other = a.new_id()
    b.requested(c.me, 0, 0, [(shared.id, other, BY_CREATOR)])
    for number, held in enumerate((fetched, given, shared), 1):
        fork = a.new_id()
        assert b.requested(c.me, number, 0, [(held.id, fork, BY_CREATOR)]) == [True]
        b.released([(held.id, fork, False)])
    for held, owned in ((fetched, waiting), (given, back)):
        assert b.owner_table.records[held.id] is owned
        assert not owned.ready
    assert list(b.owner_table.records[shared.id].forks) == [other]
    assert not b.owner_table.records[shared.id].ready
    assert not b.owner_table._abandoned


def test_who_waits_for_a_creation_that_was_given_up_is_told(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    early = b.look_up(a.me, held.id, held.fork, held.known)
    a.user_table.answered(held, RRefError("RRef creation timed out"))
    a.user_table.drop(held)
    tell_releases(a, b)
    assert isinstance(early.error, RRefError)
    assert b.at_rest


def test_a_reference_given_back_early_and_dropped_leaves_nothing(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    owned = arrived_owned(b, a.depart(held, b.me), a)
    b.owner_table.drop(owned)
    assert b.at_rest


# ── copies ──────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_of_a_fork_request_does_not_bring_a_released_fork_back(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    forks = [(child.id, child.fork, BY_CONFIRMED)]
    number, low = c.user_table.number(b.me)
    assert b.requested(c.me, number, low, forks) == [True]
    assert b.requested(c.me, number, low, forks) == [True]  # the answer was lost; the same again
    b.released([(child.id, child.fork, False)])
    assert b.requested(c.me, number, low, forks) == [False]  # a copy that wandered about
    assert list(b.owner_table.records[held.id].forks) == [held.fork]


def test_numbers_below_the_lowest_unanswered_one_are_copies(b: Protocol, c: Protocol) -> None:
    forks = [(c.new_id(), c.new_id(), BY_CREATOR)]
    assert b.requested(c.me, 5, 5, forks) == [True]
    assert b.requested(c.me, 4, 2, [(c.new_id(), c.new_id(), BY_CREATOR)]) == [False]
    assert b.requested(c.me, 7, 5, [(c.new_id(), c.new_id(), BY_CREATOR)]) == [True]
    assert b.requested(c.me, 6, 5, [(c.new_id(), c.new_id(), BY_CREATOR)]) == [True]


def test_a_number_counts_once_also_when_it_has_become_the_lowest(b: Protocol, c: Protocol) -> None:
    def ask(number: int, low: int) -> bool:
        return b.requested(c.me, number, low, [(c.new_id(), c.new_id(), BY_CREATOR)])[0]

    assert all(ask(number, 3) for number in (3, 4, 5))
    assert ask(6, 5)
    assert not ask(5, 5)
    assert b.owner_table._requests[c.me.incarnation]._taken == {5, 6}  # the rest need not be known


def test_copies_of_releases_and_acceptances_change_nothing(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    other = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    for _ in range(2):
        a.accepted([child.fork])
    assert held.children == 0
    for _ in range(2):
        b.released([(held.id, held.fork, False)])
    assert set(b.owner_table.records) == {other.id}


# ── who may use what ────────────────────────────────────────────────────────────────────────────


def test_only_the_holder_of_a_fork_may_use_it(a: Protocol, b: Protocol, c: Protocol) -> None:
    held = created(a, b)
    with pytest.raises(RRefExpired, match="worker1 no longer keeps"):
        b.look_up(c.me, held.id, held.fork, BY_CONFIRMED)
    with pytest.raises(RRefExpired):
        b.look_up(a.me, held.id, a.new_id(), BY_CREATOR)


def test_a_released_reference_cannot_be_used_or_shared(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    a.user_table.drop(held)
    with pytest.raises(RRefReleased, match="after deletion"):
        a.depart(held, b.me)


def test_a_reference_cannot_be_used_once_it_was_dropped_or_given_back(
    a: Protocol, b: Protocol
) -> None:
    dropped, given_back = a.create(b.me), created(a, b)
    a.user_table.drop(dropped)
    assert dropped.use is Use.CREATING  # and is given back when the answer comes
    a.user_table.released(given_back)  # by its owner
    for held in (dropped, given_back):
        with pytest.raises(RRefReleased, match="after deletion"):
            a.check(held)


def test_a_reference_whose_creation_failed_says_why_at_every_use(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    a.user_table.answered(held, RRefError("no room"))
    for _ in range(2):
        with pytest.raises(RRefError, match="no room"):
            a.check(held)


def test_a_fork_request_for_something_given_up_long_ago_is_refused(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    b.released([(held.id, held.fork, False)])
    assert tell_forks(c, b) == [False]
    assert child.use is Use.FAILED
    tell_accepts(c, a)  # the parent need not wait, whatever came of it
    assert held.children == 0


def test_a_reference_given_back_after_its_value_went_says_so(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    data = a.depart(held, b.me)
    b.released([(held.id, held.fork, False)])
    assert isinstance(arrived_owned(b, data, a).error, RRefExpired)
    assert b.at_rest
