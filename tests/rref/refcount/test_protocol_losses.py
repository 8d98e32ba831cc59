"""The reference protocol when sessions are lost, messages thrown away, and workers shut down."""

from __future__ import annotations

import pytest

from aiograd.errors import OwnerLost, RRefError, RRefExpired, RRefReleased
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    BY_CONFIRMED,
    BY_CREATOR,
    UNKNOWN_SITE,
    Use,
)
from tests.support.refcount import arrived_held, created, party, tell_forks, tell_releases

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
    assert b.owner_table._abandoned == {kept[1]: {kept: None}}  # of somebody else
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
