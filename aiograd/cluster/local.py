"""`LocalCluster`: workers on this machine, with this process as their driver and coordinator.

Workers run in processes of their own or, with `processes=False`, as tasks of this loop over an
in-process network. The driver decides names and ranks; otherwise it is an ordinary open cluster,
whose members leave together.

    LocalCluster    starts, scales, restarts and closes
    StartedWorker   one start of one worker: `SpawnedWorker`, `ForkedWorker` or `LoopWorker`
    Handle          a worker of the cluster for the user, to call it
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import itertools
import logging
import math
import os
import socket
import sys
import warnings
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, Protocol, TypeVar, overload

from aiograd._html import BLUE, GREEN, GREY, card, code, dot, table
from aiograd.cluster.config import DRIVER, JOIN_TIMEOUT, WorkerPlan, check_count, worker_names
from aiograd.cluster.folders import PrivateFolder
from aiograd.cluster.logs import serve_logs
from aiograd.cluster.processes.forkserver import ForkServer, can_fork, preloaded
from aiograd.cluster.processes.spawn import OutputLog, SpawnedWorker, describe_exit
from aiograd.cluster.worker import Worker, run_to_completion
from aiograd.errors import RpcError, UnknownWorker, WorkerClosed
from aiograd.rpc import api, scope
from aiograd.rpc.callee.exposure import exposing_modules
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.directory import PeerInfo, WorkerInfo
from aiograd.rpc.future import Future
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.transport.network import Network
from aiograd.rref import RRef, remote
from aiograd.wire.names import RANKS
from aiograd.wire.secrets import Secret

__all__ = ["Handle", "LocalCluster", "StartedWorker"]

_log = logging.getLogger("aiograd.cluster")
T = TypeVar("T")
P = ParamSpec("P")

SHOWN_LINES = 20  # of a failed worker's output, in the error
# Seconds for a worker to exit by itself after it has left, before it is killed. `close` promises to
# return within its timeout + 1 s; this is half of that second.
EXIT_GRACE = 0.5
# Seconds a loop polls after traffic: if every worker has a core of its own, and if some share one.
# Long enough to meet the reply of a function that runs in a thread of the peer.
SPIN, SHORT_SPIN = 500e-6, 300e-6


class StartedWorker(Protocol):
    """One start of one worker; all kinds look the same to the cluster."""

    plan: WorkerPlan
    log: OutputLog
    pid: int | None
    ended: asyncio.Future[int]  # with the exit code, when nothing of it is left

    def kill(self) -> None:
        """End it at once, without notice; `ended` follows."""


class LoopWorker:
    """A worker in this loop; what it prints, this process prints."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.log: OutputLog = OutputLog()
        self.pid: int | None = None
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        # A context of its own: the driver is current in this one, not this worker.
        self._task = loop.create_task(self._serve(), context=contextvars.Context())
        self._task.add_done_callback(self._done)

    def kill(self) -> None:
        """Cancel the worker's task."""
        self._task.cancel()

    async def _serve(self) -> None:
        worker = Worker.from_plan(self.plan)
        await worker.start()
        await worker.serve()

    def _done(self, task: asyncio.Task[None]) -> None:
        # Exit codes as a process would have them.
        code = 0
        if task.cancelled():
            code = 1
        elif (error := task.exception()) is not None:
            self.log.add(f"{type(error).__name__}: {error}")
            code = 1
        if not self.ended.done():
            self.ended.set_result(code)


# Clusters that were awaited and assigned to a global name: `cluster = await ag.LocalCluster(2)`.
_AWAITED: Final[list[LocalCluster]] = []


def _names(names: dict[str, Any], cluster: LocalCluster) -> list[str]:
    """Return the global names of a cluster; those with `_` in front are a notebook's own."""
    return [name for name, value in names.items() if value is cluster and name[:1] != "_"]


