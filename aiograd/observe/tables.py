"""One worker's part of a snapshot, read from the tables that are there anyway.

    agent.links      links, pending calls (`caller`), running calls (`callee`)
    RRefs            values and who holds them
    ContextRegistry  contexts, and passes with whom they wait for
    Members          barriers and gathers at their root (the cluster layer has them)

Nothing is kept for this: the age of a call follows from its deadline and its budget, its parent
from the scope that it was made in, and its line from the stack of its task or thread.

The states of a running call:

    running    its coroutine or thread is in it; `at` says where
    queued     it waits for a thread
    arguments  it waits for references or arrays among its arguments
    turn       it waits for the call `behind` it, of the same serial object
    held       it waits until its caller has read its answers

A peer that is not trusted sees what it has made itself: its link, its calls and those to it, what
it holds, contexts that it takes part in. It sees no lines, no names of others, and no stacks.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from time import perf_counter
from types import FrameType
from typing import Any, Final, Protocol, cast

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.backward.active import ActivePass
from aiograd.dist.backward.engine import Engine
from aiograd.dist.registry import ContextRegistry
from aiograd.observe.snapshot import (
    CallRow,
    CollectiveRow,
    ContextRow,
    Data,
    LinkRow,
    PassRow,
    ReferenceRow,
)
from aiograd.observe.stacks import (
    Place,
    as_line,
    place_of,
    task_places,
    users_line,
    users_place,
    waiting_tasks,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.callee.execution import AGES, invocation_in
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.future import Future
from aiograd.rpc.link.link import Link
from aiograd.rpc.scope import SCOPE
from aiograd.rref.refcount.records import OwnerRecord
from aiograd.rref.registry import RRefs
from aiograd.wire.messages import CALL

SERVICES: Final = "inspect"  # those of this package begin with it, and are not shown
_KINDS: Final = frozenset({"call", "op", "remote"})
# Objects that are looked into for the sizes of all values together: a snapshot must not take longer
# because a value is a large tree.
_OBJECTS: Final = 50_000
_DEEP: Final = 4
_TCP_INFO_RTT: Final = 68  # where `tcpi_rtt` is in Linux's `struct tcp_info`: u32, microseconds


class Members(Protocol):
    """What the tables need of the membership."""

    def gathers(self) -> Iterable[tuple[list[str], list[str]]]:
        """Return group and arrived members of gathers whose root this worker is."""


def key_of(caller: str, callee: str, number: int) -> str:
    """Return the key of a call: the same at its caller and at its callee."""
    return f"{caller}>{callee}#{number}"


class Tables:
    """Reads the tables of one worker, once, for one viewer. On the loop only."""

    def __init__(self, agent: Agent, members: Members | None, viewer: PeerInfo | None) -> None:
        self._agent, self._members = agent, members
        # None: somebody who may see everything.
        self._viewer = viewer
        self._now = agent.loop.time()
        self._links = list(agent.links.all())
        # By the id of a future: the task that awaits it.
        self._tasks = {} if viewer is not None else waiting_tasks(agent.loop)
        self._parents: dict[int, str] = {}  # by the id of a scope or task: the call that runs in it
        self._names = {peer.incarnation: peer.name for peer in agent.directory.members.values()}
        self._names |= {link.peer.incarnation: link.peer.name for link in self._links}
        self._names[agent.incarnation] = agent.name

    def read(self) -> Data:
        """Return everything but the row of the worker itself."""
        data = Data()
        # First: pending calls name the calls that made them.
        data.running = list(self._running())
        data.pending = list(self._pending())
        data.links = [self._link(link) for link in self._links if self._concerns(link.peer)]
        data.references = self._references()
        registry: ContextRegistry | None = self._agent.parts.get(ContextRegistry)
        if registry is not None:
            data.contexts = list(self._contexts(registry))
            data.passes = list(self._passes(registry))
        if self._members is not None and self._viewer is None:
            data.collectives = self._collectives(self._members)
        return data

    def _concerns(self, peer: PeerInfo) -> bool:
        return self._viewer is None or peer.name == self._viewer.name

    def _sees(self, text: str) -> str:
        """Return a line of code, for those who may know it."""
        return text if self._viewer is None else ""

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _running(self) -> Iterator[CallRow]:
        threads = self._threads() if self._viewer is None else {}
        turns: dict[int, str] = {}  # by the id of a queue: the call whose turn it is
        found: list[tuple[Invocation, CallRow]] = []
        for link in self._links:
            held = [invocation for _, invocation in link.callee.held]
            for invocation in [*link.callee.execution.running.values(), *held]:
                if invocation.target.name.startswith(SERVICES):
                    continue
                row = self._invocation(link, invocation, threads)
                if invocation.abandoned:
                    row.state = "abandoned"
                elif invocation in held:
                    row.state = "held"
                scope = None if invocation.context is None else invocation.context.get(SCOPE)
                if scope is not None and scope.call is not None:
                    self._parents[id(scope.call)] = row.key
                if invocation.task is not None:
                    self._parents[id(invocation.task)] = row.key
                queue = getattr(invocation.turn, "queue", None)
                if queue is not None and getattr(invocation.turn, "first", False):
                    turns[id(queue)] = row.key
                found.append((invocation, row))
        for invocation, row in found:
            queue = getattr(invocation.turn, "queue", None)
            if queue is not None and turns.get(id(queue), row.key) != row.key:
                row.state, row.behind = "turn", self._sees(turns[id(queue)]) or None
        for link in self._links:  # threads that compute for nobody
            for _, row in threads_of(threads, link, self._agent.name, self._now):
                found.append((cast(Any, None), row))
        return (row for _, row in found if self._viewer is None or row.caller == self._viewer.name)

    def _invocation(
        self, link: Link, invocation: Invocation, threads: dict[int, tuple[Invocation, str]]
    ) -> CallRow:
        kind, task = "call" if invocation.kind == CALL else "service", invocation.task
        row = CallRow(
            key_of(link.peer.name, self._agent.name, invocation.id),
            link.peer.name,
            self._agent.name,
            invocation.target.name,
            "stream" if invocation.stream is not None else kind,
            "running",
            age=self._age(invocation),
            budget=invocation.budget if invocation.budget <= AGES else None,
        )
        if invocation.in_thread:
            found = threads.get(id(invocation))
            row.state = "running" if invocation.begun else "queued"
            row.at = found[1] if found is not None else ""
        elif task is not None:
            if getattr(task.get_coro(), "__name__", "") == "_wait_and_start":
                row.state = "arguments"
            elif self._viewer is None:
                row.at = as_line(users_place(task_places(task)))
        return row

    def _age(self, invocation: Invocation) -> float | None:
        if invocation.came:
            return self._now - invocation.came
        scope = None if invocation.context is None else invocation.context.get(SCOPE)
        if invocation.kind != CALL or scope is None or scope.deadline == math.inf:
            return None
        return max(0.0, self._now - (scope.deadline - invocation.budget))

    def _threads(self) -> dict[int, tuple[Invocation, str]]:
        """Find what threads run: the invocation, and the line it has reached."""
        found = {}
        for frame in sys._current_frames().values():
            places: list[Place] = []
            outer: FrameType | None = frame
            while outer is not None:
                invocation = invocation_in(outer)
                if invocation is not None:
                    line = as_line(users_place(reversed(places)))
                    found[id(invocation)] = (invocation, line)
                    break
                places.append(place_of(outer))
                outer = outer.f_back
        return found

    def _pending(self) -> Iterator[CallRow]:
        for link in self._links:
            if not self._concerns(link.peer):
                continue
            for future in list(link.caller.pending.values()):
                yield from self._future(link, future, "sent")
            for future in list(link.caller.window):
                yield from self._future(link, future, "waiting")

    def _future(self, link: Link, future: Future[Any], state: str) -> Iterator[CallRow]:
        info = future.info
        if info.name.startswith(SERVICES):
            return
        if info.began:
            age = self._now - info.began
        else:
            age = max(0.0, self._now - (info.deadline - info.seconds))
        # A call that waits has no number yet; its future tells it from others.
        number = info.id or -id(future)
        line = info.call_site.removeprefix("at ") if info.code is not None else ""
        kind = "stream" if info.stream is not None else info.label
        task = self._tasks.get(id(future))
        # A request of the library does not know who made it; the task that awaits it does.
        parent = self._parents.get(id(info.parent)) or self._parents.get(id(task), "")
        yield CallRow(
            key_of(self._agent.name, link.peer.name, number),
            self._agent.name,
            link.peer.name,
            info.name,
            kind if kind in _KINDS or kind == "stream" else "service",
            state,
            self._sees(line or users_line(task)),
            age=age,
            budget=info.seconds if info.seconds != math.inf else None,
            parent=self._sees(parent) or None,
        )

    # ── links ───────────────────────────────────────────────────────────────────────────────────

    def _link(self, link: Link) -> LinkRow:
        return LinkRow(
            self._agent.name,
            link.peer.name,
            link.state.value,
            self._sees(link.address or link.host),
            link.suspect,
            link.session.sent,
            link.session.received,
            link.outbox.size,
            sum(not each.info.name.startswith(SERVICES) for each in _under_way(link)),
            sum(
                not each.target.name.startswith(SERVICES)
                for each in link.callee.execution.running.values()
            ),
            _kernel_round_trip(link),
        )

    # ── references ──────────────────────────────────────────────────────────────────────────────

    def _references(self) -> list[ReferenceRow]:
        """Return values by line and type: ten thousand of one line are one row."""
        rrefs: RRefs | None = self._agent.parts.get(RRefs)
        if rrefs is None:
            return []
        rows: dict[tuple[str, str, str], ReferenceRow] = {}
        counts: dict[tuple[str, str, str], Counter[bytes]] = {}
        sizes = _Sizes()
        for record in list(rrefs.protocol.owner_table.records.values()):
            holders = record.forks.values()
            if self._viewer is not None and self._viewer.incarnation not in holders:
                continue
            file, line = record.call_site
            where = self._sees(f"{file}:{line}") if file else ""
            key = where, _type_name(record), _state(record)
            row = rows.get(key)
            if row is None:
                row = rows[key] = ReferenceRow(self._agent.name, *key[:2], 0, 0, key[2])
                counts[key] = Counter()
            row.count += 1
            row.size += sizes.of(record.value)
            counts[key].update(holders)
        for key, row in rows.items():
            for incarnation, count in counts[key].items():
                name = self._names.get(incarnation, "a lost worker")
                if self._viewer is None or name == self._viewer.name:
                    row.holders[name] = row.holders.get(name, 0) + count
        return sorted(rows.values(), key=lambda row: (-row.size, -row.count, row.line))

    # ── contexts and passes ─────────────────────────────────────────────────────────────────────

    def _contexts(self, registry: ContextRegistry) -> Iterator[ContextRow]:
        ranks = {peer.rank: peer.name for peer in self._agent.directory.members.values()}
        for context in registry.all():
            peers = {*context.recipients, *context.callers.values()}
            if self._viewer is not None:
                peers &= {self._viewer.name}
                if not peers:
                    continue
            opened = context.id >> 48
            # A copy: threads may add to it.
            edges = Counter(send.peer for send in list(context.sends.values()))
            yield ContextRow(
                self._agent.name,
                str(context.id),
                self._sees(ranks.get(opened, f"rank {opened}")),
                sorted(peers),
                len(context.sends),
                len(context.receives),
                self._sees(str(context.failure or "")),
                {name: count for name, count in edges.items() if name in peers},
            )

    def _passes(self, registry: ContextRegistry) -> Iterator[PassRow]:
        engine = cast(Engine, registry.engine)
        for active in engine.passes.all():
            # While a thread computes, the state is the thread's.
            state = active.state
            waits_for: Counter[str] = Counter()
            if not active.draining:
                waits_for.update(send.peer for send in list(state.awaited.values()))
            informed = {*state.informed.values(), *state.heard.values()}
            if self._viewer is not None:
                if self._viewer.name not in informed:
                    continue
                informed = {self._viewer.name}
                waits_for = Counter(
                    {name: waits_for[name] for name in waits_for if name in informed}
                )
            done = active.done
            yield PassRow(
                self._agent.name,
                str(state.context_id),
                str(state.number),
                state.originator.name if self._viewer is None else "",
                _pass_state(active),
                dict(waits_for),
                sorted(informed),
                perf_counter() - active.began,
                "" if done is None else users_line(self._tasks.get(id(done))),
            )

    # ── collectives ─────────────────────────────────────────────────────────────────────────────

    def _collectives(self, members: Members) -> list[CollectiveRow]:
        found = []
        for group, arrived in members.gathers():
            missing = [name for name in group if name not in arrived]
            if missing:
                found.append(CollectiveRow(self._agent.name, group, arrived, missing))
        return found


def _under_way(link: Link) -> list[Future[Any]]:
    return [*link.caller.pending.values(), *link.caller.window]


def threads_of(
    threads: dict[int, tuple[Invocation, str]], link: Link, worker: str, now: float
) -> Iterator[tuple[Invocation, CallRow]]:
    """Give the abandoned calls of a link whose threads still run."""
    execution = link.callee.execution
    if not execution.abandoned:
        return
    for invocation, line in threads.values():
        tracked = execution.running.get(invocation.id) is invocation
        if invocation.execution is execution and invocation.abandoned and not tracked:
            key = key_of(link.peer.name, worker, invocation.id)
            names = link.peer.name, worker, invocation.target.name
            row = CallRow(key, *names, state="abandoned", at=line, budget=None)
            yield invocation, row


def _pass_state(active: ActivePass) -> str:
    if active.draining:
        return "computing"
    return "complete" if active.state.complete and active.done is None else "waiting"


def _type_name(record: OwnerRecord) -> str:
    if record.error is not None:
        return type(record.error).__name__
    if not record.ready:
        return ""
    value = record.value
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__}{list(value.shape)} {value.dtype}"
    return type(value).__qualname__


def _state(record: OwnerRecord) -> str:
    return "failed" if record.error is not None else "ready" if record.ready else "creating"


class _Sizes:
    """Adds up the bytes of arrays in values, looking at a bounded number of objects."""

    def __init__(self) -> None:
        self._left = _OBJECTS

    def of(self, value: Any, depth: int = 0) -> int:
        """Return the bytes of the arrays in a value; of one without arrays its own size."""
        self._left -= 1
        if isinstance(value, Tensor):
            value = value.data
        if isinstance(value, np.ndarray):
            return value.nbytes
        if type(value).__module__ == "torch" and hasattr(value, "element_size"):
            return int(value.element_size() * value.nelement())
        if self._left < 0 or depth >= _DEEP:
            return sys.getsizeof(value, 0)
        total = sys.getsizeof(value, 0) if depth == 0 else 0
        if isinstance(value, dict):
            total += sum(self.of(each, depth + 1) for each in list(value.values())[:1000])
        elif isinstance(value, list | tuple | set | frozenset):
            total += sum(self.of(each, depth + 1) for each in list(value)[:1000])
        elif isinstance(value, str | bytes | bytearray):
            total = sys.getsizeof(value)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
            total += sum(self.of(each, depth + 1) for each in list(vars(value).values())[:1000])
        return total


def _kernel_round_trip(link: Link) -> float | None:
    """Return the round trip of a TCP connection as Linux measures it, in seconds."""
    connection = link.connection
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return None
    found = connection.transport.get_extra_info("socket")
    try:
        if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT + 4)
    except (OSError, AttributeError):
        return None
    if len(info) < _TCP_INFO_RTT + 4:
        return None
    return float(struct.unpack_from("I", info, _TCP_INFO_RTT)[0]) / 1e6


def loop_name(loop: asyncio.AbstractEventLoop) -> str:
    """Return the library that a loop is of."""
    return type(loop).__module__.partition(".")[0]
