"""Members of a simulated cluster that elect, with the cluster layer's own code.

Every worker is a `Seat`: a node of the world, and the `Member` and, where it leads, the
`Coordinator` that a real `Worker` would have. What the world decides here is only what an operating
system decides for real workers: when a process starts, and when it ends.

`Watch` looks at every change of every roster, at the moment it happens:

S1  no two workers lead in one term
S2  two members that have the same version of the roster have the same roster
S3  a member's version never goes back
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aiograd.cluster.membership.coordinator import Coordinator
from aiograd.cluster.membership.member import Member
from aiograd.cluster.membership.roster import term_of
from aiograd.errors import AiogradError
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.testing.simulator.world import SECRET, Node, World

JOIN: Final = 10.0  # seconds in which a newcomer has joined, if there is a majority
RETRY: Final = 0.2  # seconds between two attempts of a newcomer
BARRIER: Final = 5.0  # seconds in which all members meet


class Watch:
    """Every roster and every coordinator that there ever was in one run, and what is wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[str] = []
        self.on_lead: Callable[[str], None] | None = None  # told who leads
        self.leaders: dict[int, bytes] = {}  # by term
        self._rosters: dict[int, frozenset[bytes]] = {}  # by version
        self._versions: dict[bytes, int] = {}  # of each member, by incarnation

    def violated(self, invariant: str, text: str) -> None:
        """Note that an invariant does not hold; the events that led to the first one are kept."""
        self._world.trace("VIOLATION", invariant, text)
        self._world.trace.freeze()
        self.violations.append(f"{invariant}: {text}")

    def leads(self, name: str, incarnation: bytes, term: int) -> None:
        """Check S1: a worker begins to lead."""
        self._world.trace("leads", name, term)
        if self.on_lead is not None:
            self.on_lead(name)
        first = self.leaders.setdefault(term, incarnation)
        if first != incarnation:
            self.violated("S1", f"{name} leads in term {term}, in which another worker led before")

    def look(self, member: Member) -> None:
        """Check S2 and S3: the roster of a member has changed."""
        roster, own = member.roster, member.agent.incarnation
        if roster.version == 0:
            return
        name = member.agent.name
        before = self._versions.get(own, 0)
        if roster.version < before:
            self.violated("S3", f"{name} goes back from version {before:#x} to {roster.version:#x}")
        self._versions[own] = roster.version
        members = frozenset(peer.incarnation for peer in roster.members.values())
        if self._rosters.setdefault(roster.version, members) != members:
            self.violated("S2", f"two rosters have version {roster.version:#x}; one is {name}'s")


class WatchedMember(Member):
    """A member whose every change is looked at."""

    watch: Watch

    def notify(self) -> None:
        """As `Member`, and let the watch look."""
        super().notify()
        self.watch.look(self)


class Seat:
    """One start of one worker as a member: what `Worker` is in a real process."""

    def __init__(self, node: Node, watch: Watch) -> None:
        self.node = node
        self.watch = watch
        self.member: WatchedMember
        self.coordinator: Coordinator | None = None
        self.why_left: str | None = None  # it was dismissed, or could not join

    @property
    def name(self) -> str:
        """The name of the worker."""
        return self.node.name

    @property
    def incarnation(self) -> bytes:
        """That of this start."""
        return self.node.agent.incarnation

    @property
    def present(self) -> bool:
        """Whether it runs, and has not left."""
        return self.node.alive and self.why_left is None

    def open(self, coordinator: PeerInfo | None) -> None:
        """Make the member, and the coordinator if it is this worker."""
        agent = self.node.agent
        self.member = WatchedMember(agent, None, coordinator)
        self.member.watch = self.watch
        self.member.take_over = self._take_over
        self.member.make_probe = self._make_probe
        if coordinator is None:
            self.coordinator = Coordinator(self.member, elects=True)
            self.watch.leads(self.name, self.incarnation, 0)

    def _take_over(self, term: int, lost: PeerInfo, why: str) -> None:
        self.watch.leads(self.name, self.incarnation, term)
        self.coordinator = Coordinator.succeed(self.member, lost, why)

    def _make_probe(self) -> Agent:
        return Agent(
            self.name,
            -1,
            secret=SECRET,
            options=self.node.world.options,
            runtime=self.node.runtime,
        )

    async def serve(self) -> None:
        """Stay until it is dismissed, then end, as `aiograd worker` does."""
        dismissal = await asyncio.shield(self.member.dismissed)
        self.node.world.trace("leaves", self.name, dismissal.why[:160])
        await self.end(dismissal.why)

    async def end(self, why: str) -> None:
        """Close everything."""
        self.why_left = why
        if hasattr(self, "member"):
            self.member.close()
        if self.coordinator is not None:
            self.coordinator.close()
        await self.node.stop()


