"""`Worker`: one named member of a cluster, in this process and on this loop.

The composition root, the one place that plugs the layers together: an `Agent`, the parts that other
layers attach to it, and the membership.

    WorkerPlan ──▶ Bootstrap ──▶ Agent ──▶ Member (+ Coordinator) ──▶ LAYERS ──▶ join
    (config.py)    sockets       calls     who is here                progress, references, autograd

`api.py` has the functions for a program that is one worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextvars import Token
from types import TracebackType
from typing import Any, TypeVar

from aiograd.autograd.op import OPS
from aiograd.cluster.config import WorkerPlan, plan_worker
from aiograd.cluster.engines.values import attach as attach_engine_values
from aiograd.cluster.joining.bootstrap import Bootstrap
from aiograd.cluster.joining.folders import is_listening
from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.membership.coordinator import Coordinator
from aiograd.cluster.membership.member import Member
from aiograd.dist import attach as attach_autograd
from aiograd.errors import RpcError, RRefError, WorkerClosed
from aiograd.observe import attach as attach_inspector
from aiograd.observe.notes import Notes
from aiograd.observe.runfolder import Registration, RunRecord, remove_dead_records
from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo, WorkerInfo
from aiograd.rpc.extension import FaultInjector
from aiograd.rpc.observe.watchdog import Watchdog
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.progress import attach as attach_progress
from aiograd.rpc.transport.network import is_local, is_loopback, split_tcp
from aiograd.rpc.transport.tls import TLS
from aiograd.rref import attach as attach_references

__all__ = ["Worker", "run_to_completion"]

_log = logging.getLogger("aiograd.cluster")
T = TypeVar("T")

# What is attached to every agent, in this order: a layer uses those before it. So parts settle and
# close in the opposite order.
LAYERS: tuple[Callable[[Agent], Any], ...] = (
    attach_progress,
    attach_references,
    attach_autograd,
    attach_engine_values,
)

INVITING = 8  # members whose addresses an invitation has
# Seconds between two wake-ups of an idle loop: a notebook kernel notices an interrupt only when its
# loop wakes.
TICK = 0.5


class Worker:
    """One member of a cluster: `async with ag.Worker("a", rank=0, ...) as worker:`.

    Arguments that are not given come from the environment. Entering returns when the worker is a
    member and current; leaving is a graceful `close`, or an immediate one if the block failed.

        >>> async with ag.Worker("alone", rank=0, world_size=1) as worker:
        ...     print(worker.name, await ag.rpc_async("alone", abs, args=(-1,)))
        alone 1
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
    def from_plan(cls, plan: WorkerPlan) -> Worker:
        """Make a worker from a plan instead of arguments and environment."""
        worker = cls.__new__(cls)
        worker._set_up(plan)
        return worker

    def _set_up(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._agent: Agent | None = None
        self._member: Member | None = None
        self._coordinator: Coordinator | None = None  # if this worker is the coordinator
        self._bootstrap = Bootstrap(plan, os.environ)
        self._parts: list[Any] = []  # what `LAYERS` attached
        # Made when closing begins; it ends when all is closed. A second `close` waits for it.
        self._closed: asyncio.Future[None] | None = None
        self._token: Token[Agent | None] | None = None  # resets the current worker
        self._left: asyncio.Future[str] | None = None  # made when somebody asks; see `left`
        self._why_left = ""  # known when all is closed
        self._tick: asyncio.TimerHandle | None = None
        self._signals: list[int] = []  # on which it leaves
        self._leaves_on: int | None = None  # the one that came
        self._watchdog: Watchdog | None = None
        self._registration: Registration | None = None  # in the run folder

    # ── what it is ──────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """The name, unique in the cluster; it can be read before the start and after the end.

        "" before the start, if the coordinator is to assign one.
        """
        return self._plan.name if self._agent is None else self._agent.name

    @property
    def rank(self) -> int:
        """The rank, unique in the cluster; WorkerClosed before the start and after the end."""
        return self.agent.rank

    @property
    def options(self) -> Options:
        """The options that the worker was made with."""
        return self._plan.options

    @property
    def agent(self) -> Agent:
        """The agent that makes and serves calls; WorkerClosed if the worker does not run."""
        if self._agent is None or (self._closed is not None and self._closed.done()):
            raise WorkerClosed(f"worker {self.name!r} is not running", self.name)
        return self._agent

    @property
    def member(self) -> Member:
        """The cluster as this worker sees it; WorkerClosed if the worker does not run."""
        self.agent  # noqa: B018 - raises when there is none
        assert self._member is not None
        return self._member

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator's part of this worker; RpcError if another worker is the coordinator."""
        self.agent  # noqa: B018 - raises when there is none
        if self._leads is None:
            raise RpcError(f"{self.name} is not the coordinator of this cluster")
        return self._leads

    @property
    def running(self) -> bool:
        """Tell whether the worker has been started and is not closed yet."""
        return self._agent is not None and (self._closed is None or not self._closed.done())

    @property
    def info(self) -> WorkerInfo:
        """The worker as other members see it."""
        return self.agent.info.info

    @property
    def addresses(self) -> tuple[str, ...]:
        """What others are told to dial; WorkerClosed if the worker does not run."""
        return self.agent.info.addresses

    @property
    def left(self) -> asyncio.Future[str]:
        """A future that ends with the reason when this worker has left its cluster.

        >>> async with ag.Worker("alone", rank=0, world_size=1) as worker:
        ...     left = worker.left
        >>> await left
        'it was closed'
        """
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
            if self._why_left:
                self._left.set_result(self._why_left)
        return self._left

    def whereabouts(self) -> tuple[str, str]:
        """Return the name of this host, and what workers share that share its loopback."""
        return self._bootstrap.whereabouts()

    def invitation(self) -> Invitation:
        """Make what another process needs to join this cluster, its secret included.

        RpcError if the world has a fixed size. Hand it only to those who may run code here.
        """
        if self.member.world_size is not None:
            raise RpcError(
                f"this is a static world of {self.member.world_size}, which nobody can join: leave "
                "world_size out to start an open cluster"
            )
        return self._invitation()

    def _invitation(self) -> Invitation:
        member, agent = self.member, self.agent
        own = agent.info
        first = own if member.coordinator is None else member.coordinator
        known = {peer.incarnation: peer for peer in (first, own, *member.peers)}
        # A newcomer tries one after the other; a few are enough to find one that is alive.
        told = [
            address
            for peer in list(known.values())[:INVITING]
            for address in peer.addresses
            if peer.locality == own.locality or not is_local(address)
        ]
        terms = "none" if self.options.allow_plaintext else "secret"
        if isinstance(self.options.tls, TLS):
            terms = "certificates"
        return Invitation(
            addresses=tuple(told),
            cluster=agent.identity.cluster.hex(),
            secret=self._bootstrap.secret,
            tls=terms,
            host=own.host,
            locality=own.locality,
        )

    @property
    def faults(self) -> FaultInjector | None:
        """The fault injector for the messages this worker sends; see `aiograd.testing`."""
        return self.agent.fault_injector

    @faults.setter
    def faults(self, faults: FaultInjector | None) -> None:
        """Use another fault injector from the next message on; None for none."""
        self.agent.fault_injector = faults

    def get_worker_info(self, name_or_rank: str | int | None = None) -> WorkerInfo:
        """Look a member up; without an argument, this one."""
        if name_or_rank is None:
            return self.info
        return self.agent.directory.find(name_or_rank).info

    def workers(self) -> list[WorkerInfo]:
        """List the members, in order of rank; `suspect` ones are silent, or lost to this worker."""
        suspects = self.agent.links.suspects()
        return [peer.info_as(suspect=peer.name in suspects) for peer in self.member.peers]

    def debug_info(self) -> dict[str, int]:
        """Give the worker's counters; all are 0 at rest, except `workers`."""
        # `counters`, `settle` and `close` are optional for a part: layers need not know this class.
        found = {"workers": len(self.member.peers), **self.agent.links.counters()}
        for part in self._parts:
            counters = getattr(part, "counters", None)
            if counters is not None:
                found.update(counters())
        return found

    def __reduce__(self) -> Any:
        raise TypeError("a Worker cannot travel: its own is ag.current_worker()")

    def __repr__(self) -> str:
        state = "running" if self.running else "closed" if self._closed else "not started"
        known = self._plan.rank if self._agent is None else self._agent.rank
        rank = "" if known is None else f" rank={known}"
        return f"<Worker {self.name!r}{rank} {state}>"

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    async def start(self, invite: Callable[[Invitation], None] | None = None) -> Worker:
        """Join the cluster; if that fails or is cancelled, nothing is left open.

        A coordinator calls `invite` as soon as others can join, before it waits for them.
        """
        if self._agent is not None:
            raise RpcError(f"worker {self.name!r} was started before; make another one")
        try:
            await self._start(invite)
        except BaseException:  # a cancellation, too: sockets and the file must go
            # Not running any more, and a `close` that follows has nothing to do.
            self._closed = asyncio.get_running_loop().create_future()
            self._closed.set_result(None)
            await self._tear_down([])
            raise
        return self

    async def _start(self, invite: Callable[[Invitation], None] | None) -> None:
        plan = self._plan
        # Operations are callable by name on every worker; rpc itself knows no tensors.
        agent, coordinator = await self._bootstrap.open(OPS)
        self._agent = agent
        scope.closed(agent)  # listening, but current only when it is a member
        agent.parts[Worker] = self
        if coordinator is not None:
            agent.directory.add(coordinator)
            if plan.coordinator is not None and plan.network is None:
                # A local cluster: the coordinator started the others, and announces how they end.
                leader = coordinator.incarnation
                agent.dialer.exit_is_reported = lambda peer: peer.incarnation != leader
        self._member = Member(agent, plan.world_size, coordinator)
        self._member.take_over = self._take_over
        self._member.make_probe = self._bootstrap.make_probe
        if coordinator is None:
            # A cluster that a driver leads ends with it.
            elects = plan.rendezvous is not None and plan.world_size is None
            self._coordinator = Coordinator(self._member, elects)
        for attach in LAYERS:
            self._parts.append(attach(agent))
        attach_inspector(agent, self._member, self.debug_info)
        if plan.watch:  # before joining: a member can be called at once
            notes = Notes(agent.incarnation) if plan.network is None else None
            self._watchdog = agent.parts[Watchdog] = Watchdog(agent, notes)
            self._watchdog.start()
            if plan.background:
                agent.links.on_rest = self._watchdog.rest
        if plan.network is None:  # before joining, too: others of this user can find a member
            # Once for all workers of a local cluster: each would read the files of all others.
            if plan.coordinator is None:
                remove_dead_records()
            self._registration = Registration(self._run_record(agent, self._member))
        if self._coordinator is None:
            with self._bootstrap.refusal_for_loss():
                await self._member.join(plan.join_timeout)
            assert coordinator is not None
            _move_to_unix_socket(agent, coordinator)
        else:
            if invite is not None:
                invite(self._invitation())
            await self._start_cluster(self._coordinator)
        if not plan.background:
            self._keep_waking()

    def _run_record(self, agent: Agent, member: Member) -> RunRecord:
        plan, leader = self._plan, member.leader
        leads = leader.incarnation == agent.incarnation
        # Only a secret that was generated: one that a user gave is the user's to hand out.
        generated = leads and plan.secret is not None and plan.options.secret is None
        file = plan.options.secret_file
        return RunRecord(
            name=self.name,
            rank=agent.rank,
            incarnation=agent.incarnation.hex(),
            cluster=leader.incarnation.hex(),
            pid=os.getpid(),
            addresses=agent.info.addresses,
            coordinator=leads,
            secret=plan.secret.hex() if generated and plan.secret is not None else None,
            secret_file=os.path.abspath(file) if isinstance(file, str | os.PathLike) else None,
            rendezvous=None if plan.rendezvous is None else str(plan.rendezvous.address),
            program=" ".join(sys.argv)[:200],
            started=time.time(),
        )

    def _take_over(self, term: int, lost: PeerInfo, why: str) -> None:
        """Become the coordinator in place of one that was lost."""
        self._coordinator = Coordinator.succeed(self.member, lost, why)
        self._bootstrap.lead_on(self.agent)

    @property
    def _leads(self) -> Coordinator | None:
        """The coordinator's part of this worker, while it is the coordinator."""
        coordinator = self._coordinator
        return None if coordinator is None or coordinator.resigned else coordinator

    async def _start_cluster(self, coordinator: Coordinator) -> None:
        """Join as the coordinator; if the start is refused, let all ranks get the reason."""
        try:
            await coordinator.start(self._plan.join_timeout)
        except RpcError as error:
            in_file = self._bootstrap.publish_refusal(str(error), coordinator.refused_ranks)
            # Late ranks read the file, if there is one. Otherwise only this worker can tell them.
            await coordinator.wait_for_refused(0.0 if in_file else self.options.grace)
            raise

    def make_current(self) -> None:
        """Make this worker the current one, in this context and in those that have none."""
        # `closed` first: `opened` then puts it last, even if it was in the list before.
        scope.closed(self.agent)
        scope.opened(self.agent)
        self._token = scope.use(self.agent)

    def _keep_waking(self) -> None:
        self._tick = self.agent.loop.call_later(TICK, self._keep_waking)

    async def __aenter__(self) -> Worker:
        if not self.running:  # `async with await ag.join(...)`: it is
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
        """Stay until the coordinator dismisses this worker (True) or is lost; then close.

        A worker that somebody closes has left as well: True.
        """
        graceful, timeout = False, None
        dismissed, left = self.member.dismissed, self.left
        try:
            # Not cancelled with `serve`: the futures belong to the member, and outlive it.
            ends: list[asyncio.Future[Any]] = [dismissed, left]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            graceful = True
            if dismissed.done():
                graceful, timeout, _ = dismissed.result()
        finally:
            await self.close(graceful, timeout)
        return graceful

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────

    def leave_on(self, *signals: int) -> None:
        """Leave gracefully when this process gets one of these signals, then end it with 128 + n.

        For SIGTERM of Slurm and Kubernetes, which kill what has not ended after a grace period;
        leaving takes `Options.grace` + 1 s at most. Then the main task is cancelled, so `finally`
        clauses run. More signals of the kind change nothing: schedulers send several. Only on the
        loop of the main thread, as with `loop.add_signal_handler`; closing the worker in another
        way removes the handlers.
        """
        loop = self.agent.loop
        self.agent.here()
        for number in signals:
            loop.add_signal_handler(number, self._leave_and_exit, number)
            self._signals.append(number)

    def _leave_and_exit(self, number: int) -> None:
        if self._leaves_on is not None:
            return
        self._leaves_on = number
        _log.warning("%s: leaves on %s", self.name, signal.Signals(number).name)
        closing = self.agent.loop.create_task(self.close())
        # In a callback: a loop passes SystemExit on, and what runs it cancels all tasks.
        closing.add_done_callback(lambda _: sys.exit(128 + number))

    async def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leave the cluster, within `timeout` (default `Options.grace`) + 1 s.

        Graceful: wait until all members want to leave and no call is under way anywhere. Failures
        of peers are logged; what this worker leaked itself is raised under `strict_leaks`.
        """
        if timeout is not None and timeout != 0:
            check_timeout(timeout)
        if self._agent is None:
            return
        self._agent.here()  # an error in another loop or thread, or in a forked child
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = closed = self._agent.loop.create_future()
        grace = self.options.grace if timeout is None else timeout
        leaks: list[RRefError] = []
        try:
            if graceful:
                await self._leave(grace, leaks)
        finally:
            # Also if the graceful part was cancelled: closing is not optional from here on.
            try:
                await self._tear_down(leaks)
            finally:
                closed.set_result(None)
                self._say_left()
        if leaks:
            raise leaks[0]

    def _say_left(self) -> None:
        dismissed = self._member.dismissed if self._member is not None else None
        told = dismissed is not None and dismissed.done() and not dismissed.cancelled()
        self._why_left = dismissed.result().why if dismissed and told else "it was closed"
        if self._left is not None and not self._left.done():
            self._left.set_result(self._why_left)

    async def _leave(self, grace: float, leaks: list[RRefError]) -> None:
        """Leave gracefully, or log why that was not possible."""
        agent, member = self._agent, self._member
        if agent is None or member is None:
            return
        deadline = agent.loop.time() + grace
        try:
            async with asyncio.timeout_at(None if grace == math.inf else deadline):
                await self._finish_calls(agent, member, deadline, leaks)
                await self._leave_roster(member)
        except TimeoutError:
            _log.warning("%s: left after %g s without waiting any longer", self.name, grace)
        except RpcError as error:
            _log.warning("%s: left without waiting for the others: %s", self.name, error)

    async def _finish_calls(
        self, agent: Agent, member: Member, deadline: float, leaks: list[RRefError]
    ) -> None:
        """Return when no call is under way: anywhere if all leave together, else here."""
        coordinator = self._leads
        if coordinator is not None and member.world_size is None:
            # In a static world each member is closed by its own program; in an open one they serve
            # until they are dismissed.
            left = max(deadline - agent.loop.time(), 0.0)
            coordinator.dismiss(member.others, together=True, timeout=left)
        report = member.report if coordinator is None else coordinator.report
        together = member.leaves_together
        if together:
            await report(0, 0)  # round 0: all members want to leave
        # After round 0: before it, programs of other members may still make references to values
        # of this worker.
        for part in reversed(self._parts):
            settle = getattr(part, "settle", None)
            if settle is not None:
                try:
                    await settle(deadline)
                except RRefError as error:
                    leaks.append(error)  # leaked here; raised when everything is closed
        # `TerminationDetector` has the argument why one round without calls is not enough.
        while True:
            await agent.links.drain(deadline)
            if not together or await report(agent.links.outstanding(), agent.started):
                break

    async def _leave_roster(self, member: Member) -> None:
        if self._leads is None:
            await member.leave()
        else:
            # Members that lose their coordinator take that for a failure: it goes last.
            await member.wait_alone()

    async def _tear_down(self, leaks: list[RRefError]) -> None:
        """Close everything that is open, even if this is cancelled meanwhile."""
        if self._tick is not None:
            self._tick.cancel()
        if self._leaves_on is None:  # else until the process ends: `finally` clauses may run
            while self._signals:
                self.agent.loop.remove_signal_handler(self._signals.pop())
        if self._watchdog is not None:
            self._watchdog.close()
        if self._registration is not None:
            self._registration.close()
        if self._token is not None:
            with contextlib.suppress(ValueError):  # closed in another context than it was entered
                scope.AGENT.reset(self._token)
            self._token = None
        if self._agent is not None:
            scope.closed(self._agent)
        await run_to_completion(self._close_parts(leaks))

    async def _close_parts(self, leaks: list[RRefError]) -> None:
        # From the top layer down to the sockets: each part may still use those below it.
        cluster = self._member, self._coordinator
        for part in (*reversed(self._parts), *cluster, self._agent, self._bootstrap):
            close = getattr(part, "close", None)
            if close is None:
                continue
            try:
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
            except RRefError as error:
                leaks.append(error)
            except Exception:
                # A part that fails to close must not keep the sockets open.
                _log.exception("%s: could not close %s", self.name, type(part).__name__)
        self._parts = []


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; a cancellation of the caller takes effect afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # `wait`, not `await task`: its exception would replace the cancellation.
        await asyncio.wait([task])
        raise


def _move_to_unix_socket(agent: Agent, coordinator: PeerInfo) -> None:
    """Let the session with a coordinator that was found at a loopback port go on over its socket.

    Any user of this host could be in between at a port, and read; nobody at a socket in a folder of
    this user. It takes half the time, too.
    """
    link, member = agent.links.get(coordinator.incarnation), agent.directory.get(coordinator.name)
    if link is None or member is None or not link.address.startswith("tcp:"):
        return
    if not is_loopback(split_tcp(link.address)[0]) or agent.options.transport == "tcp":
        return
    for address in member.addresses if agent.options.resume else ():
        # Loopback may be shared, and the file system not, as between containers.
        if address.startswith("unix:") and is_listening(address.removeprefix("unix:")):
            link.move(address)
            return
