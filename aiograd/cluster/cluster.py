"""`Cluster`: workers that this process drives, wherever they run.

The driver is a worker of this process and the coordinator; it decides names and ranks, starts the
workers through its `Hosts`, watches how they end, and lets all of them leave together. What an
engine has to do is small:

    Hosts           where workers run: processes of this machine, Dask, Ray, ssh …
    StartedWorker   one start of one worker there
    Cluster         workers, scale, restart, kill, logs, displays: the same for all of them

`handle.py` has the worker for the user, `display.py` the table in a notebook.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, TypeVar

from aiograd.cluster.config import DRIVER, JOIN_TIMEOUT, WorkerPlan, check_count, worker_names
from aiograd.cluster.display import as_html
from aiograd.cluster.handle import Handle
from aiograd.cluster.logs import serve_logs
from aiograd.cluster.processes.spawn import OutputLog, describe_exit
from aiograd.cluster.worker import Worker, run_to_completion
from aiograd.errors import RpcError, UnknownWorker, WorkerClosed
from aiograd.rpc import scope
from aiograd.rpc.directory import PeerInfo, WorkerInfo
from aiograd.rpc.options import Options
from aiograd.wire.names import RANKS

__all__ = ["Cluster", "Hosts", "StartedWorker"]

_log = logging.getLogger("aiograd.cluster")
T = TypeVar("T")
C = TypeVar("C", bound="Cluster")

SHOWN_LINES = 20  # of a failed worker's output, in the error
# Seconds for a worker to exit by itself after it has left, before it is killed. `close` promises to
# return within its timeout + 1 s; this is half of that second.
EXIT_GRACE = 0.5


class StartedWorker(Protocol):
    """One start of one worker; all kinds look the same to the cluster."""

    plan: WorkerPlan
    log: OutputLog
    pid: int | None
    ended: asyncio.Future[int]  # with the exit code, when nothing of it is left

    def kill(self) -> None:
        """End it at once, without notice; `ended` follows."""


class Hosts(Protocol):
    """Where the workers of a cluster run. An engine implements this, and nothing else."""

    kind: str  # as displays say it: "processes", "on Dask"

    async def count(self) -> int:
        """Return how many workers there can be, for a cluster that takes them all."""

    async def driver_plan(self, rank: int) -> WorkerPlan:
        """Make the plan of the driver: where it listens, and the secret of the cluster."""

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Begin to start workers of these names and ranks; do not wait until they have joined.

        If one cannot be started, raise an RpcError that says why, and leave nothing behind.
        """

    async def close(self) -> None:
        """Remove what is left of this cluster, when all its workers have ended or been killed."""


# Clusters that were awaited and assigned to a global name: `cluster = await ag.LocalCluster(2)`.
_AWAITED: Final[list[Cluster]] = []


def _names(names: dict[str, Any], cluster: Cluster) -> list[str]:
    """Return the global names of a cluster; those with `_` in front are a notebook's own."""
    return [name for name, value in names.items() if value is cluster and name[:1] != "_"]


