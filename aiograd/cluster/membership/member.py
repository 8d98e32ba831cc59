"""A worker as a member of its cluster: its copy of the roster, and what follows from a change.

Every worker has a `Member`. One worker, the coordinator, also has a `Coordinator`, which decides
about the membership; `coordinator.py` has the other end of these services:

    service              from → to               carries                       reply
    cluster.coordinator  newcomer → member       –                             the coordinator
    cluster.place        newcomer → coordinator  whether it has a name, key    name and new rank
    cluster.join         newcomer → coordinator  own address, world size,      RpcError if refused;
                                                 versions                      else after `welcome`
    cluster.welcome      coordinator → newcomer  roster, what a successor      when applied
                                                 has to know
    cluster.change       coordinator → member    an update of the roster       when applied
    cluster.roster       member → coordinator    – (an update was missed)      roster
    cluster.leave        member → coordinator    –                             when announced
    cluster.dismiss      coordinator → member    leave alone or together       –
    cluster.report       member → coordinator    counts of calls               is it the last round
    cluster.elect        candidate → member      term, version, who is lost    vote, own roster
    cluster.succeed      successor → member      term, roster, who was lost    when applied

Barriers and gathers are in `collectives.py`. In an open cluster the loss of the coordinator begins
an election (`succession.py` decides); where nobody can be elected, the member leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from aiograd.cluster.joining.invitation import own_versions
from aiograd.cluster.membership.collectives import Collectives
from aiograd.cluster.membership.roster import RANKS, Roster, Update
from aiograd.cluster.membership.succession import Succession, first_version, term_of
from aiograd.errors import (
    NotAllowed,
    ProtocolError,
    RpcError,
    SecurityError,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import LOST_PEERS, PeerInfo
from aiograd.rpc.extension import RecordTraveller
from aiograd.wire.names import is_name

__all__ = ["CONFIRM_TIMEOUT", "Dismissal", "Member", "check_peer"]

_log = logging.getLogger("aiograd.cluster")

# Seconds for a member to confirm a change. One that is slower does not hold up the others: it sees
# the gap in the versions later, and asks for the roster.
CONFIRM_TIMEOUT: Final = 1.0

# Seconds for all of an election. API: joins work again within 10 s of the loss, and a loss may take
# a while to be noticed.
ELECTION: Final = 7.0
TURN: Final = 1.0  # seconds that a candidate waits for each live member of a lower rank
VOTE: Final = 1.5  # seconds for a member to confirm the loss, and to vote

COORDINATOR_SERVICES: Final = (
    "cluster.place",
    "cluster.join",
    "cluster.roster",
    "cluster.leave",
    "cluster.report",
)


Lose = Callable[[PeerInfo, str], None]
TakeOver = Callable[[int, Sequence[PeerInfo]], Lose]


class Dismissal(NamedTuple):
    """Why a worker leaves: the coordinator asks for it, or is lost."""

    graceful: bool  # asked for
    timeout: float | None  # seconds for leaving gracefully; None: `Options.grace`
    why: str


class Member:
    """The cluster as one worker sees it."""

    def __init__(
        self, agent: Agent, world_size: int | None, coordinator: PeerInfo | None = None
    ) -> None:
        self.agent = agent
        self.world_size = world_size  # None: an open cluster
        self.coordinator = coordinator  # None: this worker
        self.roster: Roster[PeerInfo] = Roster()
        # Ends when the coordinator asks this worker to leave, or is lost.
        self.dismissed: asyncio.Future[Dismissal] = agent.loop.create_future()
        self.changed: asyncio.Event = (
            asyncio.Event()
        )  # set, and replaced, whenever the roster changes
        self.collectives: Collectives = Collectives(agent, lambda: self.peers)
        self.joined: list[Callable[[PeerInfo], None]] = []  # called for every new member
        # Called for every member that left, with None, or was lost, with the reason.
        self.departed: list[Callable[[PeerInfo, str | None], None]] = []
        # The latest with the reason, still in the directory.
        self._lost_peers: deque[tuple[PeerInfo, str]] = deque()
        self._together = world_size is not None or coordinator is None  # see `leaves_together`
        self.succession: Succession[PeerInfo] = Succession()
        self.elects = False  # the coordinator said so: open, and not led by a driver
        self.highest_rank = agent.rank  # ever given out, as far as this member knows
        self._election: asyncio.Task[None] | None = None
        # Makes this worker the coordinator of a term, with these members; gives the function that
        # declares one lost. `Worker` sets it.
        self.take_over: TakeOver | None = None
        agent.services.update(
            {
                # Refused by name, instead of as unknown: a worker may be given the address of an
                # ordinary member as its rendezvous. A `Coordinator` replaces these.
                **dict.fromkeys(COORDINATOR_SERVICES, self._not_coordinator),
                "cluster.coordinator": self._on_coordinator,
                "cluster.welcome": self._on_welcome,
                "cluster.change": self._on_change,
                "cluster.dismiss": self._on_dismiss,
                "cluster.elect": self._on_elect,
                "cluster.succeed": self._on_succeed,
            }
        )
        # Members that exchange plain data only have to read updates as well.
        agent.plain_travellers.add(Update, RecordTraveller("update", Update))
        if coordinator is not None:  # else the `Coordinator` decides first, and then calls `lose`
            agent.lost.append(self._on_lost)
            agent.watched.append(lambda: (self._coordinator().incarnation,))
        agent.returned.append(self.collectives.returned)

    @property
    def peers(self) -> list[PeerInfo]:
        """List all members, this one included, in order of rank."""
        return sorted(self.roster.members.values(), key=lambda peer: peer.rank)

    @property
    def others(self) -> list[PeerInfo]:
        """List all members but this one, in order of rank."""
        own = self.agent.incarnation
        return [peer for peer in self.peers if peer.incarnation != own]

    @property
    def leader(self) -> PeerInfo:
        """The coordinator, which may be this worker."""
        return self.agent.info if self.coordinator is None else self.coordinator

    @property
    def lost_peers(self) -> list[tuple[PeerInfo, str]]:
        """List the latest workers that were lost, and why; not those that came back."""
        latest = {peer.name: (peer, why) for peer, why in self._lost_peers}
        # Not by the roster: one that came back and then left in order is not in it, nor lost.
        known = self.agent.directory.members
        return [
            (peer, why)
            for name, (peer, why) in latest.items()
            if name in known and known[name].incarnation == peer.incarnation
        ]

    def gathers(self) -> list[tuple[list[str], list[str]]]:
        """List the gathers that wait here for members: their group, and who has come."""
        return self.collectives.waiting()

    @property
    def leaves_together(self) -> bool:
        """Tell whether all members leave at once: not if one member leaves an open cluster."""
        return self._together

    # ── joining and leaving ─────────────────────────────────────────────────────────────────────

    async def join(self, timeout: float) -> None:
        """Ask the coordinator to be admitted; RpcError if refused, or if the world is incomplete.

        Returns when this worker knows all members and all members know it.
        """
        # The coordinator has the same timeout and knows which ranks are missing. Its answer is
        # more useful than our DeadlineExceeded, so it gets a head start.
        await self.agent.request(
            self._coordinator(),
            "cluster.join",
            self.agent.info,
            self.world_size,
            tuple(f"{package} {version}" for package, version in own_versions().items()),
            timeout=timeout + CONFIRM_TIMEOUT,
        )

    async def report(self, outstanding: int, started: int) -> bool:
        """Report the counts of calls for this round; True if no call is under way anywhere."""
        # No timeout: the round ends when the slowest member reports, and `close` has its own grace.
        last_round = self.agent.request(
            self._coordinator(), "cluster.report", outstanding, started, timeout=math.inf
        )
        return bool(await last_round)

    async def leave(self) -> None:
        """Tell the coordinator that this worker leaves; without effect if it cannot be reached."""
        with contextlib.suppress(RpcError):
            await self.agent.request(self._coordinator(), "cluster.leave", timeout=CONFIRM_TIMEOUT)

    def close(self) -> None:
        """End every barrier and gather that still waits here."""
        error = WorkerClosed(f"{self.agent.name} was shut down", self.agent.name)
        self.collectives.close(error)

    async def wait_gone(self, name: str) -> None:
        """Wait until no worker of this name is a member."""
        while name in self.roster.members:
            await self.changed.wait()

    async def wait_alone(self) -> None:
        """Wait until all other members have left."""
        while self.others:
            await self.changed.wait()

    def _on_dismiss(self, sender: PeerInfo, together: bool, timeout: float | None) -> None:
        self._check_coordinator(sender)
        seconds = timeout is None or (type(timeout) in (int, float) and timeout >= 0)
        if type(together) is not bool or not seconds:
            raise ProtocolError("cluster.dismiss: malformed request", sender.name)
        # A dismissal may come twice: `scale` ends one worker while `close` ends all.
        self._together = together
        if not self.dismissed.done():
            why = "the cluster is closed" if together else f"{sender.name} asked it to leave"
            self.dismissed.set_result(Dismissal(True, timeout, why))

    # ── changes of the roster ───────────────────────────────────────────────────────────────────

    def adopt(
        self,
        version: int,
        peers: Iterable[PeerInfo],
        lost: Sequence[tuple[PeerInfo, str]] = (),
    ) -> None:
        """Replace the roster by a newer one; `lost` says which of the missing ones were lost."""
        first = self.roster.version == 0
        change = self.roster.reset(version, peers)
        if change is None:
            return
        self.succession.follow(term_of(version))
        if first:
            leader = self.coordinator.name if self.coordinator is not None else "this worker"
            _log.info(
                "%s joined as rank %d; %d members, coordinator: %s",
                self.agent.name,
                self.agent.rank,
                len(self.roster.members),
                leader,
            )
        gone = {peer.incarnation for peer, _ in lost}
        left = tuple(peer for peer in change.left if peer.incarnation not in gone)
        self._follow(Update(version, change.joined, left, tuple(lost)), log_joins=not first)

    def lose(self, peer: PeerInfo, error: Exception) -> None:
        """Fail the collectives that cannot complete without a worker that cannot be reached."""
        self.collectives.gone(peer, error)

    def notify(self) -> None:
        """Wake everything that waits for `changed`."""
        # A new event each time: waiters wake once per change and look again.
        self.changed.set()
        self.changed = asyncio.Event()

    def _on_welcome(
        self, sender: PeerInfo, version: int, peers: Sequence[PeerInfo], elects: bool, highest: int
    ) -> None:
        self._check_coordinator(sender)
        _check_roster(version, peers, "cluster.welcome", sender)
        if type(elects) is not bool or type(highest) is not int:
            raise ProtocolError("cluster.welcome: malformed terms", sender.name)
        self.elects = elects
        self.highest_rank = max(self.highest_rank, highest)
        self.adopt(version, peers)

    def _on_change(self, sender: PeerInfo, update: Update[PeerInfo]) -> Any:
        self._check_coordinator(sender)
        _check_update(update, sender)
        match self.roster.apply(update):
            case "applied":
                self._follow(update)
            case "gap":
                return self._catch_up()
        return None

    async def _catch_up(self) -> None:
        coordinator = self._coordinator()
        answer = await self.agent.request(coordinator, "cluster.roster", timeout=math.inf)
        if not (type(answer) is tuple and len(answer) == 2):
            raise ProtocolError("cluster.roster: malformed answer", coordinator.name)
        _check_roster(*answer, "cluster.roster", coordinator)
        self.adopt(*answer)

    def _follow(self, update: Update[PeerInfo], log_joins: bool = True) -> None:
        """Apply a change of the roster to the directory, the links and the collectives."""
        directory = self.agent.directory
        for peer in update.left:
            _log.info("%s: %s left", self.agent.name, _label(peer))
            self._forget(peer)
            self.lose(peer, WorkerLost(peer.name, "no", "it left the cluster"))
            self._depart(peer, None)
        for peer, why in update.lost:
            # One warning per cluster, from the coordinator: workers often share a terminal.
            level = logging.WARNING if self.coordinator is None else logging.INFO
            _log.log(level, "%s: lost %s: %s", self.agent.name, _label(peer), why)
            # It stays in the directory: calling it raises WorkerLost, not UnknownWorker.
            self.agent.links.declare_lost(peer, why)
            self._lost_peers.append((peer, why))
            self.lose(peer, WorkerLost(peer.name, "unknown", why))
            self._depart(peer, why)
        for peer in update.joined:
            if log_joins:
                _log.info("%s: %s joined", self.agent.name, _label(peer))
            directory.add(peer)
            if not self.agent.restricts(peer):  # a partner may choose any rank
                self.highest_rank = max(self.highest_rank, peer.rank)
            for joined in self.joined:
                joined(peer)
        # A cluster that runs for long must not remember every worker it has lost.
        while len(self._lost_peers) > LOST_PEERS:
            self._forget(self._lost_peers.popleft()[0])
        self.notify()

    def _depart(self, peer: PeerInfo, why: str | None) -> None:
        for departed in self.departed:
            departed(peer, why)

    def _forget(self, peer: PeerInfo) -> None:
        """Remove a worker from the directory, unless a later start of it has the name by now."""
        known = self.agent.directory.get(peer.name)
        if known is not None and known.incarnation == peer.incarnation:
            self.agent.directory.remove(peer.name)

    def _on_lost(self, peer: PeerInfo, error: Exception) -> None:
        if isinstance(error, SecurityError):
            return  # alive, and in contact with others; it shares no secret, or no mode, with us
        leader = self.coordinator
        if leader is not None and peer.incarnation == leader.incarnation:
            self._lost_coordinator(leader, error)
        self.lose(peer, error)

    def _lost_coordinator(self, leader: PeerInfo, error: Exception) -> None:
        if self.dismissed.done() or self._election is not None:
            return
        # Not a warning: when a driver closes without grace, each of its workers passes here.
        _log.info("%s: lost the coordinator %s: %s", self.agent.name, _label(leader), error)
        why = f"lost the coordinator {_label(leader)}: {getattr(error, 'why', '') or error}"
        # Two members cannot tell a loss from a cut between them.
        if (
            self.elects
            and len(self.roster.members) > 2
            and self.take_over is not None
            and self._electors(leader)
        ):
            self._election = self.agent.spawn(self._elect(leader, why))
        else:
            self.dismissed.set_result(Dismissal(False, None, why))

    # ── a new coordinator ───────────────────────────────────────────────────────────────────────

    def _electors(self, lost: PeerInfo) -> list[PeerInfo]:
        """List the other members whose votes count here, and that may lead: those we trust.

        A coordinator decides who is a member and asks members to leave. A partner is not given
        that, nor believed what it says of votes and rosters; it leaves when its coordinator is
        lost. Partners still count as members: so two majorities share a member, whoever counts.
        """
        return [
            peer
            for peer in self.others
            if peer.incarnation != lost.incarnation and not self.agent.restricts(peer)
        ]

    async def _elect(self, lost: PeerInfo, why: str) -> None:
        """Find a successor of the coordinator, or leave."""
        loop = self.agent.loop
        deadline = loop.time() + ELECTION
        try:
            while loop.time() < deadline:
                gone = {lost.name, *self.agent.links.suspects()}
                turn = TURN * self.succession.position(self.agent.info, self._electors(lost), gone)
                if await self._succeeded(lost, min(turn, deadline - loop.time())):
                    return
                if loop.time() < deadline and await self._campaign(lost, why):
                    return
                if await self._succeeded(lost, TURN / 2):
                    return
        finally:
            self._election = None
        if not self.dismissed.done():
            reason = f"{why}; no majority of {len(self.roster.members)} members elects a successor"
            self.dismissed.set_result(Dismissal(False, None, reason))

    async def _succeeded(self, lost: PeerInfo, within: float) -> bool:
        """Wait for another coordinator than the lost one; False if none comes in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(within, 0.0)):
                while self.coordinator is not None and (
                    self.coordinator.incarnation == lost.incarnation
                ):
                    await self.changed.wait()
        return self.coordinator is None or self.coordinator.incarnation != lost.incarnation

    async def _campaign(self, lost: PeerInfo, why: str) -> bool:
        """Ask the others for their votes, and take over with those of a majority."""
        roster, term = self.roster, self.succession.next_term()
        self.succession.vote(term, self.agent.incarnation)
        version, members = roster.version, len(roster.members)
        asked = [
            self._ask(peer, VOTE * 2, "cluster.elect", term, version, lost)
            for peer in self._electors(lost)
        ]
        votes, newer = 1, None
        for answer in await asyncio.gather(*asked):
            if not (type(answer) is tuple and len(answer) == 3):
                continue  # lost, too slow, or not one of ours
            granted, theirs, peers = answer
            votes += granted is True
            if type(theirs) is int and theirs > roster.version:
                newer = theirs, peers
        if newer is not None and self.coordinator is not None:
            # A change that we have missed: with it we campaign again.
            _check_roster(*newer, "cluster.elect", self.coordinator)
            self.adopt(*newer)
            return False
        # The vote took time: meanwhile another one may have won a later term.
        current = self.coordinator is not None and self.coordinator.incarnation == lost.incarnation
        if not current or not self.succession.wins(votes, members):
            return not current
        assert self.take_over is not None
        self.succession.follow(term)
        heirs = self.succession.heirs(self.peers, lost.incarnation)
        _log.warning(
            "%s takes over as the coordinator of %d members (term %d, %d of %d votes): %s",
            *(self.agent.name, len(heirs), term, votes, members, why),
        )
        self.coordinator, self._together = None, True
        self.agent.lost.remove(self._on_lost)
        self.adopt(first_version(term), heirs, lost=((lost, why),))
        lose = self.take_over(term, heirs)
        told = self.others
        news = "cluster.succeed", term, first_version(term), heirs, (lost, why)
        asked = [self._ask(peer, CONFIRM_TIMEOUT, *news) for peer in told]
        for peer, answer in zip(told, await asyncio.gather(*asked), strict=True):
            # It may have been lost before we led; nobody else declares it lost now.
            if isinstance(answer, WorkerLost):
                lose(peer, answer.why)
            elif isinstance(answer, SecurityError):  # a partner: it leaves
                lose(peer, "it follows no successor of its coordinator")
        return True

    async def _ask(self, peer: PeerInfo, timeout: float, service: str, *arguments: Any) -> Any:
        """Return the answer of a member, or the error."""
        try:
            return await self.agent.request(peer, service, *arguments, timeout=timeout)
        except Exception as error:  # whatever it raised there: no member ends our election
            return error

    async def _on_elect(
        self, sender: PeerInfo, term: int, version: int, lost: PeerInfo
    ) -> tuple[bool, int, tuple[PeerInfo, ...]]:
        self._check_elector(sender)
        check_peer(lost, "cluster.elect", sender)
        if type(term) is not int or type(version) is not int:
            raise ProtocolError("cluster.elect: malformed request", sender.name)
        no = False, self.roster.version, tuple(self.peers)
        leader, known = self.coordinator, self.roster.members.get(sender.name)
        if not self.elects or known is None or known.incarnation != sender.incarnation:
            return no
        if leader is None or leader.incarnation != lost.incarnation:
            return no  # we lead, or follow another one
        may = self.succession.may_vote
        facts = term, sender.incarnation, version
        if not may(*facts, self.roster.version):
            return no
        # Confirmed by ourselves: the candidate alone may have lost it.
        if await self._answers(leader):
            return no
        follows = self.coordinator is not None and self.coordinator.incarnation == lost.incarnation
        if not follows or not may(*facts, self.roster.version):
            return False, self.roster.version, tuple(self.peers)
        self.succession.vote(term, sender.incarnation)
        return True, self.roster.version, ()

    async def _answers(self, peer: PeerInfo) -> bool:
        """Whether a worker can be reached from here."""
        try:
            await self.agent.request(peer, "cluster.coordinator", timeout=VOTE)
        except RpcError:
            return False
        return True

    def _on_succeed(
        self,
        sender: PeerInfo,
        term: int,
        version: int,
        peers: Sequence[PeerInfo],
        lost: tuple[PeerInfo, str],
    ) -> Any:
        self._check_elector(sender)
        if type(term) is not int or version != first_version(term):
            raise ProtocolError("cluster.succeed: malformed term", sender.name)
        _check_roster(version, peers, "cluster.succeed", sender)
        if not (type(lost) is tuple and len(lost) == 2 and type(lost[1]) is str):
            raise ProtocolError("cluster.succeed: malformed loss", sender.name)
        check_peer(lost[0], "cluster.succeed", sender)
        known = self.roster.members.get(sender.name)
        if not self.elects or known is None or known.incarnation != sender.incarnation:
            raise NotAllowed(f"{sender.name} is not a member", self.agent.name)
        refused = NotAllowed(f"{sender.name} is not the coordinator", self.agent.name)
        leader = self.coordinator
        if leader is None or term <= self.succession.term:
            raise refused
        succession = known, term, version, peers, lost

        async def make_sure() -> None:
            if await self._answers(leader):
                raise refused
            self._follow_successor(*succession)
            await self._catch_up()  # its changes since then were refused here

        # Who did not vote for it makes sure itself that there is a need: no member can take over
        # from a coordinator that is there. Who did follows at once, before the next message is
        # read: it may be a change of the roster.
        if not self.succession.voted(term, sender.incarnation):
            return make_sure()
        return self._follow_successor(*succession)

    def _follow_successor(
        self,
        successor: PeerInfo,
        term: int,
        version: int,
        peers: Sequence[PeerInfo],
        lost: tuple[PeerInfo, str],
    ) -> None:
        if self.coordinator is None or not self.succession.follow(term):
            raise NotAllowed(f"{successor.name} is not the coordinator", self.agent.name)
        _log.info("%s: %s is the coordinator now (term %d)", self.agent.name, successor.name, term)
        self.coordinator = successor
        self.adopt(version, peers, lost=(lost,))
        self.notify()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _on_coordinator(self, sender: PeerInfo) -> PeerInfo:
        # A newcomer may know the address of any member.
        return self.agent.info if self.coordinator is None else self.coordinator

    def _not_coordinator(self, sender: PeerInfo, *_: Any) -> NoReturn:
        raise RpcError(f"{self.agent.name} is not the coordinator of this cluster")

    def _check_elector(self, sender: PeerInfo) -> None:
        if self.agent.restricts(sender):
            raise NotAllowed(f"{sender.name} takes no part in elections", self.agent.name)

    def _check_coordinator(self, sender: PeerInfo) -> None:
        # Every peer can send these messages. By incarnation: a later start of the coordinator has
        # another membership, in which this worker is none.
        if self.coordinator is None or sender.incarnation != self.coordinator.incarnation:
            raise NotAllowed(f"{sender.name} is not the coordinator", self.agent.name)

    def _coordinator(self) -> PeerInfo:
        assert self.coordinator is not None
        return self.coordinator


