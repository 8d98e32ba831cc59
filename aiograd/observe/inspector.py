"""Take a snapshot: of this worker at once, of others by asking them, in bounded time.

    inspect()  ─▶ Tables of this worker                                at once
    await …    ─▶ "inspect" to each worker ─┬─ its part
                                            └─ no answer ─▶ "inspect.host" to one of its host,
                                                            which has the watchdog's note

    service           asks for                                        shown to
    inspect           the part of one worker; lets it count calls     all; others see only their own
    inspect.all       what `await inspect()` gives there              trusted peers
    inspect.host      what a host knows of workers that are silent    trusted peers
    inspect.stacks    the stacks of tasks and threads                 trusted peers
    inspect.record    what is called there for some seconds           trusted peers

Answers are JSON: what another version adds is left out, and nothing of it is unpickled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import platform
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final, Protocol

import numpy as np

from aiograd.dist.registry import ContextRegistry
from aiograd.errors import AiogradError, NotAllowed, UnknownWorker
from aiograd.observe import Part, blocked
from aiograd.observe.snapshot import (
    HIDDEN,
    LOST,
    SILENT,
    Data,
    TallyRow,
    WorkerRow,
    as_dict,
    from_json,
    of_partner,
)
from aiograd.observe.stacks import all_stacks
from aiograd.observe.tables import Members, Tables, loop_name
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.observe import tally
from aiograd.rpc.observe.host import host_name, memory, processor_time
from aiograd.rpc.observe.profile import Profile, set_profiles
from aiograd.rpc.observe.watchdog import Watchdog
from aiograd.rpc.scope import current, current_guest
from aiograd.wire.handshake import VERSION as WIRE_VERSION

TIMEOUT: Final = 2.0  # seconds for all answers; one that hangs is looked at in half a second more
_HOST_TIMEOUT: Final = 0.5
_LONGEST: Final = 60.0
_PARTNER: Final = "it is a partner, and is not asked"
LONGEST_RECORDING: Final = 3600.0  # seconds; a `Profile` has its own limit of spans


class Membership(Members, Protocol):
    """What taking a snapshot needs of the membership."""

    @property
    def peers(self) -> Sequence[PeerInfo]:
        """All members, this one included, in order of rank."""

    @property
    def lost_peers(self) -> Sequence[tuple[PeerInfo, str]]:
        """Workers that were lost and did not come back, and why."""

    @property
    def leader(self) -> PeerInfo:
        """The coordinator."""


class Snapshot(Data):
    """What a cluster is doing: plain data, and `to_json()`. Await it to ask other workers, too.

    `workers`, `links`, `pending`, `running`, `references`, `contexts`, `passes` and `collectives`
    are lists of rows; `version` says what their fields mean. `calls` has both ends of a call in
    one row.

        >>> snapshot = await ag.inspect()
        >>> [(row.name, row.state) for row in snapshot.workers]
        [('worker0', 'running'), ('worker1', 'running'), ('driver', 'running')]
    """

    __slots__ = ("_ask",)

    def __init__(self, data: Data, ask: Callable[[], Coroutine[Any, Any, Data]] | None) -> None:
        super().__init__(*(getattr(data, name) for name in Data.__slots__))
        self._ask = ask

    def __await__(self) -> Generator[Any, None, Snapshot]:
        if self._ask is None:
            return self
            yield
        found = yield from self._ask().__await__()
        return Snapshot(found, None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, texts and numbers; `calls` as well."""
        return {**super().to_dict(), "calls": [as_dict(row) for row in self.calls]}

    def __repr__(self) -> str:
        names = ", ".join(row.name for row in self.workers)
        more = "; await it to ask the others" if self._ask is not None else ""
        calls = len(self.pending)
        return f"<Snapshot of {names or 'nobody'}: {calls} calls pending{more}>"


