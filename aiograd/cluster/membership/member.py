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
    cluster.change       coordinator → member    an update of the roster       when applied: may
                                                                               it count as known
    cluster.confirmed    coordinator → member    the version that elects       –
    cluster.roster       member → coordinator    – (an update was missed)      roster
    cluster.leave        member → coordinator    –                             when announced
    cluster.dismiss      coordinator → member    leave alone or together       –
    cluster.report       member → coordinator    counts of calls               is it the last round
    cluster.term         any → member            –                             term, coordinator,
                                                                               does it campaign
    cluster.elect        candidate → member      term, version, who is lost    vote, newer roster
    cluster.succeed      successor → member      roster, who was lost          when applied: may
                                                                               it count as known

Barriers and gathers are in `collectives.py`. In an open cluster the loss of the coordinator begins
an election (`election.py`); where nobody can be elected, the member leaves.
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
from aiograd.cluster.membership.election import Election
from aiograd.cluster.membership.forms import check_roster, check_update
from aiograd.cluster.membership.roster import Roster, Update, first_version, term_of
from aiograd.cluster.membership.succession import Succession
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

__all__ = ["CONFIRM_TIMEOUT", "Dismissal", "Member"]

_log = logging.getLogger("aiograd.cluster")

# Seconds for a member to confirm a change. One that is slower does not hold up the others: it sees
# the gap in the versions later, and asks for the roster.
CONFIRM_TIMEOUT: Final = 1.0

COORDINATOR_SERVICES: Final = (
    "cluster.place",
    "cluster.join",
    "cluster.roster",
    "cluster.leave",
    "cluster.report",
)

