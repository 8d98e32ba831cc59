"""Planted bugs of a succession: the simulator must find each of them.

A comment above each replacement says what breaks, and which invariant shows it first.
"""

from __future__ import annotations

from typing import Any, Final

from aiograd.cluster.membership.coordinator import Coordinator
from aiograd.cluster.membership.election import Election
from aiograd.cluster.membership.succession import Electorate, Succession
from aiograd.testing.simulator.planted_bugs import Bug


# S1: a member votes for everybody who asks, in the same term.
def _vote_for_all(original: Any) -> Any:
    return lambda self, term, candidate, version, own: term > self.term and version >= own


def _vote_again(original: Any) -> Any:
    def vote(self: Succession[Any], term: int, candidate: bytes, now: float) -> None:
        self._votes.pop(term, None)
        original(self, term, candidate, now)

    return vote


def _own_term(original: Any) -> Any:
    return lambda self: self.term + 1


# S1, S4: two votes are enough.
def _few_votes(original: Any) -> Any:
    return lambda self, votes, roster: len(votes) > 1


# S1: a candidate takes the same term for every campaign.
def _first_term(original: Any) -> Any:
    return lambda self: 1


def _follow_any(original: Any) -> Any:
    def follow(self: Succession[Any], term: int) -> bool:
        """Follow, and forget that."""
        original(self, term)
        self.term = 0
        self._votes.clear()
        return True

    return follow


# S5: the new coordinator keeps the lost one in its roster.
def _all_heirs(original: Any) -> Any:
    return staticmethod(lambda members, lost: tuple(members))


def _tell_the_living(original: Any) -> Any:
    async def tell(self: Coordinator, peer: Any, lost: Any) -> None:
        """Do not tell the lost one either, which would show that it is gone."""
        if peer.incarnation != lost[0][0].incarnation:
            await original(self, peer, lost)

    return tell


# S1, S4: members that the coordinator takes for lost do not count any more, also if these are many.
def _shrink(original: Any) -> Any:
    def decide(self: Electorate[Any]) -> bool:
        """Let the last roster elect, also if few members have it."""
        if self.confirmed:
            return False
        self._members, self.confirmed = self._next, True
        return True

    return decide


# S1, S2: the dead count as if they had acknowledged, though they may have voted before.
def _dead_voters(original: Any) -> Any:
    def died(self: Electorate[Any], incarnation: bytes) -> bool:
        """Count a dead member as one that has the roster."""
        self._have.add(incarnation)
        return bool(original(self, incarnation))

    return died


def _nothing(original: Any) -> Any:
    return lambda self, *args, **kwargs: None


async def _soon(self: Any, *args: Any) -> None:
    """Do nothing, where a coroutine function is replaced."""


async def _never(self: Any, *args: Any) -> bool:
    """Say no, where a coroutine function is replaced."""
    return False


# S5, S7: members of the successor do not hear of it, unless they have an election of their own.
def _untold(original: Any) -> Any:
    return _soon


# S5: nobody notices the end of a member with which nobody exchanges anything.
def _unwatched(original: Any) -> Any:
    return lambda self: []


BUGS: Final[dict[str, Bug]] = {
    "vote_twice": Bug(
        "members vote for two candidates of a term",
        Succession,
        "may_vote",
        _vote_for_all,
        (
            (Succession, "vote", _vote_again),
            # Candidates that campaign one after the other would choose another term.
            (Succession, "next_term", _own_term),
            (Election, "_stands", lambda _: _never),
        ),
    ),
    "no_majority": Bug("two votes elect", Succession, "wins", _few_votes),
    "forget_term": Bug(
        "terms are forgotten",
        Succession,
        "next_term",
        _first_term,
        ((Succession, "follow", _follow_any),),
    ),
    "keep_roster": Bug(
        "the lost coordinator stays a member",
        Succession,
        "heirs",
        _all_heirs,
        ((Coordinator, "_tell_succession", _tell_the_living),),
    ),
    "shrinking": Bug("the smaller side counts only itself", Electorate, "_decide", _shrink),
    "dead_voters": Bug("the dead have never voted", Electorate, "died", _dead_voters),
    "old_ruler": Bug(
        "a coordinator that comes back goes on to rule", Coordinator, "_give_way", _nothing
    ),
    "untold": Bug("members do not hear who leads", Coordinator, "_tell_succession", _untold),
    "unwatched": Bug("quiet members end unnoticed", Coordinator, "_watched", _unwatched),
}