class Inspector:
    """Answers and asks, for one worker."""

    def __init__(
        self,
        agent: Agent,
        members: Membership | None,
        counters: Callable[[], dict[str, int]],
        began: float,
    ) -> None:
        self._agent, self._members = agent, members
        self._counters = counters  # those of `debug_info`
        self._began = began  # loop time

    # ── this worker ─────────────────────────────────────────────────────────────────────────────

    def here(self, viewer: PeerInfo | None = None, *, counting: bool = False) -> Data:
        """Read the tables of this worker. On the loop only.

        `counting` lets it count calls for some minutes from now, and gives what it has counted.
        """
        data = Tables(self._agent, self._members, viewer).read()
        data.taken, data.by = time.time(), self._agent.name
        data.workers = [self._row(viewer)]
        if counting and viewer is None:  # a partner sees no functions, nor may it slow down calls
            data.tallies = _tallies(self._agent.name, tally.counting(self._agent).renew())
        data.reconcile()
        return data

    def _row(self, viewer: PeerInfo | None) -> WorkerRow:
        agent = self._agent
        row = WorkerRow(agent.name, agent.rank)
        if viewer is not None:
            row.state, row.why = HIDDEN, "it shows a partner nothing but what is the partner's"
            return row
        watchdog: Watchdog | None = agent.parts.get(Watchdog)
        row.incarnation, row.host, row.pid = agent.incarnation.hex(), host_name(), agent.process
        row.memory, row.cpu = memory(), processor_time()
        row.lag = watchdog.lag if watchdog is not None else None
        row.threads = threading.active_count()
        row.age = agent.loop.time() - self._began
        row.counters, row.limits = self._counters(), agent.limits.as_dict()
        row.started = agent.started
        registry: ContextRegistry | None = agent.parts.get(ContextRegistry)
        row.steps = 0 if registry is None else registry.steps
        row.versions = versions(agent.loop)
        members = self._members
        row.coordinator = members is not None and members.leader.incarnation == agent.incarnation
        return row

    # ── other workers ───────────────────────────────────────────────────────────────────────────

    async def ask(
        self, names: Iterable[str] | None, timeout: float = TIMEOUT, *, counting: bool = False
    ) -> Data:
        """Take a snapshot of several workers, by default of all; ends within `timeout` + 0.5 s."""
        agent = self._agent
        peers, gone = self._wanted(names)
        data = Data(time.time(), agent.name)
        parts = await asyncio.gather(*(self._part(peer, timeout, counting) for peer in peers))
        for part in parts:
            data.add(part)
        for peer, why in gone:
            row = WorkerRow(peer.name, peer.rank, LOST, why, peer.incarnation.hex())
            data.workers.append(row)
        data.reconcile()
        await self._explain(data, peers)
        data.workers.sort(key=lambda row: (row.rank, row.name))
        return data

    def _wanted(
        self, names: Iterable[str] | None
    ) -> tuple[list[PeerInfo], list[tuple[PeerInfo, str]]]:
        """Return the members that are meant, and the lost ones."""
        if isinstance(names, str):
            names = [names]
        members = self._members
        peers = [self._agent.info] if members is None else list(members.peers)
        gone = [] if members is None else list(members.lost_peers)
        if names is None:
            return peers, gone
        wanted = {getattr(name, "name", name) for name in names}
        known = {peer.name for peer in peers} | {peer.name for peer, _ in gone}
        if wanted - known:
            raise UnknownWorker(str(min(wanted - known)), tuple(sorted(known)))
        gone = [(peer, why) for peer, why in gone if peer.name in wanted]
        return [peer for peer in peers if peer.name in wanted], gone

    async def _part(self, peer: PeerInfo, timeout: float, counting: bool) -> Data:
        agent = self._agent
        if peer.incarnation == agent.incarnation:
            return self.here(counting=counting)
        began = agent.loop.time()
        try:
            answer = await agent.request(peer, "inspect", counting, timeout=timeout)
            part = from_json(answer)
            if agent.restricts(peer):
                part = of_partner(part, peer.name, peer.rank, peer.incarnation.hex())
        except Exception as error:  # whatever a worker answers, the others are shown
            row = WorkerRow(peer.name, peer.rank, SILENT, incarnation=peer.incarnation.hex())
            row.why = f"no answer within {timeout:g} s"
            if not isinstance(error, TimeoutError):
                row.why = str(error)
            return Data(workers=[row])
        for row in part.workers:
            row.round_trip = agent.loop.time() - began
        return part

    async def _explain(self, data: Data, peers: Sequence[PeerInfo]) -> None:
        """Ask the hosts of those who did not answer what they know."""
        silent = [row for row in data.workers if row.state == SILENT]
        if not silent:
            return
        wanted = [row.incarnation for row in silent]
        # One worker of each host is enough; this one's own is asked without a message.
        hosts = {host_name(): self._agent.info}
        for row in data.workers:
            if row.host and row.host not in hosts:
                hosts[row.host] = next(peer for peer in peers if peer.name == row.name)
        known: dict[str, Any] = {}
        answers = [self._host(peer, wanted) for peer in hosts.values()]
        for answer in await asyncio.gather(*answers):
            known |= {key: value for key, value in answer.items() if value}
        for row in silent:
            blocked.apply(row, known.get(row.incarnation, {}))

    async def _host(self, peer: PeerInfo, incarnations: list[str]) -> Mapping[str, Any]:
        if peer.incarnation == self._agent.incarnation:
            return self.host(incarnations)
        try:
            answer = self._agent.request(peer, "inspect.host", incarnations, timeout=_HOST_TIMEOUT)
            found = json.loads(await answer)
        except (AiogradError, OSError, ValueError, TypeError):
            return {}
        return found if isinstance(found, dict) else {}

    def host(self, incarnations: Iterable[str]) -> dict[str, Any]:
        """Return what this host knows of workers that do not answer."""
        return {each: blocked.describe(each, None) for each in incarnations}

    # ── services ────────────────────────────────────────────────────────────────────────────────

    def part_asked(self, sender: PeerInfo, counting: Any = False) -> str:
        """Answer with the part of this worker that the sender may see."""
        viewer = None if self._agent.trusts(sender) else sender
        return self.here(viewer, counting=counting is True).to_json()

    async def all_asked(self, sender: PeerInfo, names: Any = None, timeout: Any = TIMEOUT) -> str:
        """Answer with a snapshot of the cluster."""
        self._check(sender)
        timeout = min(max(float(timeout), 0.1), _LONGEST)
        wanted = None if names is None else [str(name) for name in names]
        return (await self.ask(wanted, timeout)).to_json()

    def host_asked(self, sender: PeerInfo, incarnations: Any) -> str:
        """Answer what this host knows of workers."""
        self._check(sender)
        return json.dumps(self.host([str(each) for each in incarnations]))

    def stacks_asked(self, sender: PeerInfo) -> str:
        """Answer with the stacks of tasks and threads."""
        self._check(sender)
        return json.dumps(all_stacks(self._agent.loop))

    async def stacks(
        self, names: Iterable[str] | None, timeout: float = TIMEOUT
    ) -> dict[str, list[dict[str, Any]] | str]:
        """Return the stacks of several workers; a text where one cannot be had."""
        peers, _ = self._wanted(names)

        async def one(peer: PeerInfo) -> list[dict[str, Any]] | str:
            if peer.incarnation == self._agent.incarnation:
                return all_stacks(self._agent.loop)
            if self._agent.restricts(peer):
                return _PARTNER
            try:
                answer = self._agent.request(peer, "inspect.stacks", timeout=timeout)
                found: list[dict[str, Any]] = json.loads(await answer)
                return found
            except (AiogradError, OSError, ValueError) as error:
                known = self.host([peer.incarnation.hex()])[peer.incarnation.hex()]
                if known.get("stack"):
                    return [{"kind": "thread", "name": known["why"], "stack": known["stack"]}]
                return str(known.get("why") or error)

        found = await asyncio.gather(*map(one, peers))
        return {peer.name: each for peer, each in zip(peers, found, strict=True)}

    async def all_stacks_asked(
        self, sender: PeerInfo, names: Any = None, timeout: Any = TIMEOUT
    ) -> str:
        """Answer with the stacks of several workers."""
        self._check(sender)
        wanted = None if names is None else [str(name) for name in names]
        return json.dumps(await self.stacks(wanted, min(max(float(timeout), 0.1), _LONGEST)))

    # ── recordings ──────────────────────────────────────────────────────────────────────────────

    async def record_asked(self, sender: PeerInfo, seconds: Any) -> str:
        """Record what is called here for some seconds; answer with the spans."""
        self._check(sender)
        agent, made = self._agent, Profile()
        seconds = min(max(float(seconds), 0.0), LONGEST_RECORDING)
        # As `start_profile`, but it need not be the last one that ends first.
        agent.profiles = [*(agent.profiles or ()), made]
        try:
            await asyncio.sleep(seconds)
        finally:
            set_profiles(agent, [each for each in agent.profiles or () if each is not made])
        # Wall time: the clocks of two hosts have no other common zero.
        offset = time.time() - agent.runtime.time()
        return json.dumps(
            [
                span._replace(start=span.start + offset, end=span.end + offset, detail=None)
                for span in made.events
            ]
        )

    async def record(self, seconds: float) -> dict[str, Any]:
        """Record on all workers at once; spans by worker, and why some gave none."""
        peers, _ = self._wanted(None)
        spans: dict[str, Any] = {}
        silent: dict[str, str] = {}

        async def one(peer: PeerInfo) -> None:
            try:
                if peer.incarnation == self._agent.incarnation:
                    answer = await self.record_asked(peer, seconds)
                elif self._agent.restricts(peer):
                    silent[peer.name] = _PARTNER
                    return
                else:
                    wait = seconds + TIMEOUT / 2
                    answer = await self._agent.request(
                        peer, "inspect.record", seconds, timeout=wait
                    )
                spans[peer.name] = json.loads(answer)
            except (AiogradError, OSError, ValueError) as error:
                silent[peer.name] = str(error)

        await asyncio.gather(*map(one, peers))
        return {"seconds": seconds, "spans": spans, "silent": silent}

    async def record_all_asked(self, sender: PeerInfo, seconds: Any) -> str:
        """Answer with the recordings of all workers."""
        self._check(sender)
        return json.dumps(await self.record(min(max(float(seconds), 0.0), LONGEST_RECORDING)))

    def _check(self, sender: PeerInfo) -> None:
        if not self._agent.trusts(sender):
            raise NotAllowed(f"{sender.name} may not look at this cluster", self._agent.name)


