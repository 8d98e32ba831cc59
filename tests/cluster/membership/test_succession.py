"""Who may be elected, and whose votes count: no two members win one term."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from aiograd.cluster.membership.roster import first_version, term_of
from aiograd.cluster.membership.succession import BINDS, Electorate, Succession


@dataclass(frozen=True)
class Peer:
    name: str
    rank: int

    @property
    def incarnation(self) -> bytes:
        return self.name.encode()


def peers(names: str) -> list[Peer]:
    return [Peer(name, rank) for rank, name in enumerate(names)]


def voter(electorate: str) -> Succession[Peer]:
    made: Succession[Peer] = Succession()
    made.electorate = frozenset(name.encode() for name in electorate)
    return made


def test_versions_of_a_later_term_are_higher_than_all_of_an_earlier_one():
    assert first_version(1) > (1 << 32) - 1
    assert first_version(2) > first_version(1) + 1000
    assert [term_of(first_version(term) + 5) for term in (0, 1, 7)] == [0, 1, 7]


@pytest.mark.parametrize(("members", "least"), [(2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_only_more_than_half_of_the_electorate_elects(members, least):
    names = "abcdef"[:members]
    roster = [peer.incarnation for peer in peers(names)]
    assert not voter(names).wins(roster[: least - 1], roster)
    assert voter(names).wins(roster[:least], roster)
    assert not Succession().wins(roster, roster)  # who has no electorate elects nobody


def test_a_candidate_needs_more_than_half_of_its_roster_too():
    roster = [peer.incarnation for peer in peers("abcdefg")]  # with newcomers d to g
    assert not voter("abc").wins([b"b", b"c"], roster)
    assert not voter("abc").wins([b"d", b"e", b"f", b"g"], roster)
    assert voter("abc").wins([b"b", b"c", b"d", b"e"], roster)


def test_a_member_grants_one_vote_per_term_and_none_to_an_older_roster():
    one = voter("abcd")
    assert one.may_vote(1, b"b", version=5, own_version=5)
    one.vote(1, b"b", now=0.0)
    assert one.may_vote(1, b"b", 5, 5)  # asked again, because the answer was lost
    assert not one.may_vote(1, b"c", 5, 5)
    assert one.may_vote(2, b"c", 5, 5)
    assert not one.may_vote(2, b"c", 4, 5)
    assert one.follow(2)
    assert not one.may_vote(2, b"d", 9, 5)
    assert not one.follow(1)
    assert one.next_term() == 3
    assert not Succession().may_vote(1, b"b", 5, 5)  # a newcomer has no vote


def test_a_vote_binds_while_it_may_count():
    one = voter("abc")
    assert one.bound_to(0.0) is None
    one.vote(1, b"b", now=10.0)
    assert one.bound_to(10.0 + BINDS - 0.1) == b"b"
    assert one.bound_to(10.0 + BINDS) is None
    one.vote(2, b"c", now=11.0)
    assert one.bound_to(12.0) == b"c"
    one.follow(2)
    assert one.bound_to(12.0) is None


def test_a_vote_for_a_later_candidate_ends_the_own_campaign():
    one = voter("abc")
    one.vote(1, b"own", now=0.0)
    assert one.stands(1, b"own")
    one.vote(2, b"b", now=0.1)
    assert not one.stands(1, b"own")


# ── the electorate ──────────────────────────────────────────────────────────────────────────────


def test_a_roster_elects_when_half_of_the_electorate_has_it():
    electorate = Electorate(b"a", peers("a"))
    assert electorate.announced(1, peers("ab"))  # alone it is half, and more
    assert electorate.announced(2, peers("abcd"))
    assert electorate.confirmed  # for a is half of a and b
    assert not electorate.announced(3, peers("abc"))
    assert not electorate.acknowledged(2, b"b")  # an answer to an earlier change
    assert electorate.acknowledged(3, b"b")
    assert not electorate.acknowledged(3, b"c")  # it elects already


def test_the_larger_side_of_a_partition_goes_on_to_count():
    electorate = Electorate(b"a", peers("abcde"))
    assert not electorate.announced(2, peers("abde"))
    assert not electorate.announced(3, peers("ab"))
    assert not electorate.acknowledged(3, b"b")
    assert [peer.name for peer in electorate.missing()] == ["c", "d", "e"]
    assert not electorate.announced(4, peers("abxyz"))
    for name in (b"x", b"y", b"z"):  # newcomers to the smaller side change nothing
        assert not electorate.acknowledged(4, name)
    assert not electorate.confirmed


def test_the_dead_may_have_voted_but_where_all_others_are_dead_nobody_was_elected():
    electorate = Electorate(b"a", peers("abcde"))
    electorate.announced(2, peers("ab"))
    electorate.acknowledged(2, b"b")
    assert not electorate.died(b"c")  # it may have made d the coordinator before
    assert not electorate.died(b"d")
    assert electorate.died(b"e")
    assert electorate.confirmed
    assert electorate.alone


# ── any order ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(200))
def test_no_two_members_win_one_term_whatever_is_lost_on_the_way(seed):
    chance = random.Random(seed)
    names = "abcdefg"[: chance.randint(2, 7)]
    roster = [name.encode() for name in names]
    voters = {name: voter(names) for name in names}
    winners: dict[int, set[str]] = {}
    for _ in range(30):
        candidate = chance.choice(names)
        own = voters[candidate]
        term = own.next_term()
        own.vote(term, candidate.encode(), 0.0)
        votes = {candidate.encode()}
        for name, other in voters.items():
            if name == candidate or chance.random() < 0.3:  # a lost request
                continue
            if other.may_vote(term, candidate.encode(), 1, 1):
                other.vote(term, candidate.encode(), 0.0)
                if chance.random() < 0.8:  # else the answer is lost
                    votes.add(name.encode())
        if own.wins(votes, roster):
            winners.setdefault(term, set()).add(candidate)
            for other in voters.values():
                if chance.random() < 0.7:  # else it does not hear of it yet
                    other.follow(term)
    assert all(len(found) == 1 for found in winners.values())
