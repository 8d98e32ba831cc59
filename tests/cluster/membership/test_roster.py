"""The coordinator's decisions and a member's copy of them, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.cluster.membership.roster import (
    MARGIN,
    RANKS,
    Admit,
    Announce,
    Membership,
    Refuse,
    Roster,
    Update,
)


@dataclass(frozen=True)
class Peer:
    name: str
    rank: int
    incarnation: bytes


def peer(name: str, rank: int, life: int = 1) -> Peer:
    return Peer(name, rank, f"{name}{rank}.{life}".encode())


A, B, C = peer("a", 0), peer("b", 1), peer("c", 2)


def opened(*peers: Peer, world_size: int | None = None) -> Membership[Peer]:
    membership = Membership(peers[0], world_size)
    membership.start()
    for other in peers[1:]:
        membership.join(other, world_size)
    return membership


def refusals(actions: list) -> dict[str, str]:
    return {action.peer.name: action.why for action in actions if isinstance(action, Refuse)}


def test_an_open_cluster_admits_each_one_at_once_and_tells_the_others():
    membership = opened(A, B)
    assert membership.join(C, None) == [
        Announce(Update(3, joined=(C,)), to=(A, B)),
        Admit(C),
    ]
    assert membership.roster() == (3, (A, B, C))


def test_workers_that_are_held_are_admitted_by_one_announcement():
    membership = opened(A)
    assert not membership.held
    assert membership.join(B, None, hold=True) == []
    assert membership.join(C, None, hold=True) == []
    assert membership.join(C, None, hold=True) == []  # repeated
    assert membership.held
    assert membership.roster() == (1, (A,))
    assert membership.admit_held() == [
        Announce(Update(2, joined=(B, C)), to=(A,)),
        Admit(B),
        Admit(C),
    ]
    assert membership.admit_held() == []
    assert membership.roster() == (2, (A, B, C))


def test_a_worker_that_is_held_keeps_its_name_and_rank():
    membership = opened(A)
    membership.join(B, None, hold=True)
    assert "unique" in refusals(membership.join(peer("b", 5), None))["b"]
    assert "unique" in refusals(membership.join(peer("d", 1), None))["d"]
    assert membership.next_rank("e") == 6


def test_a_worker_that_is_lost_while_it_is_held_is_announced_to_nobody():
    membership = opened(A)
    membership.join(B, None, hold=True)
    membership.join(C, None, hold=True)
    assert membership.lost(B.incarnation, "gone") == []
    assert membership.admit_held() == [Announce(Update(2, joined=(C,)), to=(A,)), Admit(C)]


def test_a_join_that_is_not_held_takes_those_along_that_are():
    membership = opened(A)
    membership.join(B, None, hold=True)
    announce, *admitted = membership.join(C, None)
    assert announce == Announce(Update(2, joined=(B, C)), to=(A,))
    assert admitted == [Admit(B), Admit(C)]


def test_a_static_world_that_is_incomplete_holds_nobody():
    membership = opened(A, world_size=3)
    membership.join(B, 3, hold=True)
    assert not membership.held
    assert membership.admit_held() == []


def test_a_static_world_waits_until_all_are_there_and_then_admits_all():
    membership = opened(A, world_size=3)
    assert membership.join(C, 3) == []
    assert membership.missing() == [1]
    assert membership.roster() == (0, ())
    assert membership.join(B, 3) == [Admit(A), Admit(C), Admit(B)]
    assert membership.roster() == (1, (A, B, C))
    assert membership.missing() == []


def test_a_world_of_one_is_complete_at_once():
    membership = Membership(A, 1)
    assert membership.start() == [Admit(A)]


def test_a_duplicate_name_ends_the_start_of_everyone_who_waits():
    membership = opened(A, B, world_size=4)
    why = refusals(membership.join(peer("b", 2), 4))
    assert set(why) == {"a", "b"}
    assert "unique" in why["a"]
    assert "'b'" in why["a"]


def test_names_that_differ_only_in_case_are_duplicates():
    why = refusals(opened(A, B, world_size=3).join(peer("B", 2), 3))
    assert set(why) == {"a", "b", "B"}
    assert "'b'" in why["B"]
    assert "'B'" in why["B"]
    assert set(refusals(opened(A, B).join(peer("A", 2), None))) == {"A"}


def test_a_duplicate_rank_names_both_workers():
    why = refusals(opened(A, B, world_size=3).join(peer("c", 1), 3))
    assert set(why) == {"a", "b", "c"}
    assert "'b' and 'c'" in why["c"]


def test_a_duplicate_in_an_open_cluster_hurts_only_the_newcomer():
    membership = opened(A, B)
    assert set(refusals(membership.join(peer("b", 7), None))) == {"b"}
    assert set(refusals(membership.join(peer("d", 1), None))) == {"d"}
    assert membership.roster()[1] == (A, B)


def test_a_rank_outside_the_world_is_refused():
    assert "world of 2" in refusals(opened(A, world_size=2).join(peer("z", 2), 2))["z"]


@pytest.mark.parametrize(("size", "other"), [(3, None), (3, 4), (4, 3)])
def test_another_world_size_ends_the_start_of_everyone_who_waits(size, other):
    membership = opened(A, B, world_size=size)
    why = refusals(membership.join(C, other))
    assert set(why) == {"a", "b", "c"}
    assert f"'a' (rank 0) expects a static world of {size}" in why["b"]
    assert "'c' (rank 2) expects" in why["b"]
    assert "no world size" in why["b"] if other is None else f"of {other}" in why["b"]


def test_another_world_size_in_a_running_cluster_hurts_only_the_newcomer():
    for size, other in ((None, 3), (2, None), (2, 3)):
        membership = opened(A, B, world_size=size)
        assert set(refusals(membership.join(C, other))) == {"c"}
        assert membership.roster()[1] == (A, B)


MISTAKES = {
    "name": (peer("a", 1), 3),
    "case": (peer("A", 1), 3),
    "rank": (peer("b", 0), 3),
    "too high a rank": (peer("b", 3), 3),
    "world size": (peer("b", 1), 2),
    "no world size": (peer("b", 1), None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_refusal_stands_for_all_who_come_later(mistake):
    membership = opened(A, world_size=3)
    why = refusals(membership.join(*MISTAKES[mistake]))["a"]
    assert membership.to_come() == 1
    assert refusals(membership.join(C, 3)) == {"c": why}
    assert membership.to_come() == 0
    assert 0 in {each.rank for each in membership.refused.values()}
    assert refusals(membership.join(peer("d", 1), 3)) == {"d": why}  # never complete again
    assert membership.roster() == (0, ())


def test_a_refused_start_expects_as_many_as_the_largest_world_that_anybody_named():
    membership = opened(A, world_size=2)
    membership.join(B, 5)
    assert membership.to_come() == 3


def test_a_start_that_is_given_up_is_refused_to_those_who_wait_and_those_who_come():
    membership = opened(A, B, world_size=3)
    assert refusals(membership.give_up("too late")) == {"a": "too late", "b": "too late"}
    assert membership.to_come() == 0
    assert refusals(membership.join(C, 3)) == {"c": "too late"}


def test_a_repeated_join_changes_nothing():
    membership = opened(A, world_size=2)
    assert membership.join(A, 2) == []
    membership.join(B, 2)
    assert membership.join(B, 2) == [Admit(B)]
    assert membership.version == 1


def test_leaving_and_dying_are_told_apart():
    membership = opened(A, B, C)
    assert membership.leave(B.incarnation) == [Announce(Update(4, left=(B,)), to=(A, C))]
    assert membership.lost(C.incarnation, "eof") == [
        Announce(Update(5, lost=((C, "eof"),)), to=(A,))
    ]
    assert membership.lost(C.incarnation, "eof") == []


@pytest.mark.parametrize("world_size", [None, 2])
def test_a_worker_comes_back_under_its_name_once_the_old_one_is_gone(world_size):
    membership = opened(A, B, world_size=world_size)
    again = peer("b", 1, life=2)
    assert set(refusals(membership.join(again, world_size))) == {"b"}
    membership.lost(B.incarnation, "killed")
    assert membership.join(again, world_size)[-1] == Admit(again)
    assert membership.lost(B.incarnation, "late news of the old one") == []
    assert membership.roster()[1] == (A, again)


def test_a_complete_static_world_takes_nobody_else():
    membership = opened(A, B, world_size=2)
    assert "world of 2" in refusals(membership.join(C, 2))["c"]


def test_one_that_dies_while_waiting_makes_room_for_its_successor():
    membership = opened(A, B, world_size=3)
    assert membership.lost(B.incarnation, "eof") == []
    assert membership.join(peer("b", 1, life=2), 3) == []
    assert membership.missing() == [2]


def test_ranks_are_never_given_twice():
    membership = opened(A, peer("far", 7))
    assert membership.next_rank("x") == 8
    assert membership.next_rank("y") == 9
    assert membership.next_rank("x") == 8


@pytest.mark.parametrize(
    ("rank", "world_size"), [(1, 3), (2, 9), (2, None), (7, 3)], ids=["rank", "more", "open", "far"]
)
def test_a_mistake_of_a_partner_does_not_end_the_start_of_a_static_world(rank, world_size):
    membership = opened(A, B, world_size=3)
    assert list(refusals(membership.join(peer("clinic", rank), world_size, partner=True))) == [
        "clinic"
    ]
    assert membership.refusal is None
    assert len(membership.join(C, 3, partner=True)) == 3


def test_a_partner_that_chooses_the_last_rank_leaves_the_others():
    membership = opened(A)
    for rank in (RANKS - 1, RANKS - 2, 2):
        membership.join(peer("partner", rank), None, partner=True)
        membership.leave(peer("partner", rank).incarnation)
    membership.join(peer("partner", 2), None, partner=True)
    assert membership.next_rank("x") == 1
    assert membership.next_place() == ("worker3", 3)
    heir = Membership.inherit(B, 5, [B, peer("partner", RANKS - 1)], highest=3)
    assert heir.next_rank("y") == 3 + MARGIN + 1


def test_a_roster_that_missed_a_change_says_so():
    roster: Roster[Peer] = Roster()
    assert roster.apply(Update(1, joined=(A,))) == "known"  # its own roster is still to come
    assert roster.reset(2, [A, B]) == Update(2, joined=(A, B))
    assert roster.apply(Update(2, joined=(B,))) == "known"
    assert roster.apply(Update(4, left=(A,))) == "gap"
    assert roster.reset(4, [B, C]) == Update(4, joined=(C,), left=(A,))
    assert roster.reset(3, [A]) is None


NAMES = st.sampled_from("abcd")
EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "lost"]), NAMES, st.integers(1, 3)), max_size=40
)


@given(events=EVENTS, dropped=st.sets(st.integers(1, 30)))
def test_every_roster_follows_the_coordinator_even_when_news_get_lost(events, dropped):
    coordinator = peer("z", 99)
    membership: Membership[Peer] = Membership(coordinator, None)
    membership.start()
    rosters: dict[bytes, Roster[Peer]] = {}
    for number, (kind, name, life) in enumerate(events):
        worker = peer(name, ord(name), life)
        if kind == "join":
            actions = membership.join(worker, None)
        elif kind == "leave":
            actions = membership.leave(worker.incarnation)
        else:
            actions = membership.lost(worker.incarnation, "eof")
        for action in actions:
            if isinstance(action, Admit):
                roster = rosters.setdefault(action.peer.incarnation, Roster())
                roster.reset(*membership.roster())
            elif isinstance(action, Announce) and number not in dropped:
                for to in action.to:
                    if to.incarnation in rosters:
                        roster = rosters[to.incarnation]
                        if roster.apply(action.update) == "gap":
                            roster.reset(*membership.roster())
    membership.join(peer("e", 5), None)  # any later news lets everyone catch up
    for member in membership.members.values():
        if member.incarnation in rosters:
            roster = rosters[member.incarnation]
            if roster.apply(Update(membership.version, joined=(peer("e", 5),))) == "gap":
                roster.reset(*membership.roster())
            assert roster.members == membership.members
