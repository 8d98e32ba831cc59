"""Who becomes the coordinator when it is lost: one member's part of the election, without I/O.

Every coordinator has a *term*; the first one has term 0. Versions of rosters are numbered within a
term (`first_version`), so no two coordinators ever announce the same version:

    coordinator is lost ─▶ the lowest live rank campaigns for term t + 1
                           others confirm the loss themselves and grant one vote per term
    votes of more than half of the last roster, the lost one included ─▶ it takes over
    else the next rank campaigns for a higher term, until the time is over ─▶ the member leaves

At most one member can take over in a term: two majorities of one roster share a member, and a
member grants one vote per term. Rosters of two members differ by what was in flight; a member
grants no vote to a candidate whose roster is older than its own, but sends its own, with which the
candidate campaigns again. So the successor knows every change that a majority has seen. The
minority of a partition never has the votes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Generic, TypeVar

from aiograd.cluster.membership.roster import Peer

__all__ = ["Succession", "first_version", "term_of"]

P = TypeVar("P", bound=Peer)
_TERM: Final = 32  # bits of a version that count changes within a term


def first_version(term: int) -> int:
    """Return the version of the first roster of a term; all of earlier terms are lower."""
    return (term << _TERM) + 1


def term_of(version: int) -> int:
    """Return the term of the coordinator that announced a version."""
    return version >> _TERM


class Succession(Generic[P]):
    """The terms and votes of one member."""

    def __init__(self) -> None:
        self.term: int = 0  # of the coordinator that this member follows
        self._votes: dict[int, bytes] = {}  # by term: the incarnation that has our vote

    def follow(self, term: int) -> bool:
        """Follow the coordinator of a term; False if it is not later than the one we follow."""
        if term <= self.term:
            return False
        self.term = term
        self._votes = {each: vote for each, vote in self._votes.items() if each > term}
        return True

    def may_vote(self, term: int, candidate: bytes, version: int, own_version: int) -> bool:
        """Whether a candidate may get our vote of a term, given the versions of both rosters."""
        if term <= self.term or version < own_version:
            return False
        return self._votes.get(term, candidate) == candidate

    def vote(self, term: int, candidate: bytes) -> None:
        """Give our vote of a term away."""
        assert self._votes.get(term, candidate) == candidate
        self._votes[term] = candidate

    def voted(self, term: int, candidate: bytes) -> bool:
        """Whether a candidate has our vote of a term."""
        return self._votes.get(term) == candidate

    def next_term(self) -> int:
        """Return a term in which our vote is still ours."""
        return max((self.term, *self._votes)) + 1

    @staticmethod
    def wins(votes: int, members: int) -> bool:
        """Whether these are the votes of more than half of a roster, the lost one included."""
        return 2 * votes > members

    @staticmethod
    def position(own: P, members: Iterable[P], gone: Collection[str]) -> int:
        """Return how many live members come before us; `gone` are names of those that do not."""
        return sum(peer.rank < own.rank and peer.name not in gone for peer in members)

    @staticmethod
    def heirs(members: Sequence[P], lost: bytes) -> tuple[P, ...]:
        """Return the members without the lost coordinator."""
        return tuple(peer for peer in members if peer.incarnation != lost)