class Cluster:
    """Workers `worker0 … worker{n-1}` where `hosts` puts them, and this process as `driver`.

    The base of `LocalCluster` and of those on other engines. Entering returns when every worker can
    be called, leaving when every worker has ended.
    """

    def __init__(
        self,
        hosts: Hosts,
        n_workers: int | None,
        names: Sequence[str] | None,
        options: Options,
        dashboard: bool = False,
        patience: float = JOIN_TIMEOUT,
    ) -> None:
        self._hosts, self._options, self._patience = hosts, options, patience
        self._sized = n_workers is not None  # else as many as the engine has, when it starts
        self._names = worker_names(n_workers or 0, names)
        # The latest start of every worker, by name: one that died stays, until it is restarted.
        self._started: dict[str, StartedWorker] = {}
        # Asked or forced to end by this cluster: their exit is not logged as unexpected.
        self._leaving: set[StartedWorker] = set()
        self._restarting: set[str] = set()  # names of those that end to be started again
        self._set_size()
        self._driver: Worker | None = None
        self._changing = asyncio.Lock()  # one `scale` or `restart` at a time
        self._closed: asyncio.Future[None] | None = None  # made when closing begins
        self._wants_dashboard = dashboard
        self.dashboard: Any = None  # an `ag.Dashboard`, if one was asked for
        self._line = ""  # where it was awaited
        self._names_of: dict[str, Any] | None = None  # the globals in which it has a name

    def _set_size(self) -> None:
        self._next_rank = len(self._names) + 1  # after the driver's; ranks are never reused
        self._counter = len(self._names)  # for the names of later workers

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
    def closing(self) -> bool:
        """Whether `close` was called, or the start has failed."""
        return self._closed is not None

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
        kind = type(self).__name__
        return WorkerClosed(
            f"this cluster was not started: write `cluster = await ag.{kind}(...)` or "
            f"`async with ag.{kind}(...) as cluster:`",
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

    def describe(self, name: str, rank: int) -> WorkerInfo:
        """Give a worker as other members see it; name and rank alone if it is no member now."""
        peer = self.driver.member.roster.members.get(name) if self.driver_runs else None
        return WorkerInfo(name, rank) if peer is None or peer.rank != rank else peer.info

    def where(self, **labels: str) -> list[Handle]:
        """List the workers with this `host` and these labels: `ag.Group(cluster.where(host="n1"))`.

        >>> async with ag.LocalCluster(2, processes=False) as cluster:
        ...     here = cluster.driver.info.host
        ...     print([worker.name for worker in cluster.where(host=here)])
        ['worker0', 'worker1']
        """
        found = []
        for worker in self.workers:
            info = worker.info
            facts = {**info.labels, "host": info.host}
            if all(facts.get(key) == value for key, value in labels.items()):
                found.append(worker)
        return found

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

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot travel: called functions name workers "
            '(ag.rpc_async("worker0", ...)), or get cluster["worker0"] as an argument'
        )

    def __repr__(self) -> str:
        name, kind = type(self).__name__, self._hosts.kind
        if self._driver is None:
            return f"<{name} of {len(self._names)} ({kind}), not started: await it>"
        states = ", ".join(f"{name} {self.state(name)}" for name in self._started)
        if self._closed is not None:
            return f"<{name} of {len(self)} ({kind}), closed>"
        return f"<{name} of {len(self)} ({kind}): {states or 'no workers'}>"

    def _repr_html_(self) -> str | None:
        if self._driver is None:
            return None
        here = self._driver.agent.whereabouts.host if self._driver.running else ""
        return as_html(self, here)

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self: C) -> C:
        return await self._open()

    def __await__(self: C) -> Generator[Any, None, C]:
        return self._open_until_closed(sys._getframe(1)).__await__()

    async def _open_until_closed(self: C, frame: FrameType) -> C:
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

    async def _open(self: C) -> C:
        if self._driver is not None:
            raise RpcError("this cluster was started before; make another one")
        try:
            if not self._sized:
                self._names = worker_names(await self._hosts.count(), None)
                self._set_size()
            rank = len(self._names)
            self._driver = Worker.from_plan(await self._hosts.driver_plan(rank))
            await self._driver.start()
            await self._start_workers(list(zip(self._names, range(rank), strict=True)))
        except BaseException:  # a cancellation, too: no process may be left
            await run_to_completion(self._abort_start())
            raise
        self._driver.make_current()
        # A reference: a cluster that the user does not keep lives as long as its driver.
        self._driver.agent.parts[Cluster] = self
        serve_logs(self._driver.agent, self._logs)
        if self._wants_dashboard:
            await self._serve_dashboard()
        return self

    async def _serve_dashboard(self) -> None:
        try:
            # By name: the page is above this layer, and needs more than the core does.
            views = importlib.import_module("aiograd.views.page")
            # In a thread: to load aiohttp takes up to a second, in which no message would be read.
            page = (await asyncio.to_thread(views.load_dashboard))(self)
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

    async def _start_workers(self, workers: Sequence[tuple[str, int]]) -> None:
        """Start workers, all at once, and wait until they can be called."""
        starts: dict[str, StartedWorker] = {}
        try:
            # Known to the cluster before they join, so that a cancelled start finds and kills them.
            for start in await self._hosts.start(self, workers):
                starts[start.plan.name] = self._started[start.plan.name] = start
            await self._wait_until_joined(starts)
            for start in starts.values():
                self._watch(start)
        except BaseException:
            for start in starts.values():
                start.kill()
            await run_to_completion(_all_ended(starts.values()))
            raise

    def _watch(self, start: StartedWorker) -> None:
        # With the incarnation that joined: the exit of this process must not concern a restart.
        peer = self.driver.member.roster.members.get(start.plan.name)
        start.ended.add_done_callback(functools.partial(self._ended, start, peer))

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

    async def _wait_until_joined(self, starts: dict[str, StartedWorker]) -> None:
        """Wait for all of them; RpcError, with its last output, for the first one that failed."""
        joined = asyncio.ensure_future(self.driver.coordinator.wait_until_known(starts))
        waits: list[asyncio.Future[Any]] = [joined, *(start.ended for start in starts.values())]
        try:
            await asyncio.wait(waits, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
            if joined.done():
                return
        finally:
            joined.cancel()
            await asyncio.wait([joined])
        # An exit explains more than the silence of others, which may wait for the one that failed.
        for name, start in starts.items():
            if start.ended.done():
                failure: RpcError | None = getattr(start, "failure", None)
                if failure is not None:  # the engine knows why
                    raise failure
                how = describe_exit(start.ended.result())
                raise RpcError(_failure(name, f"ended ({how})", start))
        for name, start in starts.items():
            if self.state(name) != "running":
                raise RpcError(_failure(name, f"was silent for {self._patience:g} s", start))

    # ── changing ────────────────────────────────────────────────────────────────────────────────

    async def scale(self, n: int) -> None:
        """Start or end workers until there are `n`; those of the highest ranks end first.

        Ranks are never reused. If new workers cannot start, the cluster stays as it was.
        """
        check_count(n)
        async with self._changing:
            self.driver  # noqa: B018 - raises when the cluster is closed
            new = [self.next_place() for _ in range(n - len(self))]
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
            self._restarting.add(worker.name)
            try:
                await self._end(worker.name)
                await self._start_workers([(worker.name, worker.rank)])
            finally:
                self._restarting.discard(worker.name)

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

    def next_place(self) -> tuple[str, int]:
        """Give out a name and a rank; RpcError if no rank is left."""
        if self._next_rank >= RANKS:
            raise RpcError(
                f"no rank is left: ranks are never reused, and {RANKS - 1} was given out; "
                "start another cluster"
            )
        self._next_rank += 1
        return self._fresh_name(), self._next_rank - 1

    def adopt(self, start: StartedWorker) -> None:
        """Take a worker in that the engine has started: a new one, or one that is back."""
        self._started[start.plan.name] = start
        start.ended.add_done_callback(functools.partial(self._ended, start, None))

    def forget(self, name: str) -> None:
        """Drop a worker that the engine has taken away."""
        self._started.pop(name, None)

    def is_leaving(self, start: StartedWorker) -> bool:
        """Whether this cluster has asked or forced a worker to end."""
        return self._closed is not None or start in self._leaving

    def restarts(self, name: str) -> bool:
        """Whether a worker ends in order to be started again."""
        return name in self._restarting

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
        await self._hosts.close()

    async def _abort_start(self) -> None:
        """Leave nothing behind of a start that failed or was cancelled."""
        for start in self._started.values():
            start.kill()
        if self._driver is None:  # the engine could not even say where it would listen
            await self._hosts.close()
        await self.close(graceful=False)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(graceful=kind is None)


def _limited(seconds: float) -> float:
    """Bound a number of seconds for a timer, infinity included."""
    return min(seconds, 1e6) if seconds != math.inf else 1e6


async def _all_ended(starts: Iterable[StartedWorker]) -> None:
    for start in starts:
        await asyncio.shield(start.ended)


def _failure(name: str, what: str, start: StartedWorker) -> str:
    said = start.log.tail(SHOWN_LINES)
    return f"worker {name!r} {what} before it joined" + (f"; it said:\n{said}" if said else "")


def _rank(plan: WorkerPlan) -> int:
    assert plan.rank is not None
    return plan.rank