# ── forms ───────────────────────────────────────────────────────────────────────────────────────

# What follows from a roster reaches directory, links and collectives of every member. So everything
# in it is checked before anything is changed, from any sender.
_ADDRESSES: Final = 16  # of one worker
_ADDRESS: Final = 1024  # characters
_LABELS: Final = 64  # of one worker


def check_peer(peer: Any, service: str, sender: PeerInfo) -> None:
    """ProtocolError unless this describes a worker as the library would."""
    fits = (
        type(peer) is PeerInfo
        and type(peer.name) is str
        and is_name(peer.name)
        and type(peer.rank) is int
        and 0 <= peer.rank < RANKS
        and type(peer.incarnation) is bytes
        and len(peer.incarnation) == 16
        and _are_texts(peer.addresses, _ADDRESSES)
        and type(peer.restricted) is bool
        and _are_texts(peer.exceptions, RANKS)
        and _are_texts((peer.host, peer.locality), 2)
        and _are_texts(peer.labels, _LABELS)
        and all("=" in label for label in peer.labels)
    )
    if not fits:
        raise ProtocolError(f"{service}: malformed description of a worker", sender.name)


def _are_texts(value: Any, most: int) -> bool:
    return (
        type(value) is tuple
        and len(value) <= most
        and all(type(text) is str and len(text) <= _ADDRESS for text in value)
    )


def _check_roster(version: Any, peers: Any, service: str, sender: PeerInfo) -> None:
    if type(version) is not int or type(peers) not in (tuple, list):
        raise ProtocolError(f"{service}: malformed roster", sender.name)
    for peer in peers:
        check_peer(peer, service, sender)


def _check_update(update: Any, sender: PeerInfo) -> None:
    service = "cluster.change"
    if type(update) is not Update:
        raise ProtocolError(f"{service}: malformed update", sender.name)
    _check_roster(update.version, update.joined, service, sender)
    _check_roster(update.version, update.left, service, sender)
    for entry in update.lost:
        if not (type(entry) is tuple and len(entry) == 2 and type(entry[1]) is str):
            raise ProtocolError(f"{service}: malformed loss", sender.name)
        check_peer(entry[0], service, sender)


def _label(peer: PeerInfo) -> str:
    """Name a worker in a log line."""
    return f"{peer.name} (rank {peer.rank}, {', '.join(peer.addresses) or 'no address'})"
