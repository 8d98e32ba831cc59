"""An election, over the wire: one member's part in finding the successor of a lost coordinator.

`Succession` decides who may vote and who wins; this module asks and answers. The services are
listed in `member.py`. A candidate counts the votes as they come, so members that do not answer
delay nobody once it has enough:

    lost ─▶ wait for members of lower rank ─▶ campaign ─┬─ enough votes ─▶ `member.lead`
             ▲                                          └─ not enough ─┐
             └────────────────────── until `ELECTION` seconds are over ┘─▶ leave

The successor itself tells all members (`coordinator.py`), until they follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from aiograd.cluster.membership.forms import (
    check_electorate,
    check_losses,
    check_peer,
    check_roster,
)
from aiograd.cluster.membership.roster import Roster, term_of
from aiograd.cluster.membership.succession import BINDS, Succession
from aiograd.errors import NotAllowed, ProtocolError, RpcError, SecurityError
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo

__all__ = ["Election"]

_log = logging.getLogger("aiograd.cluster")

# Seconds for all of an election. API: joins work again within 10 s of the loss, and a loss may take
# a while to be noticed.
ELECTION: Final = 7.0
# Seconds for a successor that others follow already to tell us, too: it may be stopped.
KNOWN: Final = 20.0
# Seconds that a candidate waits for each member of a lower rank, unless it knows that to be gone.
# With three that are out of reach as well, it has still won within 10 s of a cut.
TURN: Final = 0.5
PRECEDENCE: Final = 1.5  # seconds that a candidate gives those who know a later coordinator
VOTE: Final = 1.5  # seconds for a member to confirm the loss, and to vote
CAMPAIGN: Final = 2 * VOTE  # seconds for which a candidate counts votes
TERMS: Final = 1024  # that others may be ahead of us
assert CAMPAIGN < BINDS, "a vote binds for longer than it is counted"


class Elector(Protocol):
    """What an election needs of its member."""

    agent: Agent
    elects: bool
    roster: Roster[PeerInfo]
    succession: Succession[PeerInfo]
    coordinator: PeerInfo | None
    changed: asyncio.Event

    @property
    def peers(self) -> list[PeerInfo]:
        """All members, in order of rank."""

    @property
    def others(self) -> list[PeerInfo]:
        """All members but this one."""

    def adopt(self, version: int, peers: Sequence[PeerInfo]) -> None:
        """Replace the roster by a newer one."""

    def lead(self, term: int, lost: PeerInfo, why: str) -> None:
        """Become the coordinator."""

    def follow(self, leader: PeerInfo) -> None:
        """Follow another coordinator from now on, also if this worker led before."""

    def acknowledges(self) -> bool:
        """Whether what the coordinator announces now may count as known here."""

    def abandon(self, why: str) -> None:
        """Leave the cluster, because there is no coordinator."""

    def accept(
        self, version: int, peers: Sequence[PeerInfo], lost: Sequence[tuple[PeerInfo, str]]
    ) -> None:
        """Replace the roster by that of a new coordinator."""


class Election:
    """Elections, as one member takes part in them."""

    def __init__(self, member: Elector) -> None:
        self._member = member
        self._agent = member.agent
        self._task: asyncio.Task[None] | None = None  # while the coordinator is lost
        self._campaigns_for = 0  # the term, while votes are counted
        self._heard = False  # others follow a successor, which has us as a member
        member.agent.services.update(
            {
                "cluster.term": self._on_term,
                "cluster.elect": self._on_elect,
                "cluster.succeed": self._on_succeed,
            }
        )

    @property
    def running(self) -> bool:
        """Whether this member looks for a successor."""
        return self._task is not None

    @property
    def campaigning(self) -> bool:
        """Whether this member counts votes for itself."""
        return bool(self._campaigns_for)

    def begin(self, lost: PeerInfo, why: str) -> None:
        """Look for a successor of the coordinator."""
        self._heard = False
        self._task = self._agent.spawn(self._elect(lost, why))

    def electors(self, lost: PeerInfo) -> list[PeerInfo]:
        """List the other members whose votes count here, and that may lead: those we trust.

        A coordinator decides who is a member and asks members to leave. A partner is not given
        that, nor believed what it says of votes and rosters; it leaves when its coordinator is
        lost. Partners still count as members: so two majorities share a member in any case.
        """
        return [
            peer
            for peer in self._member.others
            if peer.incarnation != lost.incarnation and not self._agent.restricts(peer)
        ]

    def _check_elector(self, sender: PeerInfo) -> None:
        if self._agent.restricts(sender):
            raise NotAllowed(f"{sender.name} takes no part in elections", self._agent.name)

    # ── as a candidate ──────────────────────────────────────────────────────────────────────────

    async def _elect(self, lost: PeerInfo, why: str) -> None:
        """Find a successor of the coordinator, or leave."""
        member, loop, succession = self._member, self._agent.loop, self._member.succession
        began = loop.time()
        deadline = began + ELECTION
        try:
            while loop.time() < deadline:
                gone = {lost.name, *self._agent.links.suspects()}
                turn = TURN * succession.position(self._agent.info, self.electors(lost), gone)
                # Who has no vote cannot be elected either; a successor may still know it.
                if self._agent.incarnation not in succession.electorate:
                    turn = ELECTION
                if await self._succeeded(lost, min(turn, deadline - loop.time())):
                    return
                if loop.time() < deadline and await self._campaign(lost, why):
                    return
                # By its rank, so that two whose campaigns got into each other's way do not again.
                pause = TURN / 4 + turn / 4
                # In every round: those who had heard of a successor may have left by now.
                deadline = began + ELECTION
                if self._heard:
                    # Not we, but those who follow that one can be elected if it was lost, too.
                    deadline, pause = began + KNOWN, pause + PRECEDENCE
                if await self._succeeded(lost, min(pause, deadline - loop.time())):
                    return
        finally:
            self._task = None
        member.abandon(f"{why}; no majority of {len(succession.electorate)} elects a successor")

    async def _succeeded(self, lost: PeerInfo, within: float) -> bool:
        """Wait for another coordinator than the lost one; False if none comes in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(within, 0.0)):
                while self._follows(lost):
                    await self._member.changed.wait()
        return not self._follows(lost)

    def _follows(self, peer: PeerInfo) -> bool:
        leader = self._member.coordinator
        return leader is not None and leader.incarnation == peer.incarnation

    async def _campaign(self, lost: PeerInfo, why: str) -> bool:
        """Ask the others for their votes; True when there is a coordinator."""
        member, succession = self._member, self._member.succession
        own, now = self._agent.incarnation, self._agent.loop.time()
        term, version = succession.next_term(), member.roster.version
        succession.vote(term, own, now)
        self._campaigns_for, self._heard = term, False
        asked = [
            self._agent.spawn(self._ask(peer, term, version, lost)) for peer in self.electors(lost)
        ]
        votes, newer = {own}, None
        try:
            while True:
                roster = [peer.incarnation for peer in member.peers]
                # The vote takes time, in which another one may have won. A process that was stopped
                # meanwhile counts no votes that do not bind any more.
                late = self._agent.loop.time() >= now + CAMPAIGN
                if not self._follows(lost):
                    return True
                if late or not succession.stands(term, own):
                    break
                if succession.wins(votes, roster):
                    member.lead(term, lost, why)
                    return True
                if not asked:
                    break
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                answers = [task.result() for task in asked if task.done()]
                asked = [task for task in asked if not task.done()]
                for peer, granted, theirs in answers:
                    if granted:
                        votes.add(peer.incarnation)
                    elif theirs is not None and (newer is None or theirs[0] > newer[1]):
                        newer = peer, *theirs
        finally:
            self._campaigns_for = 0
            for task in asked:
                task.cancel()
        self._learn(newer)
        return False

    async def _ask(
        self, peer: PeerInfo, term: int, version: int, lost: PeerInfo
    ) -> tuple[PeerInfo, bool, tuple[int, Any, Any] | None]:
        """Ask a member for its vote; gives its roster if that is newer than ours."""
        try:
            asked = "cluster.elect", term, version, lost
            answer = await self._agent.request(peer, *asked, timeout=CAMPAIGN)
        except Exception:  # lost, or too slow; whatever it raised there: none ends our election
            return peer, False, None
        if not (type(answer) is tuple and len(answer) == 5 and type(answer[1]) is int):
            return peer, False, None
        granted, theirs, peers, electorate, latest = answer
        # Bounded: there are not so many terms that a mistake may use them up.
        if type(latest) is int and latest <= term + TERMS:
            self._member.succession.heard_of(latest)
        return peer, granted is True, (theirs, peers, electorate) if theirs > version else None

    def _learn(self, newer: Any) -> None:
        """Take over a change that we have missed: with it we campaign again."""
        if newer is None:
            return
        peer, version, peers, electorate = newer
        check_roster(version, peers, "cluster.elect", peer)
        check_electorate(electorate, "cluster.elect", peer)
        known = self._agent.incarnation in [each.incarnation for each in peers]
        if self._member.coordinator is None or not known:
            return
        if term_of(version) != self._member.succession.term:
            # A roster of a later term comes from its coordinator, which tells us itself.
            self._heard = True
            return
        self._member.adopt(version, peers)
        self._member.succession.electorate = frozenset(electorate)

    # ── as a voter ──────────────────────────────────────────────────────────────────────────────

    async def _on_elect(
        self, sender: PeerInfo, term: int, version: int, lost: PeerInfo
    ) -> tuple[bool, int, tuple[PeerInfo, ...], tuple[bytes, ...], int]:
        self._check_elector(sender)
        check_peer(lost, "cluster.elect", sender)
        if type(term) is not int or type(version) is not int:
            raise ProtocolError("cluster.elect: malformed request", sender.name)
        leader = self._member.coordinator
        if leader is not None and self._may_vote(sender, term, version):
            bound = self._member.succession.bound_to(self._agent.loop.time())
            # Confirmed by ourselves: the candidate alone may have lost it. It need not be the one
            # that we follow: of a successor that was lost soon, not everybody has heard.
            doubts = {leader.incarnation: leader, lost.incarnation: lost}.values()
            asked = [self._leads(peer) for peer in doubts]
            refused = await asyncio.gather(*asked, self._stands(bound, sender))
            now = self._agent.loop.time()
            # All of it again: this took time.
            unchanged = self._follows(leader) and (bound == self._member.succession.bound_to(now))
            if unchanged and not any(refused) and self._may_vote(sender, term, version):
                self._member.succession.vote(term, sender.incarnation, now)
                return True, self._member.roster.version, (), (), term
        roster, latest = self._member.roster, self._member.succession.latest
        if roster.version <= version or not self._is_member(sender):
            return False, 0, (), (), latest
        electorate = tuple(sorted(self._member.succession.electorate))
        return False, roster.version, tuple(self._member.peers), electorate, latest

    def _is_member(self, peer: PeerInfo) -> bool:
        known = self._member.roster.members.get(peer.name)
        return known is not None and known.incarnation == peer.incarnation

    def _may_vote(self, sender: PeerInfo, term: int, version: int) -> bool:
        """Whether a candidate may have our vote, as far as we know without asking."""
        member = self._member
        return (
            member.elects
            and self._is_member(sender)
            and member.succession.may_vote(term, sender.incarnation, version, member.roster.version)
        )

    async def _leads(self, peer: PeerInfo) -> bool:
        """Whether a worker can be reached from here, and says that it is the coordinator."""
        if self.running and self._follows(peer):
            return False  # lost to us, too; so we answer at once, before it is our own turn
        answer = await self._state_of(peer)
        return answer is not None and answer[1] == peer.incarnation

    async def _stands(self, bound: bytes | None, sender: PeerInfo) -> bool:
        """Whether another candidate that has our vote has won, or may still win with it."""
        if bound is None or bound in (sender.incarnation, self._agent.incarnation):
            return False  # our own campaign ends with our vote for another one
        for peer in self._member.others:
            if peer.incarnation == bound:
                answer = await self._state_of(peer)
                return answer is not None and (answer[1] == bound or answer[2])
        return False

    async def _state_of(self, peer: PeerInfo) -> tuple[int, bytes, bool] | None:
        """Ask a member for its term, whom it follows, and whether it campaigns; None if lost."""
        try:
            answer = await self._agent.request(peer, "cluster.term", timeout=VOTE)
        except (RpcError, SecurityError):
            return None
        if not (type(answer) is tuple and len(answer) == 3 and type(answer[1]) is PeerInfo):
            return None
        return answer[0], answer[1].incarnation, answer[2] is True

    def _on_term(self, sender: PeerInfo) -> tuple[int, PeerInfo, bool]:
        leader = self._member.coordinator
        leads = self._agent.info if leader is None else leader
        return self._member.succession.term, leads, bool(self._campaigns_for)

    # ── as a follower ───────────────────────────────────────────────────────────────────────────

    async def _on_succeed(
        self,
        sender: PeerInfo,
        version: int,
        peers: Sequence[PeerInfo],
        lost: Sequence[tuple[PeerInfo, str]],
    ) -> bool:
        """Follow a successor; gives whether its roster counts as known here."""
        self._check_elector(sender)
        check_roster(version, peers, "cluster.succeed", sender)
        check_losses(lost, "cluster.succeed", sender)
        member, term = self._member, term_of(version)
        if not member.elects or not self._is_member(sender):
            raise NotAllowed(f"{sender.name} is not a member", self._agent.name)
        refused = NotAllowed(f"{sender.name} is not the coordinator", self._agent.name)
        if self._agent.incarnation not in [peer.incarnation for peer in peers]:
            raise refused  # it took us for lost
        leader, succession = member.coordinator, member.succession
        known = member.roster.members[sender.name]
        if not self._follows(sender):
            if term <= succession.term:
                raise refused
            # Who did not vote for it makes sure itself that there is a need: no member can take
            # over from a coordinator that is there. A coordinator of an earlier term has lost an
            # election that it has not heard of, and asks around before it believes that.
            voted = succession.voted(term, sender.incarnation)
            if leader is not None and not voted and await self._leads(leader):
                raise refused
            if term <= succession.term:  # this took time
                raise refused
            _log.info(
                "%s: %s is the coordinator now (term %d)", self._agent.name, sender.name, term
            )
            member.follow(known)
        member.accept(version, peers, lost)
        return member.acknowledges()