class LocalCluster:
    """Workers `worker0 … worker{n-1}` on this machine, and this process as `driver`.

    Entering returns when every worker can be called, leaving when every worker has ended. In a
    notebook: `cluster = await ag.LocalCluster(2)`, and `await cluster.close()` at the end.

    - `processes=False` runs the workers in this process and loop, over memory: they start at once,
      share its module globals, and a debugger stops in them. For tests and for learning.
    - `names` are used instead of `worker0 …`, one for each worker.
    - `options` are those of all workers and of the driver.
    - `dashboard=True` serves a page that shows what the cluster does: `cluster.dashboard.url`.

    Workers start with this process's environment, folder and `sys.path`; what they print appears
    here with their name. They do not see its Ctrl-C, and end within seconds of its death.

        >>> async with ag.LocalCluster(2, names=["left", "right"], processes=False) as cluster:
        ...     print(await cluster["left"].call(ag.get_worker_info))
        ...     print(len(cluster), [worker.name for worker in cluster])
        WorkerInfo(name='left', rank=0)
        2 ['left', 'right']
    """

    def __init__(
        self,
        n_workers: int,
        *,
        processes: bool = True,
        names: Sequence[str] | None = None,
        options: Options | None = None,
        dashboard: bool = False,
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
        self._options = options or Options()
        # Before anything starts: a mistake in an argument should not cost the start of processes.
        if processes and self._options.transport == "memory":
            raise ValueError("processes cannot share memory connections: use processes=False")
        self._names = worker_names(n_workers, names)
        self._processes = processes
        if isinstance(self._options.secret, Mapping):
            raise ValueError("a local cluster is one party, with one secret for all its workers")
        if processes:
            self._options.check_proof_of_names(None)
        self._secret = self._options.secret or Secret(os.urandom(32))
        self._network: Network | None = None if processes else Network()
        self._folder: PrivateFolder | None = None  # of Unix sockets
        self._sockets = itertools.count()  # numbers of Unix sockets
        # The latest start of every worker, by name: one that died stays, until it is restarted.
        self._started: dict[str, StartedWorker] = {}
        self._forkserver: ForkServer | None = None  # if there are several processes
        # Asked or forced to end by this cluster: their exit is not logged as unexpected.
        self._leaving: set[StartedWorker] = set()
        self._next_rank = len(self._names) + 1  # after the driver's; ranks are never reused
        self._counter = len(self._names)  # for the names of later workers
        self._driver: Worker | None = None
        self._changing = asyncio.Lock()  # one `scale` or `restart` at a time
        self._closed: asyncio.Future[None] | None = None  # made when closing begins
        self._wants_dashboard = dashboard
        self.dashboard: Any = None  # an `ag.Dashboard`, if one was asked for
        self._line = ""  # where it was awaited
        self._names_of: dict[str, Any] | None = None  # the globals in which it has a name

    # ── what it is ──────────────────────────────────────────────────────────────────────────────

    @property
    def driver(self) -> Worker:
        """This process as a worker of the cluster; WorkerClosed if the cluster does not run."""
        if self._driver is None:
            raise self._not_started()
        if not self._driver.running:
            raise WorkerClosed("this cluster is not running", DRIVER)
        return self._driver

    @property
    def driver_runs(self) -> bool:
        """Whether the cluster was started and is still open."""
        return self._driver is not None and self._driver.running

    @property
    def workers(self) -> list[Handle]:
        """Handles of the workers, without the driver, in order of rank."""
        if self._driver is None:  # not an empty list: a loop over it would do nothing
            raise self._not_started()
        plans = sorted((start.plan for start in self._started.values()), key=_rank)
        return [Handle(self, plan.name, _rank(plan)) for plan in plans]

    def __getitem__(self, name: str | int) -> Handle:
        for worker in self.workers:
            if name in (worker.name, worker.rank):
                return worker
        raise UnknownWorker(str(name), tuple(self._started))

    def __iter__(self) -> Iterator[Handle]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self._started)

    def __contains__(self, name: object) -> bool:
        # Handles and WorkerInfos are accepted wherever names are.
        return getattr(name, "name", name) in self._started

    def _not_started(self) -> WorkerClosed:
        return WorkerClosed(
            "this cluster was not started: write `cluster = await ag.LocalCluster(...)` or "
            "`async with ag.LocalCluster(...) as cluster:`",
            DRIVER,
        )

    def logs(self, name: str) -> str:
        """Give the last lines that a worker has written, to both outputs."""
        return str(self._started[self[name].name].log)

    def state(self, name: str) -> str:
        """Give the state of a worker: "running", "starting", "dead" or "closed"."""
        start = self._started[name]
        if start.ended.done():
            return "closed" if self._closed else "dead"
        joined = self._driver is not None and self._driver.running
        return "running" if joined and name in self.driver.member.roster.members else "starting"

    def pid(self, name: str) -> int | None:
        """Give the process id of a worker; None if it runs in this process."""
        return self._started[name].pid

    def as_driver(self, func: Callable[..., T], *args: Any) -> T:
        """Call a function with this cluster's driver as the current worker."""
        # A notebook cell that awaits loses its context, and several clusters may be open at once:
        # the current worker need not be this driver.
        agent = self.driver.agent
        if scope.AGENT.get() is agent:
            return func(*args)
        token = scope.use(agent)
        try:
            return func(*args)
        finally:
            scope.AGENT.reset(token)

    def __repr__(self) -> str:
        kind = "processes" if self._processes else "in this loop"
        if self._driver is None:
            return f"<LocalCluster of {len(self._names)} ({kind}), not started: await it>"
        states = ", ".join(f"{name} {self.state(name)}" for name in self._started)
        if self._closed is not None:
            return f"<LocalCluster of {len(self)} ({kind}), closed>"
        return f"<LocalCluster of {len(self)} ({kind}): {states or 'no workers'}>"

    def _repr_html_(self) -> str | None:
        return None if self._driver is None else as_html(self)

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> LocalCluster:
        return await self._open()

    def __await__(self) -> Generator[Any, None, LocalCluster]:
        return self._open_until_closed(sys._getframe(1)).__await__()

    async def _open_until_closed(self, frame: FrameType) -> LocalCluster:
        """Open the cluster, and close one that the name it is assigned to had before.

        A notebook cell that is run again would else leave a cluster behind each time.
        """
        self._line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        names = frame.f_globals
        await self._open()
        # The assignment follows at once: this coroutine returns without going back to the loop.
        self.driver.agent.loop.call_soon(self._assigned, names)
        return self

    def _assigned(self, names: dict[str, Any]) -> None:
        for other in list(_AWAITED):
            if other._closed is not None or not other.driver_runs:
                _AWAITED.remove(other)
            elif other._names_of is names and not _names(names, other):
                _AWAITED.remove(other)
                text = (
                    f"the cluster started at {other._line} is closed: the one started at "
                    f"{self._line} has taken its name. Use `async with`, or `await cluster.close()`"
                )
                agent = other.driver.agent
                if agent.loop is self.driver.agent.loop:  # else its loop has ended, and it with it
                    agent.spawn(other.close())
                    _log.warning(text)
                    warnings.warn(text, ResourceWarning, stacklevel=2, source=other)
        if _names(names, self):
            self._names_of = names
            _AWAITED.append(self)

    async def _open(self) -> LocalCluster:
        if self._driver is not None:
            raise RpcError("this cluster was started before; make another one")
        rank = len(self._names)
        try:
            self._driver = Worker.from_plan(self._plan(DRIVER, rank))
            await self._driver.start()
            if self._processes:
                self._driver.agent.dialer.exit_is_reported = self._reports_exit
            await self._start_workers(list(zip(self._names, range(rank), strict=True)))
        except BaseException:  # a cancellation, too: no process may be left
            await self._abort_start()
            raise
        self._driver.make_current()
        # A reference: a cluster that the user does not keep lives as long as its driver.
        self._driver.agent.parts[LocalCluster] = self
        serve_logs(self._driver.agent, self._logs)
        if self._wants_dashboard:
            await self._serve_dashboard()
        return self

    async def _serve_dashboard(self) -> None:
        try:
            # By name: the page is above this layer, and needs more than the core does.
            page = importlib.import_module("aiograd.views.page").load_dashboard()(self)
            self.dashboard = await page.start()
        except BaseException:
            await self._abort_start()
            raise
        _log.info("the page of this cluster: %s", self.dashboard.url)

    def live(self) -> Any:
        """Show what the cluster does in a notebook, live; needs `aiograd[notebook]`."""
        return importlib.import_module("aiograd.views.notebook").live(self)

    def _logs(self) -> dict[str, OutputLog]:
        return {name: start.log for name, start in self._started.items()}

    def _plan(self, name: str, rank: int) -> WorkerPlan:
        # `>=`: the driver needs a core as well.
        crowded = self._processes and len(self._names) >= _cores()
        spin = SHORT_SPIN if crowded else SPIN
        plan = WorkerPlan(
            name=name,
            rank=rank,
            options=self._options,
            secret=self._secret,
            network=self._network,
            listen=(self._address(rank),),
            # Polling saves the wake-up of another core; workers of one loop need none.
            spin=spin if self._processes else 0.0,
            crowded=crowded,
            # In the other modes a worker imports nothing that a peer names, so the modules that
            # expose functions are imported at its start.
            modules=() if self._options.mode == "trusted" else exposing_modules(),
        )
        if name == DRIVER:
            return plan
        # One watchdog per loop is enough: the driver's, if workers share its loop.
        alone = self._processes
        return replace(plan, coordinator=self.driver.agent.info, watch=alone, background=alone)

    def _address(self, rank: int) -> str:
        if not self._processes:
            return f"memory:{rank}"
        if self._options.transport == "tcp" or not hasattr(socket, "AF_UNIX"):
            return "tcp:127.0.0.1:0"
        if self._folder is None:
            self._folder = PrivateFolder()
        # Another one for each start: a peer that redials must not reach the restarted worker and
        # take it for the one before.
        return f"unix:{self._folder.path}/{next(self._sockets)}"

    async def _start_workers(self, workers: Sequence[tuple[str, int]]) -> None:
        """Start workers, all at once, and wait until they can be called."""
        plans = [self._plan(name, rank) for name, rank in workers]
        starts: dict[str, StartedWorker] = {}
        try:
            # Known to the cluster before they join, so that a cancelled start finds and kills them.
            for start in self._launch(plans):
                starts[start.plan.name] = self._started[start.plan.name] = start
            await self._wait_until_joined(starts)
            # With the incarnation that joined: the exit of this process must not concern a restart.
            members = self.driver.member.roster.members
            for name, start in starts.items():
                ended = functools.partial(self._ended, start, members.get(name))
                start.ended.add_done_callback(ended)
        except BaseException:
            for start in starts.values():
                start.kill()
            await run_to_completion(_all_ended(starts.values()))
            raise

    def _launch(self, plans: Sequence[WorkerPlan]) -> Sequence[StartedWorker]:
        """Start workers: as tasks of this loop, by the fork server, or by exec."""
        if not self._processes:
            return [LoopWorker(plan) for plan in plans]
        if self._forkserver is None or not self._forkserver.open:
            # A fork server for one worker would only be one more process to start, unless there is
            # a library to load before the worker has a loop that the import would block.
            if (len(plans) < 2 and not preloaded()) or not can_fork():
                return [SpawnedWorker(plan) for plan in plans]
            self._forkserver = ForkServer()
        return self._forkserver.fork_workers(plans)

    def _ended(
        self, start: StartedWorker, peer: PeerInfo | None, ended: asyncio.Future[int]
    ) -> None:
        # The exit is known before its connections break, if they break at all: a child that the
        # worker forked may hold them open.
        expected = self._closed is not None or start in self._leaving
        self._leaving.discard(start)
        how = describe_exit(ended.result(), expected)
        if peer is not None and self._driver is not None and self._driver.running:
            self._driver.coordinator.process_ended(peer, f"its process ended: {how}")
        if not expected:
            _log.warning("%s ended unexpectedly (%s)", start.plan.name, how)

    def _reports_exit(self, peer: PeerInfo) -> bool:
        return peer.name in self._started

    async def _wait_until_joined(self, starts: dict[str, StartedWorker]) -> None:
        """Wait for all of them; RpcError, with its last output, for the first one that failed."""
        joined = asyncio.ensure_future(self.driver.coordinator.wait_until_known(starts))
        waits: list[asyncio.Future[Any]] = [joined, *(start.ended for start in starts.values())]
        try:
            await asyncio.wait(waits, timeout=JOIN_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if joined.done():
                return
        finally:
            joined.cancel()
            await asyncio.wait([joined])
        # An exit explains more than the silence of others, which may wait for the one that failed.
        for name, start in starts.items():
            if start.ended.done():
                how = describe_exit(start.ended.result())
                raise RpcError(_failure(name, f"ended ({how})", start))
        for name, start in starts.items():
            if self.state(name) != "running":
                raise RpcError(_failure(name, f"was silent for {JOIN_TIMEOUT:g} s", start))

    # ── changing ────────────────────────────────────────────────────────────────────────────────

    async def scale(self, n: int) -> None:
        """Start or end workers until there are `n`; those of the highest ranks end first.

        Ranks are never reused. If new workers cannot start, the cluster stays as it was.
        """
        check_count(n)
        async with self._changing:
            self.driver  # noqa: B018 - raises when the cluster is closed
            new = []
            for _ in range(n - len(self)):
                if self._next_rank >= RANKS:
                    raise RpcError(
                        f"no rank is left: ranks are never reused, and {RANKS - 1} was given out; "
                        "start another cluster"
                    )
                new.append((self._fresh_name(), self._next_rank))
                self._next_rank += 1
            if new:
                try:
                    await self._start_workers(new)
                except BaseException:
                    # New ones that failed were never part of the cluster; dead ones of it stay.
                    for name, _ in new:
                        self._started.pop(name, None)
                    raise
            surplus = [worker.name for worker in self.workers[n:]]
            await asyncio.gather(*(self._end(name) for name in surplus))
            for name in surplus:
                del self._started[name]

    async def restart(self, name: str) -> None:
        """End a worker, if it has not ended yet, and start another one of its name and rank.

        Values and contexts that it owned are lost, as with any other end of a worker.
        """
        async with self._changing:
            worker = self[name]
            _log.info("restarting %s (rank %d)", worker.name, worker.rank)
            await self._end(worker.name)
            await self._start_workers([(worker.name, worker.rank)])

    async def kill(self, name: str) -> None:
        """Kill a worker, as SIGKILL does; it stays dead until it is restarted.

        Returns when it is no member any more.
        """
        worker = self[name]
        start = self._started[worker.name]
        self._leaving.add(start)
        start.kill()
        # Shielded: cancelling `kill` must not cancel the future that others wait for.
        await asyncio.shield(start.ended)
        await self.driver.member.wait_gone(worker.name)

    async def _end(self, name: str) -> None:
        """Dismiss one worker, and kill it if it does not leave within the grace."""
        start, member = self._started[name], self.driver.member
        peer = member.roster.members.get(name)
        if not start.ended.done():
            self._leaving.add(start)
        if peer is not None and not start.ended.done():
            grace = self._options.grace
            self.driver.coordinator.dismiss([peer], together=False, timeout=grace)
            await asyncio.wait([start.ended], timeout=_limited(grace) + EXIT_GRACE)
        start.kill()  # without effect on one that has exited
        await _all_ended([start])
        # Name and rank must be free before a restart joins under them.
        await member.wait_gone(name)

    def _fresh_name(self) -> str:
        while True:
            name = f"worker{self._counter}"
            self._counter += 1
            if name not in self._started:
                return name

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    async def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """End all workers and leave; within `timeout` (default `Options.grace`) + 1 s.

        Graceful: all finish their work first. Closing twice is the same as closing once.
        """
        if self._driver is None:
            return
        if self._driver.running:
            self._driver.agent.here()  # an error in another loop or thread, or in a forked child
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = closed = asyncio.get_running_loop().create_future()
        try:
            try:
                if self.dashboard is not None:
                    await self.dashboard.close()
                await self._driver.close(graceful, timeout)
            finally:
                # Even if this is cancelled: no process and no folder may be left.
                await run_to_completion(self._reap())
        finally:
            closed.set_result(None)
            self._name_successor()

    def _name_successor(self) -> None:
        """Warn that calls by name now go to an older cluster that was left open."""
        if self not in _AWAITED:
            return  # `async with` nests, and what is around it is meant
        _AWAITED.remove(self)
        older = [each for each in _AWAITED if each._closed is None]
        if older:
            text = (
                f"the cluster started at {self._line} is closed; calls by name now go to the one "
                f"started at {older[-1]._line}, which still runs: `await cluster.close()` it, too"
            )
            _log.warning(text)
            warnings.warn(text, ResourceWarning, stacklevel=2)

    async def _reap(self) -> None:
        """Wait until all workers have ended, and kill those that do not."""
        running = [start.ended for start in self._started.values() if not start.ended.done()]
        if running:
            await asyncio.wait(running, timeout=EXIT_GRACE)
        starts = list(self._started.values())  # a copy: a `scale` that fails meanwhile removes some
        for start in starts:
            if not start.ended.done():
                _log.warning("%s did not end by itself and is killed", start.plan.name)
                start.kill()
        await _all_ended(starts)
        # After its workers: it exits by itself when the last of them has.
        if self._forkserver is not None:
            await self._forkserver.close()
        if self._folder is not None:
            self._folder.close()

    async def _abort_start(self) -> None:
        """Leave nothing behind of a start that failed or was cancelled."""
        for start in self._started.values():
            start.kill()
        await self.close(graceful=False)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(graceful=kind is None)


def _rank(plan: WorkerPlan) -> int:
    assert plan.rank is not None
    return plan.rank


def _cores() -> int:
    # What this process may use: a container or `taskset` may allow fewer than the machine has.
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _limited(seconds: float) -> float:
    """Bound a number of seconds for a timer, infinity included."""
    return min(seconds, 1e6) if seconds != math.inf else 1e6


async def _all_ended(starts: Iterable[StartedWorker]) -> None:
    for start in starts:
        await asyncio.shield(start.ended)


def _failure(name: str, what: str, start: StartedWorker) -> str:
    said = start.log.tail(SHOWN_LINES)
    return f"worker {name!r} {what} before it joined" + (f"; it said:\n{said}" if said else "")


class Handle:
    """One worker of a cluster: `await cluster["worker0"].call(f, 1, 2)`.

    All arguments are those of the function, keywords too, and an editor checks them:
    `cluster["worker0"].within(3).call(f, 1, key=2)` has a timeout of three seconds.

        >>> async with ag.LocalCluster(2, processes=False) as cluster:
        ...     worker = cluster["worker0"]
        ...     print(await worker.call(divmod, 7, 2))
        ...     print(await worker.within(3).remote(list, "ab"))
        ...     print([n async for n in worker.stream(range, 3)])
        (3, 1)
        ['a', 'b']
        [0, 1, 2]
    """

    __slots__ = ("_cluster", "_timeout", "name", "rank")

    _cluster: LocalCluster
    _timeout: float | None  # of each call; None is what `ag.rpc_async` takes
    name: str
    rank: int

    def __init__(
        self, cluster: LocalCluster, name: str, rank: int, timeout: float | None = None
    ) -> None:
        self._cluster, self._timeout = cluster, timeout
        self.name, self.rank = name, rank

    @property
    def info(self) -> WorkerInfo:
        """Name and rank, as other members see them."""
        return WorkerInfo(self.name, self.rank)

    def within(self, seconds: float) -> Handle:
        """Return a handle of the same worker whose calls, values and streams have a timeout."""
        return Handle(self._cluster, self.name, self.rank, check_timeout(seconds))

    @overload
    def call(
        self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def call(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function there; see `ag.rpc_async`."""
        # The frame of the user: an error that nobody awaits is logged with the user's line.
        call = functools.partial(
            self._cluster.driver.agent.call, frame=sys._getframe(1), timeout=self._timeout
        )
        return self._cluster.as_driver(call, self.info, func, args, kwargs)

    @overload
    def remote(
        self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    @overload
    def remote(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    def remote(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Call a function there and keep its value there; see `ag.remote`."""
        make = functools.partial(remote, timeout=self._timeout)
        made: RRef[Any] = self._cluster.as_driver(make, self.info, func, args, kwargs)
        return made

    def stream(
        self,
        func: Callable[P, AsyncIterator[T] | Iterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Stream[T]:
        """Iterate over an asynchronous generator there; see `ag.rpc_stream`."""
        read = functools.partial(api.rpc_stream, timeout=self._timeout)
        items: Stream[T] = self._cluster.as_driver(read, self.info, func, args, kwargs)
        return items

    def __reduce__(self) -> tuple[Any, ...]:
        # Another worker cannot reach the cluster object, but it can call the worker.
        return WorkerInfo, (self.name, self.rank)

    def __eq__(self, other: object) -> bool:
        # By cluster, too: each one has a `worker0`.
        if isinstance(other, Handle):
            return self._cluster is other._cluster and self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        return hash((id(self._cluster), self.name))

    def __repr__(self) -> str:
        state = self._cluster.state(self.name) if self.name in self._cluster else "gone"
        return f"<worker {self.name!r} rank={self.rank} {state}>"


# ── in a notebook ───────────────────────────────────────────────────────────────────────────────

COLOURS = {"running": GREEN, "starting": "#d9a21b", "dead": "#cc3d3d", "closed": GREY}


def as_html(cluster: LocalCluster) -> str:
    """Give a cluster as a small HTML table."""
    rows = [_row(cluster, worker) for worker in cluster.workers]
    title = f"<b>LocalCluster</b> · {len(cluster)} worker{'s' * (len(cluster) != 1)}"
    return card(BLUE, title, table(rows, ("worker", "rank", "state", "process")) if rows else "")


def _row(cluster: LocalCluster, worker: Handle) -> tuple[str, ...]:
    state = cluster.state(worker.name)
    pid = cluster.pid(worker.name)
    return (
        code(worker.name),
        str(worker.rank),
        f"{dot(COLOURS[state])} {state}",
        str(pid) if pid is not None else "this one",
    )