def _tallies(worker: str, counted: tally.Tally) -> list[TallyRow]:
    found = [("call", name, each) for name, each in counted.calls.items()]
    return [
        # Copies: a snapshot must not change afterwards.
        TallyRow(
            worker,
            kind,
            function,
            dict(each.outcomes),
            list(tally.BOUNDS),
            list(each.counts),
            each.total,
        )
        for kind, function, each in [*found, ("pass", "", counted.passes)]
    ]


def versions(loop: asyncio.AbstractEventLoop) -> dict[str, str]:
    """Return the versions that matter when workers do not understand each other."""
    return {
        "aiograd": _own_version(),
        "wire": str(WIRE_VERSION),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "loop": loop_name(loop),
    }


@functools.cache  # it reads a file
def _own_version() -> str:
    try:
        return metadata.version("aiograd")
    except metadata.PackageNotFoundError:
        return "unknown"


def inspect(names: Iterable[str] | None = None) -> Snapshot:
    """Take a snapshot: what this worker is doing, at once; awaited, what others are doing, too.

    `await ag.inspect()` asks all workers, `await ag.inspect(["worker1"])` some. It ends within
    2.5 s: a worker that does not answer has a row that says so, and what its host knows of it.
    Nothing is recorded for snapshots, so they cost nothing until one is taken. Restricted peers see
    their own links, calls, references and contexts only.

        >>> ag.inspect().workers[0].name
        'driver'
        >>> future = ag.rpc_async("worker1", asyncio.sleep, args=(60,))
        >>> call = (await ag.inspect()).pending[0]
        >>> call.caller, call.callee, call.function, call.budget
        ('driver', 'worker1', 'sleep', 60.0)
        >>> future.cancel()
        True
    """
    agent: Agent = current()
    inspector: Inspector = agent.parts[Part].inspector
    wanted = None if names is None else [names] if isinstance(names, str) else list(names)
    viewer = current_guest()

    async def ask() -> Data:
        if viewer is not None:
            return inspector.here(viewer)
        return await inspector.ask(wanted)

    if wanted is not None and all(getattr(name, "name", name) != agent.name for name in wanted):
        return Snapshot(Data(time.time(), agent.name), ask)
    return Snapshot(_on_loop(agent, lambda: inspector.here(viewer)), ask)


def _on_loop(agent: Agent, read: Callable[[], Data]) -> Data:
    """Read tables on the loop: from another thread, let the loop do it and wait."""
    if threading.get_ident() == agent.thread:
        return read()
    found: concurrent.futures.Future[Data] = concurrent.futures.Future()

    def answer() -> None:
        try:
            found.set_result(read())
        except Exception as error:
            found.set_exception(error)

    agent.from_thread(answer)
    return found.result(TIMEOUT)
