"""Who becomes the coordinator when it is lost: one member's part of the election, without I/O.

Every coordinator has a *term*; the first one has term 0. Versions of rosters are numbered within a
term (`roster.first_version`), so no two coordinators ever announce the same version:

    coordinator is lost ─▶ the lowest live rank campaigns for term t + 1
                           others confirm the loss themselves and grant one vote per term
    votes of more than half of the electorate, the lost one included ─▶ it takes over
    else the next rank campaigns for a higher term, until the time is over ─▶ the member leaves

The *electorate* is the last roster that the coordinator knows at least half of the electorate
before to have (`Electorate`). It is not simply the current roster: the coordinator of the smaller
side of a partition takes the larger side for lost, and if those did not count any more, its few
members could elect a second successor after it.

At most one member takes over in a term, because any two candidates that win share a voter, and a
member grants one vote per term:

- With the same electorate, both have more than half of it.
- Else one of them has a later electorate. At least half of the earlier one had the roster of the
  later one by then, and more than half of the earlier one voted for the other candidate: one member
  did both. It had the roster first, since a member that has voted acknowledges nothing while its
  vote counts (`BINDS`). It votes only for rosters that are not older than its own, so the other
  candidate has that roster, too; and a candidate needs more than half of its roster as well.

A member that has voted for one candidate votes for another one, in a later term, only if the first
one does not answer or has given up. So a successor that has won, and whose news is on its way, is
not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from aiograd.cluster.membership.roster import Peer

__all__ = ["BINDS", "Electorate", "Succession"]

P = TypeVar("P", bound=Peer)
BINDS: Final = 5.0  # seconds for which a vote binds: a candidate counts votes for a shorter time


class Succession(Generic[P]):
    """The terms and votes of one member."""

    def __init__(self) -> None:
        self.term: int = 0  # of the coordinator that this member follows
        # Incarnations of those whose votes count. Empty: this member is new, and has no vote yet.
        self.electorate: frozenset[bytes] = frozenset()
        self._votes: dict[int, bytes] = {}  # by term: the incarnation that has our vote
        self._voted_at = -math.inf  # seconds, when the last of them was given
        self.latest: int = 0  # term that we have heard of, of any coordinator or candidate

    def follow(self, term: int) -> bool:
        """Follow the coordinator of a term; False if it is not later than the one we follow."""
        if term <= self.term:
            return False
        self.term = term
        self.heard_of(term)
        self._votes = {each: vote for each, vote in self._votes.items() if each > term}
        return True

    def may_vote(self, term: int, candidate: bytes, version: int, own_version: int) -> bool:
        """Whether a candidate may get our vote of a term, given the versions of both rosters."""
        if not self.electorate or term <= self.term or version < own_version:
            return False
        return self._votes.get(term, candidate) == candidate

    def vote(self, term: int, candidate: bytes, now: float) -> None:
        """Give our vote of a term away."""
        assert self._votes.get(term, candidate) == candidate
        self._votes[term] = candidate
        self._voted_at = now
        self.heard_of(term)

    def heard_of(self, term: int) -> None:
        """Note a term that others have used: a campaign for an earlier one would be in vain."""
        self.latest = max(self.latest, term)

    def voted(self, term: int, candidate: bytes) -> bool:
        """Whether a candidate has our vote of a term."""
        return self._votes.get(term) == candidate

    def bound_to(self, now: float) -> bytes | None:
        """Return the candidate that our last vote may still make the coordinator."""
        if not self._votes or now >= self._voted_at + BINDS:
            return None
        return self._votes[max(self._votes)]

    def stands(self, term: int, own: bytes) -> bool:
        """Whether our own campaign counts: not after a vote for another one in a later term."""
        return self.voted(term, own) and term == max(self._votes)

    def next_term(self) -> int:
        """Return a term in which our vote is still ours."""
        return self.latest + 1

    def wins(self, votes: Collection[bytes], roster: Collection[bytes]) -> bool:
        """Whether these are more than half of the electorate, and of our roster."""
        return bool(self.electorate) and all(
            2 * len(frozenset(votes).intersection(group)) > len(group)
            for group in (self.electorate, roster)
        )

    @staticmethod
    def position(own: P, members: Iterable[P], gone: Collection[str]) -> int:
        """Return how many live members come before us; `gone` are names of those that do not."""
        return sum(peer.rank < own.rank and peer.name not in gone for peer in members)

    @staticmethod
    def heirs(members: Sequence[P], lost: bytes) -> tuple[P, ...]:
        """Return the members without the lost coordinator."""
        return tuple(peer for peer in members if peer.incarnation != lost)


class Electorate(Generic[P]):
    """The coordinator's side: which of its rosters is known to so many that it elects.

        announced(version, members) ─▶ acknowledged(version, member) … ─▶ confirmed

    Half of the electorate is enough, the coordinator included: a successor needs more than half, so
    one of its voters knows that roster. Those that are known to be dead do not count as half of it:
    they may have voted before they died. But where all others have acknowledged, nobody is left who
    could have been elected.
    """

    def __init__(self, own: bytes, members: Iterable[P]) -> None:
        self._own = own
        self._members: Mapping[bytes, P] = {peer.incarnation: peer for peer in members}
        self._next: Mapping[bytes, P] = self._members
        self._version = 0  # of `_next`
        self._have: set[bytes] = set()  # those that have acknowledged it
        self._dead: set[bytes] = set()
        self.confirmed: bool = True
        # By the deaths of all others: these may have had a coordinator of a later term.
        self.alone: bool = False

    def announced(self, version: int, members: Iterable[P]) -> bool:
        """Take the roster that is announced now; True if it elects at once."""
        self._version, self.confirmed = version, False
        self._next = {peer.incarnation: peer for peer in members}
        self._have = {self._own}
        return self._decide()

    def acknowledged(self, version: int, incarnation: bytes) -> bool:
        """Note that a member has a roster; True if the last one elects from now on."""
        if version != self._version:
            return False
        self._have.add(incarnation)
        return self._decide()

    def died(self, incarnation: bytes) -> bool:
        """Note that one is dead for certain, not out of reach; True if the last roster elects."""
        self._dead.add(incarnation)
        return self._decide()

    def missing(self) -> list[P]:
        """List those that might elect another coordinator: not in the last roster, not dead."""
        return [
            peer
            for incarnation, peer in self._members.items()
            if incarnation not in self._next and incarnation not in self._dead
        ]

    def _decide(self) -> bool:
        if self.confirmed:
            return False
        known = 2 * len(self._have & self._members.keys()) >= len(self._members)
        self.alone = not known and self._members.keys() <= self._have | self._dead
        if not known and not self.alone:
            return False
        self._members, self.confirmed = self._next, True
        self._dead.clear()
        return True
