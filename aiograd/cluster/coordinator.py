"""A worker's part in its cluster: joins, leaves and farewells, carried over the wire.

Decisions are made elsewhere, without I/O: by `Membership` and `Farewell` at the coordinator. This
module is their mouth and ears. Barriers are `assembly.py`'s business.

    service              from → to               says                          answer
    cluster.rank         newcomer → coordinator  give me a rank                a number
    cluster.join         newcomer → coordinator  who I am, which world         RpcError, or the
    cluster.welcome      coordinator → newcomer  roster                        roster comes first
    cluster.change       coordinator → member    an update                     that it is applied
    cluster.roster       member → coordinator    I missed something            roster
    cluster.leave        member → coordinator    goodbye                       that it is known
    cluster.dismiss      coordinator → member    please leave, too             –
    cluster.farewell     member → coordinator    how many calls I have made    was it the last round
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from aiograd.cluster.collectives import Assembly, retrieve
from aiograd.cluster.membership import Action, Admit, Announce, Membership, Refuse, Roster, Update
from aiograd.cluster.termination import Farewell
from aiograd.errors import NotAllowed, RpcError, SecurityError, WorkerClosed, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import LOST_PEERS, PeerInfo
from aiograd.rpc.extension import RecordTraveller

__all__ = ["Members"]

_log = logging.getLogger("aiograd")

# A member that does not confirm a change for so long holds nobody else up; it learns it later.
CONFIRM = 1.0


class Members:
    """The cluster as one worker sees it; the one that has no coordinator is the coordinator."""

    def __init__(
        self, agent: Agent, world_size: int | None, coordinator: PeerInfo | None = None
    ) -> None:
        self.agent = agent
        self.world_size = world_size
        self.coordinator = coordinator  # None: this worker
        self.roster: Roster[PeerInfo] = Roster()
        self.dismissed: asyncio.Future[tuple[bool, float | None]] = agent.loop.create_future()
        self.changed = asyncio.Event()  # set, and replaced, whenever the roster changes
        self._leads: Membership[PeerInfo] | None = None  # at the coordinator
        if coordinator is None:
            self._leads = Membership(agent.info, world_size)
        self._joining: dict[bytes, asyncio.Future[Any]] = {}  # newcomers that wait for an answer
        self._refused: set[bytes] = set()  # newcomers that are about to leave again
        self._fallen: deque[PeerInfo] = deque()  # the latest lost ones, still in the directory
        self._together = world_size is not None or coordinator is None  # see `leaves_together`
        self.assembly = Assembly(agent, lambda: self.peers)
        self._farewell = Farewell()
        self._leaving = False  # this worker has begun its farewell
        self._over = False  # the farewell has ended
        self._round: asyncio.Future[bool] = agent.loop.create_future()  # of the farewell
        agent.services.update(
            {
                "cluster.rank": self._on_rank,
                "cluster.join": self._on_join,
                "cluster.welcome": self._on_welcome,
                "cluster.change": self._on_change,
                "cluster.roster": self._on_roster,
                "cluster.leave": self._on_leave,
                "cluster.dismiss": self._on_dismiss,
                "cluster.farewell": self._on_farewell,
            }
        )
        agent.plain_travellers.add(Update, RecordTraveller("update", Update))
        agent.lost.append(self._on_lost)
        agent.returned.append(self.assembly.returned)

    @property
    def leads(self) -> bool:
        """Whether this worker is the coordinator."""
        return self._leads is not None

    @property
    def peers(self) -> list[PeerInfo]:
        """All members, in order of rank."""
        return sorted(self.roster.members.values(), key=lambda peer: peer.rank)

    @property
    def others(self) -> list[PeerInfo]:
        own = self.agent.incarnation
        return [peer for peer in self.peers if peer.incarnation != own]

    # ── coming ──────────────────────────────────────────────────────────────────────────────────

    async def join(self, timeout: float) -> None:
        """Become a member; RpcError when refused, or when the world is not complete in time."""
        if self._leads is None:
            await self.agent.request(
                self._coordinator(),
                "cluster.join",
                self.agent.info,
                self.world_size,
                timeout=timeout + CONFIRM,  # the coordinator should say why, not our deadline
            )
            return
        admitted = self._wait_for_answer(self.agent.incarnation)
        self._carry(self._leads.start())
        try:
            async with asyncio.timeout(timeout):
                await admitted
        except TimeoutError:
            why = self._incomplete(timeout)
            self._carry(self._leads.give_up(why))
            raise RpcError(why) from None

    async def see_off_refused(self, late: float) -> None:
        """Stay, as the coordinator, until those who were refused have heard why.

        Also, for `late` seconds, for those who have not come yet: nobody else could tell them.
        """
        leads = self._led()
        if late and leads.to_come():
            _log.error("%s: %s; staying %g s for late ranks", self.agent.name, leads.verdict, late)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(late):
                    while leads.to_come():
                        await self.changed.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM):
                while self._refused:
                    await self.changed.wait()

    @property
    def told(self) -> list[int]:
        """At the coordinator: the ranks to which it told that the start is refused."""
        return [peer.rank for peer in self._led().refused.values()]

    async def wait_for(self, names: Iterable[str]) -> None:
        """Wait, as the coordinator, until all of these are members and all members know them."""
        names = set(names)
        while not (
            names <= self.roster.members.keys()
            and self._joining.keys().isdisjoint(
                self.roster.members[name].incarnation for name in names
            )
        ):
            await self.changed.wait()

    async def wait_gone(self, name: str) -> None:
        """Wait until nobody of this name is a member."""
        while name in self.roster.members:
            await self.changed.wait()

    async def wait_alone(self) -> None:
        """Wait until everyone else has left."""
        while self.others:
            await self.changed.wait()

    def _incomplete(self, timeout: float) -> str:
        assert self._leads is not None
        missing = self._leads.missing()
        turned_away = "".join(
            f"; somebody who called itself {name!r} was turned away: {why}"
            for name, why in self.agent.turned_away.items()
        )
        return (
            f"the world of {self.world_size} was not complete within {timeout:g} s; "
            f"no word from rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            f"{turned_away}"
        )

    def _on_rank(self, sender: PeerInfo) -> int:
        return self._led().next_rank()

    def _on_join(self, sender: PeerInfo, peer: PeerInfo, world_size: int | None) -> Any:
        if (peer.name, peer.incarnation) != (sender.name, sender.incarnation):
            raise NotAllowed("a worker joins for itself only", self.agent.name)
        if self._leaving:
            raise RpcError("this cluster is being closed")
        answer = self._wait_for_answer(peer.incarnation)
        self._carry(self._led().join(peer, world_size))
        return asyncio.shield(answer)

    def _wait_for_answer(self, incarnation: bytes) -> asyncio.Future[Any]:
        answer = self._joining.get(incarnation)
        if answer is None:
            answer = self._joining[incarnation] = self.agent.loop.create_future()
            answer.add_done_callback(retrieve)
        return answer

    # ── changes ─────────────────────────────────────────────────────────────────────────────────

    def _carry(self, actions: Sequence[Action[PeerInfo]]) -> None:
        """Do what the membership decided."""
        admitted = [action.peer for action in actions if isinstance(action, Admit)]
        # First of all: as soon as others know a newcomer they may call it, and it them.
        told = self._welcome(admitted)
        for action in actions:
            match action:
                case Announce(update, to):
                    told += self._announce(update, to)
                case Refuse(peer, why):
                    answer = self._joining.pop(peer.incarnation, None)
                    if answer is not None and not answer.done():
                        answer.set_exception(RpcError(why))
                        if peer.incarnation != self.agent.incarnation:
                            self._refused.add(peer.incarnation)
                    self._notify()
        if admitted:
            self.agent.spawn(self._admit(admitted, told))

    def _announce(
        self, update: Update[PeerInfo], to: Sequence[PeerInfo]
    ) -> list[asyncio.Future[Any]]:
        if self.roster.version:
            self._adopt(*self._led().roster(), lost=update.lost)
        own = self.agent.incarnation
        if self._over:
            return []  # everyone is leaving, and nobody wants to know
        others = [peer for peer in to if peer.incarnation != own]
        answers: list[asyncio.Future[Any]] = []
        for peer in others:
            with contextlib.suppress(RpcError):  # gone, too: that is announced of its own
                answers.append(self.agent.request(peer, "cluster.change", update, timeout=CONFIRM))
        for answer in answers:
            answer.add_done_callback(retrieve)
        return answers

    def _welcome(self, admitted: Sequence[PeerInfo]) -> list[asyncio.Future[Any]]:
        """Tell newcomers who is there."""
        answers: list[asyncio.Future[Any]] = []
        roster = self._led().roster() if admitted else ()
        for peer in admitted:
            if peer.incarnation != self.agent.incarnation:
                with contextlib.suppress(RpcError):  # lost already, which is noticed anyway
                    answers.append(
                        self.agent.request(peer, "cluster.welcome", *roster, timeout=CONFIRM)
                    )
        for answer in answers:
            answer.add_done_callback(retrieve)
        return answers

    async def _admit(
        self, admitted: Sequence[PeerInfo], told: Sequence[asyncio.Future[Any]]
    ) -> None:
        """Let newcomers in: they are answered when they know everyone and everyone knows them."""
        for peer in admitted:
            self.agent.directory.add(peer)
        if any(peer.incarnation == self.agent.incarnation for peer in admitted):
            self._adopt(*self._led().roster())
        if told:
            await asyncio.wait(told)
        for peer in admitted:
            answer = self._joining.pop(peer.incarnation, None)
            if answer is not None and not answer.done():
                answer.set_result(None)
        self._notify()

    def _on_welcome(self, sender: PeerInfo, version: int, peers: Sequence[PeerInfo]) -> None:
        self._check_coordinator(sender)
        self._adopt(version, peers)

    def _adopt(
        self,
        version: int,
        peers: Iterable[PeerInfo],
        lost: Sequence[tuple[PeerInfo, str]] = (),
    ) -> None:
        change = self.roster.reset(version, peers)
        if change is not None:
            gone = {peer.incarnation for peer, _ in lost}
            left = tuple(peer for peer in change.left if peer.incarnation not in gone)
            self._follow(Update(version, change.joined, left, tuple(lost)))

    def _on_change(self, sender: PeerInfo, update: Update[PeerInfo]) -> Any:
        self._check_coordinator(sender)
        match self.roster.apply(update):
            case "applied":
                self._follow(update)
            case "gap":
                return self._catch_up()
        return None

    async def _catch_up(self) -> None:
        roster = self.agent.request(self._coordinator(), "cluster.roster", timeout=math.inf)
        self._adopt(*await roster)

    def _on_roster(self, sender: PeerInfo) -> Any:
        return self._led().roster()

    def _follow(self, update: Update[PeerInfo]) -> None:
        """Let the rest of this worker know who came and who went."""
        directory = self.agent.directory
        for peer in update.left:
            self._strike_out(peer)
            self._gone(peer, WorkerLost(peer.name, "no", "it left the cluster"))
        for peer, why in update.lost:
            # It stays in the directory: calling it is answered by WorkerLost, not UnknownWorker.
            self.agent.links.declare_lost(peer, why)
            self._fallen.append(peer)
            self._gone(peer, WorkerLost(peer.name, "unknown", why))
        for peer in update.joined:
            directory.add(peer)
        while len(self._fallen) > LOST_PEERS:
            self._strike_out(self._fallen.popleft())
        self._notify()

    def _strike_out(self, peer: PeerInfo) -> None:
        """Forget a worker, unless another start of it is here."""
        known = self.agent.directory.get(peer.name)
        if known is not None and known.incarnation == peer.incarnation:
            self.agent.directory.remove(peer.name)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _on_lost(self, peer: PeerInfo, error: Exception) -> None:
        if isinstance(error, SecurityError):
            return  # it is there, and others speak with it; we share no secret, or no mode
        if self._leads is not None:
            answer = self._joining.pop(peer.incarnation, None)
            if answer is not None and not answer.done():
                answer.cancel()  # nobody is left to hear it
            why = getattr(error, "why", "") or str(error)
            self._carry(self._leads.lost(peer.incarnation, why))
            self._refused.discard(peer.incarnation)
            self._notify()
        elif peer.incarnation == self._coordinator().incarnation and not self.dismissed.done():
            self.dismissed.set_result((False, None))
        self._gone(peer, error)

    def process_ended(self, peer: PeerInfo, why: str) -> None:
        """The process of a member has ended, as its parent saw: lose it, unless it has left.

        Its connections may tell nothing: a child that it forked can keep them open.
        """
        if not self.agent.closed:
            self.agent.spawn(self._lose_ended(peer, why))

    async def _lose_ended(self, peer: PeerInfo, why: str) -> None:
        await self.agent.links.read_out(peer)  # its last answers, and maybe its goodbye
        member = self._led().members.get(peer.name)
        if member is not None and member.incarnation == peer.incarnation:
            self.agent.links.declare_lost(peer, why)

    def _gone(self, peer: PeerInfo, error: Exception) -> None:
        self.assembly.gone(peer, error)
        self._decide()

    # ── going ───────────────────────────────────────────────────────────────────────────────────

    async def report(self, outstanding: int, started: int) -> bool:
        """Tell the leader of the farewell what goes on here; True when nothing goes on anywhere."""
        self._leaving = True
        if self._leads is None:
            answer = self.agent.request(
                self._coordinator(), "cluster.farewell", outstanding, started, timeout=math.inf
            )
            return bool(await answer)
        return await self._heard(self.agent.name, outstanding, started)

    def _on_farewell(self, sender: PeerInfo, outstanding: int, started: int) -> Any:
        return self._heard(sender.name, outstanding, started)

    def _heard(self, name: str, outstanding: int, started: int) -> asyncio.Future[bool]:
        answer = asyncio.shield(self._round)
        self._farewell.report(name, outstanding, started)
        self._decide()
        return answer

    def _decide(self) -> None:
        if self._leads is None or not self.roster.version:
            return
        done = self._farewell.decide(self._leads.members)
        if done is not None:
            self._over = done
            answer, self._round = self._round, self.agent.loop.create_future()
            answer.set_result(done)

    @property
    def leaves_together(self) -> bool:
        """Whether leaving means that all leave: not when one member leaves an open cluster."""
        return self._together

    def dismiss(self, peers: Iterable[PeerInfo], together: bool, timeout: float | None) -> None:
        """Ask others to leave: alone, or together with this worker."""
        for peer in peers:
            with contextlib.suppress(RpcError):
                self.agent.post(peer, "cluster.dismiss", together, timeout)

    def _on_dismiss(self, sender: PeerInfo, together: bool, timeout: float | None) -> None:
        self._check_coordinator(sender)
        self._together = together
        if not self.dismissed.done():
            self.dismissed.set_result((True, timeout))

    async def leave(self) -> None:
        """Say goodbye to the coordinator, if it is still there."""
        if self._leads is None:
            with contextlib.suppress(RpcError):
                await self.agent.request(self._coordinator(), "cluster.leave", timeout=CONFIRM)

    def _on_leave(self, sender: PeerInfo) -> None:
        self._carry(self._led().leave(sender.incarnation))

    async def close(self) -> None:
        """End what this part still waits for."""
        error = WorkerClosed(f"{self.agent.name} was shut down", self.agent.name)
        self.assembly.close(error)
        for future in (*self._joining.values(), self._round):
            if not future.done():
                future.add_done_callback(retrieve)
                future.set_exception(error)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _led(self) -> Membership[PeerInfo]:
        if self._leads is None:
            raise RpcError(f"{self.agent.name} is not the coordinator of this cluster")
        return self._leads

    def _check_coordinator(self, sender: PeerInfo) -> None:
        if self.coordinator is None or sender.incarnation != self.coordinator.incarnation:
            raise NotAllowed(f"{sender.name} is not the coordinator", self.agent.name)

    def _coordinator(self) -> PeerInfo:
        assert self.coordinator is not None
        return self.coordinator
