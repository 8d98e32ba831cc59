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
    OwnerRecord,
    Use,
    UserRecord,
)
from aiograd.rref.refcount.user import Batch


def party(rank: int, start: int = 0) -> PeerInfo:
    return PeerInfo(f"worker{rank}", rank, bytes([rank + 1, start]) + bytes(14))


@pytest.fixture
def a() -> Protocol:
    return Protocol(party(0))


@pytest.fixture
def b() -> Protocol:
    return Protocol(party(1))


@pytest.fixture
def c() -> Protocol:
    return Protocol(party(2))


def batch_to(worker: Protocol, to: Protocol) -> Batch:
    """The only thing that `worker` has to tell anybody."""
    (batch,) = worker.user_table.take()
    assert batch.to.incarnation == to.me.incarnation
    return batch


def created(creator: Protocol, owner: Protocol, value: object = "value") -> UserRecord:
    """A reference whose creation went through."""
    held = creator.create(owner.me)
    owner.owner_table.expect(creator.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    owner.owner_table.settle(held.id, value)
    creator.user_table.answered(held)
    return held


def tell_forks(user: Protocol, owner: Protocol) -> list[bool]:
    """Carry one fork request there and its answer back."""
    batch = batch_to(user, owner)
    number, low = user.user_table.number(owner.me)
    answer = owner.requested(
        user.me, number, low, [(held.id, held.fork, held.claim) for held in batch.forks]
    )
    user.user_table.close(owner.me, number)
    for held, counts in zip(batch.forks, answer, strict=True):
        user.user_table.answered(held, None if counts else RRefExpired("expired"))
    return answer


def tell_accepts(user: Protocol, parent: Protocol) -> None:
    parent.accepted(batch_to(user, parent).accepts)


def tell_releases(user: Protocol, owner: Protocol) -> int:
    """Carry releases there; return how many there were."""
    releases = batch_to(user, owner).releases
    owner.released([(held.id, held.fork, held.never_created) for held in releases])
    for held in releases:
        user.user_table.released(held)
    return len(releases)


def arrived_held(worker: Protocol, data: object, sender: Protocol) -> UserRecord:
    ref = worker.arrive(data, sender.me)  # type: ignore[arg-type]
    assert isinstance(ref, UserRecord)
    return ref


def arrived_owned(worker: Protocol, data: object, sender: Protocol) -> OwnerRecord:
    ref = worker.arrive(data, sender.me)  # type: ignore[arg-type]
    assert isinstance(ref, OwnerRecord)
    return ref


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
    assert len(b.owner_table._abandoned) == ABANDONED_LIMIT


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


# ── death and return ────────────────────────────────────────────────────────────────────────────


def test_the_forks_of_a_dead_user_are_kept_for_a_lease_and_then_reclaimed(
    a: Protocol, b: Protocol
) -> None:
    created(a, b)
    number = b.lost(a.me)
    assert not b.at_rest
    b.lease_over(number)
    assert b.at_rest


def lose_each_other(a: Protocol, b: Protocol) -> tuple[int, int]:
    return a.lost(b.me), b.lost(a.me)


def meet_again(a: Protocol, b: Protocol) -> None:
    """A new session begins on both sides."""
    for one, other in ((a, b), (b, a)):
        number = one.returned(other.me.incarnation)
        assert number is not None
        other.session_begun(one.me, number)


def test_references_of_a_lost_session_stay_lost_in_the_next_one(a: Protocol, b: Protocol) -> None:
    old, lent = created(a, b), arrived_held(a, b.depart(b.own("lent"), a.me), b)
    _, number = lose_each_other(a, b)
    meet_again(a, b)
    for held in (old, lent):
        for use in (lambda held=held: a.check(held), lambda held=held: a.depart(held, b.me)):
            with pytest.raises(OwnerLost, match="worker1"):
                use()
        with pytest.raises(RRefExpired):  # nor does the owner know it as theirs
            b.look_up(a.me, held.id, held.fork, held.known)
    new = created(a, b, "new")
    a.check(new)
    b.lease_over(number)
    assert [owned.value for owned in b.owner_table.records.values()] == ["new"]
    assert b.look_up(a.me, new.id, new.fork, new.known).value == "new"


def test_a_reference_of_a_lost_session_is_released_without_a_word(a: Protocol, b: Protocol) -> None:
    held, dropped = created(a, b), created(a, b)
    a.user_table.drop(dropped)  # is about to be told
    lose_each_other(a, b)
    meet_again(a, b)
    a.user_table.drop(held)
    assert held.use is Use.RELEASED
    assert [batch.releases for batch in a.user_table.take()] == [[dropped]]


def test_each_loss_has_a_lease_of_its_own(a: Protocol, b: Protocol) -> None:
    created(a, b, "first")
    _, first = lose_each_other(a, b)
    meet_again(a, b)
    created(a, b, "second")
    _, second = lose_each_other(a, b)
    b.lease_over(first)
    assert [owned.value for owned in b.owner_table.records.values()] == ["second"]
    b.lease_over(second)
    assert b.at_rest
    assert not b.owner_table._requests


def test_a_worker_that_shuts_down_waits_for_no_lease_of_any_loss(a: Protocol, b: Protocol) -> None:
    for _ in range(2):
        created(a, b)
        lose_each_other(a, b)
        meet_again(a, b)
    b.end_leases()
    assert b.at_rest


def test_a_user_that_returns_after_its_lease_is_told_that_it_expired(
    a: Protocol, b: Protocol
) -> None:
    held = created(a, b)
    a.lost(b.me)
    b.lease_over(b.lost(a.me))
    meet_again(a, b)
    with pytest.raises(RRefExpired):
        b.look_up(a.me, held.id, held.fork, held.known)
    fresh = created(a, b, "new")
    assert b.look_up(a.me, fresh.id, fresh.fork, fresh.known).value == "new"


def test_a_creation_that_went_down_with_its_session_is_awaited_by_nobody(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    """What its creator makes after the loss is waited for, also if a use overtakes it."""
    lost, late = a.create(b.me), a.create(b.me)
    child = arrived_held(c, a.depart(lost, c.me), a)
    tell_forks(c, b)
    awaited = b.look_up(c.me, child.id, child.fork, child.known)
    lose_each_other(a, b)
    fresh = a.create(b.me)  # before the two have met again
    early = b.look_up(a.me, fresh.id, fresh.fork, BY_CREATOR)
    meet_again(a, b)
    assert isinstance(awaited.error, RRefError)
    with pytest.raises(RRefExpired):
        b.look_up(a.me, late.id, late.fork, BY_CREATOR)
    b.owner_table.made(a.me.incarnation, fresh.id, fresh.fork, UNKNOWN_SITE, "value")
    assert early.value == "value"


def test_a_fork_that_came_while_its_owner_was_out_of_reach_is_asked_for(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    """It belongs to no lost session; another user, who has not lost the owner, passed it on."""
    held = created(a, b)
    c.lost(b.me)
    child = arrived_held(c, a.depart(held, c.me), a)
    c.returned(b.me.incarnation)
    tell_forks(c, b)
    assert child.use is Use.CONFIRMED


def test_a_child_that_was_about_to_be_confirmed_fails_with_the_session(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    c.lost(b.me)
    assert isinstance(child.error, OwnerLost)
    batches = c.user_table.take()
    assert [batch.accepts for batch in batches if batch.to == a.me] == [[child.fork]]


def test_what_a_dead_creator_made_is_not_awaited_when_it_returns(a: Protocol, b: Protocol) -> None:
    """The latest of several counts, whichever is looked at first; later ones may still come."""
    several = [created(a, b) for _ in range(3)]
    late = a.create(b.me)
    b.lease_over(b.lost(a.me))
    assert b.at_rest
    for held in several:
        with pytest.raises(RRefExpired):
            b.look_up(a.me, held.id, held.fork, BY_CREATOR)
    assert not b.look_up(a.me, late.id, late.fork, BY_CREATOR).ready


def test_a_creation_that_runs_goes_on_when_its_creator_dies(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    b.lease_over(b.lost(a.me))
    assert not b.owner_table.records[held.id].ready
    b.owner_table.settle(held.id, "value")
    assert b.at_rest


def test_a_creation_given_up_before_it_came_is_not_awaited(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    b.look_up(a.me, held.id, held.fork, BY_CREATOR)  # a fetch was faster
    b.released([(held.id, held.fork, True)])
    with pytest.raises(RRefReleased):
        b.look_up(a.me, held.id, held.fork, BY_CREATOR)


def test_a_creation_made_at_once_after_it_was_given_up_leaves_nothing(
    a: Protocol, b: Protocol
) -> None:
    held = a.create(b.me)
    b.released([(held.id, held.fork, True)])
    b.owner_table.made(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE, "value")
    assert b.at_rest


def test_a_creation_made_at_once_is_ready_also_for_who_asked_before(
    a: Protocol, b: Protocol
) -> None:
    early, other = a.create(b.me), a.create(b.me)
    awaited = b.look_up(a.me, early.id, early.fork, BY_CREATOR)
    for held in (early, other):
        b.owner_table.made(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE, "value")
        assert b.look_up(a.me, held.id, held.fork, BY_CONFIRMED).value == "value"
        assert b.look_up(a.me, held.id, held.fork, BY_CONFIRMED).ready
    assert awaited.ready


def test_a_creation_that_could_not_be_sent_is_forgotten(a: Protocol, b: Protocol) -> None:
    for make in (lambda: a.create(b.me), a.create_here):
        made = make()
        assert not a.at_rest
        a.discard_creation(made)
        assert a.at_rest


def test_a_fork_that_was_given_back_need_not_be_asked_about(a: Protocol, b: Protocol) -> None:
    owned = a.own("x")
    held = arrived_held(b, a.depart(owned, b.me), a)
    assert held.fork in a.audit
    a.released(iter([(owned.id, held.fork, False)]))
    assert held.fork not in a.audit


def test_nothing_is_left_of_those_whose_lease_is_over(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    created(a, b)
    arrived_held(a, b.depart(b.own("y"), a.me), b)
    b.requested(a.me, 1, 0, [])
    kept = c.new_id()
    b.released([(a.new_id(), a.new_id(), True), (c.new_id(), kept, True)])
    b.lease_over(b.lost(a.me))
    assert b.at_rest
    assert not b.owner_table._requests
    assert list(b.owner_table._abandoned) == [kept]  # of somebody else
    assert len(b.audit) == 0


def test_who_waits_for_the_creation_of_a_dead_creator_is_told(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = a.create(b.me)
    child = arrived_held(c, a.depart(held, c.me), a)
    tell_forks(c, b)
    b.lease_over(b.lost(a.me))
    owned = b.look_up(c.me, child.id, child.fork, child.known)
    assert isinstance(owned.error, RRefError)
    assert "worker0" in str(owned.error)


def test_a_child_that_dies_unconfirmed_frees_its_parent_after_the_lease(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    a.depart(held, c.me)
    a.user_table.drop(held)
    assert a.user_table.take() == []
    a.lease_over(a.lost(c.me))
    assert tell_releases(a, b) == 1


def test_a_reference_of_a_lost_owner_cannot_be_shared(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    a.lost(b.me)
    with pytest.raises(OwnerLost, match="worker1"):
        a.depart(held, b.me)


def test_a_restarted_owner_is_not_taken_for_the_old_one(a: Protocol, b: Protocol) -> None:
    held = created(a, b)
    data = a.depart(held, b.me)
    again = Protocol(party(1, start=1))
    assert again.me.name == b.me.name
    stale = arrived_held(again, data, a)  # not an owner: the value was on its predecessor
    assert stale.owner.incarnation == b.me.incarnation
    with pytest.raises(RRefExpired):
        again.look_up(a.me, held.id, held.fork, held.known)


# ── forks that were thrown away on arrival ──────────────────────────────────────────────────────


def test_a_fork_nobody_knows_is_given_up_after_two_questions(a: Protocol, b: Protocol) -> None:
    owned = a.own("x")
    a.depart(owned, b.me)  # the message is thrown away where it arrives
    assert a.audit.round() == []
    for at_rest in (False, True):
        ((holder, forks),) = a.audit.round()
        assert holder is b.me
        a.take_audit(forks, b.report_forks(forks), at_shutdown=False)
        assert a.at_rest is at_rest
    assert len(a.audit) == 0


def test_a_fork_that_is_known_is_not_asked_about_again(a: Protocol, b: Protocol) -> None:
    held = arrived_held(b, a.depart(a.own("x"), b.me), a)
    a.audit.round()
    ((_, forks),) = a.audit.round()
    assert forks == [held.fork]
    a.take_audit(forks, b.report_forks(forks), at_shutdown=False)
    assert len(a.audit) == 0
    assert not a._shared  # it will be given back
    assert not a.at_rest


def test_a_child_nobody_knows_frees_its_parent(a: Protocol, b: Protocol, c: Protocol) -> None:
    held = created(a, b)
    a.depart(held, c.me)
    a.user_table.drop(held)
    ((_, forks),) = a.audit.round(at_shutdown=True)
    a.take_audit(forks, c.report_forks(forks), at_shutdown=True)
    assert tell_releases(a, b) == 1


def test_a_child_that_is_being_confirmed_is_waited_for_and_a_confirmed_one_frees_its_parent(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(a, b)
    child = arrived_held(c, a.depart(held, c.me), a)
    asked = [child.fork]
    a.take_audit(asked, c.report_forks(asked), at_shutdown=True)
    assert held.children == 1
    tell_forks(c, b)  # and what it tells its parent is lost
    a.take_audit(asked, c.report_forks(asked), at_shutdown=True)
    assert held.children == 0
    assert len(a.audit) == 0


def test_an_answer_about_fewer_forks_than_were_asked_about_is_refused(
    a: Protocol, b: Protocol
) -> None:
    held = arrived_held(b, a.depart(a.own("x"), b.me), a)
    with pytest.raises(ValueError, match="shorter"):
        a.take_audit([held.fork], [], at_shutdown=False)
    assert held.fork in a.audit


def test_a_use_proves_that_a_fork_arrived(a: Protocol, b: Protocol) -> None:
    held = arrived_held(b, a.depart(a.own("x"), b.me), a)
    a.look_up(b.me, held.id, held.fork, held.known)
    assert len(a.audit) == 0


# ── shutting down ───────────────────────────────────────────────────────────────────────────────


def test_a_shutdown_does_not_wait_for_creations(a: Protocol, b: Protocol) -> None:
    held = a.create(b.me)
    b.owner_table.expect(a.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    a.user_table.force(held)
    tell_releases(a, b)
    assert a.at_rest
    b.owner_table.settle(held.id, 1)
    assert b.at_rest


def test_a_shutdown_does_not_wait_for_the_lease_of_the_dead(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    lost, there = created(a, b), created(c, b)
    b.lost(a.me)
    b.end_leases()
    assert lost.id not in b.owner_table.records
    assert there.id in b.owner_table.records


def test_a_leak_is_what_somebody_still_keeps(a: Protocol, b: Protocol) -> None:
    owned = a.own("x", ("app.py", 7))
    a.depart(owned, b.me)
    assert [leak.call_site for leak in a.owner_table.leaks()] == [("app.py", 7)]
