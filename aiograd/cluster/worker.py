"""`Worker`: one named member of a cluster, in this process and on this loop.

The one place that plugs the layers together: an `Agent` that calls, the parts that other layers
attach to it, and the membership. Where the pieces come from is planned in `plan.py`; who is there
is `members.py`'s business. For the current worker there are functions in `scope.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Coroutine
from contextvars import Token
from types import TracebackType
from typing import Any, TypeVar

from aiograd.autograd.op import OPS
from aiograd.cluster.bootstrap import Premises
from aiograd.cluster.config import Plan, plan_worker
from aiograd.cluster.coordinator import Members
from aiograd.dist import attach as attach_autograd
from aiograd.errors import RpcError, RRefError, WorkerClosed
from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.extension import FaultInjector
from aiograd.rpc.observe.watchdog import Watchdog
from aiograd.rpc.options import Options, check_timeout
from aiograd.rref import attach as attach_references

_log = logging.getLogger("aiograd")
T = TypeVar("T")

# What is attached to every agent, in this order; parts settle and close in the opposite one.
LAYERS: tuple[Callable[[Agent], Any], ...] = (attach_references, attach_autograd)

TICK = 0.5  # seconds; a kernel sees an interrupt only when its loop wakes


class Worker:
    """One member of a cluster: `async with ag.Worker("a", rank=0, ...) as worker:`.

    What is not given comes from the environment. Entering returns when the worker is a member and
    current; leaving is a graceful `close`, or an immediate one if the block failed.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        rendezvous: str | None = None,
        options: Options | None = None,
    ) -> None:
        self._set_up(plan_worker(name, rank, world_size, rendezvous, options, os.environ))

    @classmethod
    def planned(cls, plan: Plan) -> Worker:
        """Make a worker from a plan instead of from arguments and environment."""
        worker = cls.__new__(cls)
        worker._set_up(plan)
        return worker

    def _set_up(self, plan: Plan) -> None:
        self._plan = plan
        self._agent: Agent | None = None
        self._members: Members | None = None
        self._premises = Premises(plan, os.environ)
        self._parts: list[Any] = []
        self._closed: asyncio.Future[None] | None = None  # made when closing begins
        self._token: Token[Agent | None] | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._watchdog: Watchdog | None = None

    # ── what it is ──────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        return self._plan.name

    @property
    def rank(self) -> int:
        return self.agent.rank

    @property
    def options(self) -> Options:
        return self._plan.options

    @property
    def agent(self) -> Agent:
        """The machinery; `WorkerClosed` before the start and after the end."""
        if self._agent is None or (self._closed is not None and self._closed.done()):
            raise WorkerClosed(f"worker {self.name!r} is not running", self.name)
        return self._agent

    @property
    def members(self) -> Members:
        self.agent  # noqa: B018 - raises when there is none
        assert self._members is not None
        return self._members

    @property
    def running(self) -> bool:
        return self._agent is not None and (self._closed is None or not self._closed.done())

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.rank)

    @property
    def faults(self) -> FaultInjector | None:
        """What goes wrong on purpose with the messages this worker sends; see `testing.faults`."""
        return self.agent.fault_injector

    @faults.setter
    def faults(self, faults: FaultInjector | None) -> None:
        self.agent.fault_injector = faults

    def get_worker_info(self, name_or_rank: str | int | None = None) -> WorkerInfo:
        """Look a member up; without an argument, this one."""
        if name_or_rank is None:
            return self.info
        return self.agent.directory.find(name_or_rank).info

    def workers(self) -> list[WorkerInfo]:
        """List the members, in order of rank; suspect are those that are silent, or lost to us."""
        suspects = self.agent.links.suspects()
        return [
            WorkerInfo(peer.name, peer.rank, peer.name in suspects) for peer in self.members.peers
        ]

    def debug_info(self) -> dict[str, int]:
        """Give the worker's counters; all of them are 0 at rest, except `workers`."""
        found = {"workers": len(self.members.peers), **self.agent.links.counters()}
        for part in self._parts:
            counters = getattr(part, "counters", None)
            if counters is not None:
                found.update(counters())
        return found

    def __repr__(self) -> str:
        state = "running" if self.running else "closed" if self._closed else "not started"
        rank = "" if self._plan.rank is None else f" rank={self._plan.rank}"
        return f"<Worker {self.name!r}{rank} {state}>"

    # ── coming ──────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Worker:
        """Join the cluster. When that fails or is cancelled, nothing is left open."""
        if self._agent is not None:
            raise RpcError(f"worker {self.name!r} was started before; make another one")
        try:
            await self._start()
        except BaseException:
            self._closed = asyncio.get_running_loop().create_future()
            self._closed.set_result(None)
            await self._tear_down([])
            raise
        return self

    async def _start(self) -> None:
        plan = self._plan
        agent, coordinator = await self._premises.open(OPS)
        self._agent = agent
        scope.closed(agent)  # started, but current only when it is a member
        agent.parts[Worker] = self
        if coordinator is not None:
            agent.directory.add(coordinator)
        self._members = Members(agent, plan.world_size, coordinator)
        for attach in LAYERS:
            self._parts.append(attach(agent))
        if plan.watch:  # before joining: a member can be called at once
            self._watchdog = Watchdog(agent)
            self._watchdog.start()
        await self._join(self._members)
        self._ticking()

    async def _join(self, members: Members) -> None:
        """Become a member. Rank 0 sees to it that whoever takes part hears why it cannot be."""
        try:
            await members.join(self._plan.patience)
        except RpcError as error:
            if members.leads:
                in_file = self._premises.leave_verdict(str(error), members.told)
                await members.see_off_refused(0.0 if in_file else self.options.grace)
            raise

    def make_current(self) -> None:
        """Let this worker be the current one, here and wherever no other is."""
        scope.closed(self.agent)
        scope.opened(self.agent)
        self._token = scope.use(self.agent)

    def _ticking(self) -> None:
        self._tick = self.agent.loop.call_later(TICK, self._ticking)

    async def __aenter__(self) -> Worker:
        await self.start()
        self.make_current()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(graceful=kind is None)

    async def serve(self) -> bool:
        """Stay until the coordinator dismisses this worker (True), or is gone; then close."""
        graceful, timeout = False, None
        try:
            graceful, timeout = await asyncio.shield(self.members.dismissed)
        finally:
            await self.close(graceful, timeout)
        return graceful

    # ── going ───────────────────────────────────────────────────────────────────────────────────

    async def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leave the cluster, within `timeout` (default `Options.grace`) + 1 s.

        Graceful: wait until all members want to leave and no call is under way anywhere. What peers
        do wrong meanwhile is logged; what this worker leaked is raised under `strict_leaks`.
        """
        if timeout is not None and timeout != 0:
            check_timeout(timeout)
        if self._agent is None:
            return
        self._agent.here()
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = closed = self._agent.loop.create_future()
        grace = self.options.grace if timeout is None else timeout
        trouble: list[RRefError] = []
        try:
            if graceful:
                await self._part_in_peace(grace, trouble)
        finally:
            try:
                await self._tear_down(trouble)
            finally:
                closed.set_result(None)
        if trouble:
            raise trouble[0]

    async def _part_in_peace(self, grace: float, trouble: list[RRefError]) -> None:
        agent, members = self._agent, self._members
        if agent is None or members is None:
            return
        deadline = agent.loop.time() + grace
        try:
            async with asyncio.timeout_at(None if grace == math.inf else deadline):
                await self._say_farewell(agent, members, deadline, trouble)
        except TimeoutError:
            _log.warning("%s: left after %g s without waiting any longer", self.name, grace)
        except RpcError as error:
            _log.warning("%s: left without waiting for the others: %s", self.name, error)

    async def _say_farewell(
        self, agent: Agent, members: Members, deadline: float, trouble: list[RRefError]
    ) -> None:
        if members.leads and members.world_size is None:
            members.dismiss(members.others, together=True, timeout=deadline - agent.loop.time())
        together = members.leaves_together
        if together:
            await members.report(0, 0)
        for part in reversed(self._parts):
            settle = getattr(part, "settle", None)
            if settle is not None:
                try:
                    await settle(deadline)
                except RRefError as error:
                    trouble.append(error)  # what we leaked ourselves; the rest is peers' doing
        while True:
            await agent.links.drain(deadline)
            if not together or await members.report(agent.links.outstanding(), agent.started):
                break
        await members.leave()
        if members.leads:
            await members.wait_alone()  # the others must not lose their leader before they go

    async def _tear_down(self, trouble: list[RRefError]) -> None:
        """Close everything that is open, even if this is cancelled meanwhile."""
        if self._tick is not None:
            self._tick.cancel()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._token is not None:
            with contextlib.suppress(ValueError):  # left in another context than entered
                scope.AGENT.reset(self._token)
            self._token = None
        if self._agent is not None:
            scope.closed(self._agent)
        await to_the_end(self._close_parts(trouble))

    async def _close_parts(self, trouble: list[RRefError]) -> None:
        for part in (*reversed(self._parts), self._members, self._agent, self._premises):
            close = getattr(part, "close", None)
            if close is None:
                continue
            try:
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
            except RRefError as error:
                trouble.append(error)
            except Exception:
                _log.exception("%s: could not close %s", self.name, type(part).__name__)
        self._parts = []


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Do something to its end; who is cancelled meanwhile is cancelled when it is done."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