class Cluster:
    """All seats of one simulated cluster."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch: Watch = Watch(world)
        self.seats: dict[str, Seat] = {}  # the latest start of each worker
        self._rank = 0

    async def start(self, names: Sequence[str]) -> None:
        """Start the first worker as the coordinator, and let the others join, in this order."""
        first = self.seats[names[0]] = await self._sit(names[0])
        first.open(None)
        assert first.coordinator is not None
        await first.node.spawn(first.coordinator.start(JOIN))
        first.node.spawn(first.serve())
        for name in names[1:]:
            if not await self.join(name, names[0]):
                raise AssertionError(f"{name} cannot join a calm cluster")

    @property
    def present(self) -> list[Seat]:
        """The seats whose worker runs and has not left."""
        return [seat for seat in self.seats.values() if seat.present]

    def members(self) -> list[Seat]:
        """Those that are present and were admitted."""
        return [seat for seat in self.present if seat.member.roster.version]

    async def _sit(self, name: str) -> Seat:
        node = await self.world.start_alone(name, self._rank)
        self._rank += 1
        return Seat(node, self.watch)

    async def join(self, name: str, via: str) -> bool:
        """Let a worker join at the address of any member; False if it takes too long."""
        deadline = self.world.loop.time() + JOIN
        while self.world.loop.time() < deadline:
            seat = await self._sit(name)
            try:
                left = deadline - self.world.loop.time()
                await seat.node.spawn(self._admit(seat, self.seats[via].node.address, left))
                self.seats[name] = seat
                seat.node.spawn(seat.serve())
                return True
            except (AiogradError, OSError, TimeoutError) as error:
                self.world.trace("not admitted", name, type(error).__name__, str(error)[:120])
                await seat.node.spawn(seat.end("not admitted"))
                await asyncio.sleep(RETRY)
                # Any other member will do, as in an invitation.
                others = [each.name for each in self.members()]
                via = self.world.random.choice(others) if others else via
        return False

    async def _admit(self, seat: Seat, address: str, timeout: float) -> None:
        agent = seat.node.agent
        async with asyncio.timeout(timeout):
            peer = await agent.connect(address)
            agent.directory.add(peer)
            leader = await agent.request(peer, "cluster.coordinator", timeout=1.0)
            if leader.incarnation != peer.incarnation:
                leader = await agent.connect(leader.addresses[0])
                agent.directory.add(leader)
            seat.open(leader)
            await seat.member.join(timeout)

    # ── what has to hold ────────────────────────────────────────────────────────────────────────

    def disagreement(self, seats: Iterable[Seat], exactly: bool = True) -> str:
        """Say why these members do not agree on one coordinator and on being members; or "".

        `exactly`: on being all members, too.
        """
        seats = list(seats)
        group = {seat.incarnation: seat.name for seat in seats}
        leaders = {seat.member.leader.incarnation: seat.member.leader.name for seat in seats}
        if len(leaders) != 1:
            return f"they follow {sorted(leaders.values())}"
        ((leader, name),) = leaders.items()
        # One that is stopped is not lost before somebody waits for it.
        stopped = self.seats[name].node.busy_until > self.world.loop.time()
        if leader not in group and (exactly or not stopped):
            return f"they follow {name}, which is none of them"
        for seat in seats:
            roster = {peer.incarnation: peer.name for peer in seat.member.peers}
            if roster != group if exactly else not group.items() <= roster.items():
                return f"{seat.name} knows {sorted(roster.values())}, not {sorted(group.values())}"
        terms = {term_of(seat.member.roster.version) for seat in seats}
        return f"they are in terms {sorted(terms)}" if len(terms) > 1 else ""

    def without_vote(self) -> list[str]:
        """Name the members that do not take all members for electors."""
        return [
            seat.name
            for seat in self.members()
            if seat.member.succession.electorate
            != {peer.incarnation for peer in seat.member.roster.members.values()}
        ]

    async def meet(self, seats: Sequence[Seat]) -> str:
        """Let all of them meet at a barrier; say what went wrong, or ""."""
        tasks = [
            seat.node.spawn(seat.member.collectives.gather(seat.name, None, BARRIER, "barrier"))
            for seat in seats
        ]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        names = {seat.name for seat in seats}
        for seat, found in zip(seats, done, strict=True):
            if isinstance(found, BaseException):
                return f"the barrier at {seat.name}: {found!r}"
            if set(found) != names:
                return f"{seat.name} meets {sorted(found)}"
        return ""

    async def stop(self) -> None:
        """Close all that are present, at once."""
        for task in [seat.node.spawn(seat.end("the run is over")) for seat in self.present]:
            with contextlib.suppress(Exception):
                await task

    def trace_views(self) -> None:
        """Write into the trace how every member sees the cluster."""
        for seat in self.members():
            member: Any = seat.member
            names = sorted(peer.name for peer in member.peers)
            self.world.trace(
                "view", seat.name, f"{member.roster.version:#x}", member.leader.name, names
            )