# term, the lost coordinator, why it was lost
TakeOver = Callable[[int, PeerInfo, str], None]


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
        # The coordinator said so: open, and not led by a driver.
        self.elects: bool = False
        self.highest_rank: int = agent.rank  # ever given out, as far as this member knows
        self._election = Election(self)
        # What `Worker` sets: how this worker becomes the coordinator, and an agent of its own with
        # which a coordinator asks those that it has lost.
        self.take_over: TakeOver | None = None
        self.make_probe: Callable[[], Agent] | None = None
        # Ends the part of this worker as a coordinator; its `Coordinator` sets it.
        self.resign: Callable[[PeerInfo], None] = lambda successor: None
        agent.services.update(
            {
                "cluster.coordinator": self._on_coordinator,
                "cluster.welcome": self._on_welcome,
                "cluster.change": self._on_change,
                "cluster.confirmed": self._on_confirmed,
                "cluster.dismiss": self._on_dismiss,
            }
        )
        # Members that exchange plain data only have to read updates as well.
        agent.plain_travellers.add(Update, RecordTraveller("update", Update))
        self._refuse_to_coordinate()
        agent.lost.append(self._on_lost)
        # A member has to hear at once that its coordinator is gone; a coordinator watches all.
        agent.watched.append(
            lambda: () if self.coordinator is None else (self.coordinator.incarnation,)
        )
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
        check_roster(version, peers, "cluster.welcome", sender)
        if type(elects) is not bool or type(highest) is not int:
            raise ProtocolError("cluster.welcome: malformed terms", sender.name)
        self.elects = elects
        self.highest_rank = max(self.highest_rank, highest)
        self.adopt(version, peers)

    def _on_change(self, sender: PeerInfo, update: Update[PeerInfo]) -> Any:
        self._check_coordinator(sender)
        check_update(update, sender)
        match self.roster.apply(update):
            case "applied":
                self._follow(update)
            case "gap":
                return self._catch_up()
        return self.acknowledges()

    def _on_confirmed(self, sender: PeerInfo, version: int) -> None:
        # No error: it is a post, and may overtake the news that there is another coordinator. For
        # an earlier version there is a later one to come; one that we do not have yet follows from
        # an update that we have missed.
        leader = self.coordinator
        led = leader is not None and leader.incarnation == sender.incarnation
        if led and version == self.roster.version:
            self.confirm()

    def confirm(self) -> None:
        """Let the members of the current roster elect."""
        members = self.roster.members.values()
        self.succession.electorate = frozenset(peer.incarnation for peer in members)

    def electors(self, known: Iterable[PeerInfo]) -> list[PeerInfo]:
        """List those of `known` that elect."""
        return [peer for peer in known if peer.incarnation in self.succession.electorate]

    async def _catch_up(self) -> bool:
        coordinator = self._coordinator()
        answer = await self.agent.request(coordinator, "cluster.roster", timeout=math.inf)
        if not (type(answer) is tuple and len(answer) == 2):
            raise ProtocolError("cluster.roster: malformed answer", coordinator.name)
        check_roster(*answer, "cluster.roster", coordinator)
        self.adopt(*answer)
        return self.acknowledges()

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
        if leader is None:
            return  # the `Coordinator` decides first, and then calls `lose`
        if peer.incarnation == leader.incarnation:
            self._lost_coordinator(leader, error)
        # Whether it is lost to all is for the coordinator to say: our connection alone may be cut.
        self.collectives.cut_off(peer, error)

    def _lost_coordinator(self, leader: PeerInfo, error: Exception) -> None:
        if self.dismissed.done() or self._election.running:
            return
        # Not a warning: when a driver closes without grace, each of its workers passes here.
        _log.info("%s: lost the coordinator %s: %s", self.agent.name, _label(leader), error)
        why = f"lost the coordinator {_label(leader)}: {getattr(error, 'why', '') or error}"
        # Two members cannot tell a loss from a cut between them.
        several = self.elects and len(self.roster.members) > 2
        if several and self.take_over is not None and self._election.electors(leader):
            self._election.begin(leader, why)
        else:
            self.abandon(why)

    # ── a new coordinator ───────────────────────────────────────────────────────────────────────

    def lead(self, term: int, lost: PeerInfo, why: str) -> None:
        """Become the coordinator of a term, in place of one that was lost."""
        assert self.take_over is not None
        heirs = self.succession.heirs(self.peers, lost.incarnation)
        _log.warning(
            "%s takes over as the coordinator of %d members (term %d): %s",
            *(self.agent.name, len(heirs), term, why),
        )
        self.succession.follow(term)
        self.coordinator, self._together = None, True
        self.adopt(first_version(term), heirs, lost=((lost, why),))
        self.take_over(term, lost, why)

    def follow(self, leader: PeerInfo) -> None:
        """Follow another coordinator from now on, also if this worker led before."""
        if self.coordinator is None:
            self.resign(leader)
            self._refuse_to_coordinate()
            self._together = self.world_size is not None
        self.coordinator = leader

    def accept(
        self, version: int, peers: Sequence[PeerInfo], lost: Sequence[tuple[PeerInfo, str]]
    ) -> None:
        """Replace the roster by that of a new coordinator."""
        here = {peer.incarnation for peer in self.roster.members.values()}
        self.adopt(version, peers, [each for each in lost if each[0].incarnation in here])
        self.notify()

    def acknowledges(self) -> bool:
        """Whether what the coordinator announces now may count as known here.

        Not while a vote of this member may make another one the coordinator; see `succession.py`.
        """
        bound = self.succession.bound_to(self.agent.loop.time())
        if bound == self.agent.incarnation:
            return not self._election.campaigning
        return bound is None

    def abandon(self, why: str) -> None:
        """Leave the cluster, because there is no coordinator that has this worker as a member."""
        if not self.dismissed.done():
            self.dismissed.set_result(Dismissal(False, None, why))

    def _refuse_to_coordinate(self) -> None:
        # Refused by name, instead of as unknown: a worker may be given the address of an ordinary
        # member as its rendezvous. A `Coordinator` replaces these.
        refusals = dict.fromkeys(COORDINATOR_SERVICES, self._not_coordinator)
        self.agent.services.update(refusals)

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


def _label(peer: PeerInfo) -> str:
    """Name a worker in a log line."""
    return f"{peer.name} (rank {peer.rank}, {', '.join(peer.addresses) or 'no address'})"
