"""`LocalCluster`: workers on this machine, with this process as their driver and coordinator.

Workers live in processes of their own or, with `processes=False`, in this very loop over a memory
network; `hosts.py` has both kinds. The driver decides names and ranks; everything else is an
ordinary open cluster, which is left together.

A worker of a cluster in the user's hand, and what a cluster looks like in a notebook.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from aiograd._html import BLUE, GREEN, GREY, card, code, dot, table
from aiograd.cluster.bootstrap import private_folder
from aiograd.cluster.config import DRIVER, PATIENCE, Plan, check_count, worker_names
from aiograd.cluster.processes.forkserver import Nursery, can_fork
from aiograd.cluster.processes.spawn import Host, LoopHost, ProcessHost
from aiograd.cluster.worker import Worker, to_the_end
from aiograd.errors import RpcError, UnknownWorker, WorkerClosed
from aiograd.rpc import api, scope
from aiograd.rpc.callee.exposure import exposing_modules
from aiograd.rpc.directory import PeerInfo, WorkerInfo
from aiograd.rpc.future import Future
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network
from aiograd.wire.secrets import Secret

_log = logging.getLogger("aiograd")
T = TypeVar("T")

SHOWN = 20  # lines of a failed worker's output in the error
LAST_WORDS = 0.5  # seconds a worker has to end by itself before it is killed
# Seconds a loop polls after traffic: if every worker has a core of its own, and if some share one.
SPIN, SHORT_SPIN = 500e-6, 300e-6


class LocalCluster:
    """Workers `worker0 … worker{n-1}` on this machine, and this process as `driver`.

    Entering returns when every worker can be called, leaving when every worker has ended:

        async with ag.LocalCluster(2) as cluster:
            await cluster["worker0"].call(print, "hello")

    In a notebook: `cluster = await ag.LocalCluster(2)`, and `await cluster.close()` at the end.
    """

    def __init__(
        self,
        n_workers: int,
        *,
        processes: bool = True,
        names: Sequence[str] | None = None,
        options: Options | None = None,
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
        self._options = options or Options()
        if processes and self._options.transport == "memory":
            raise ValueError("processes cannot share memory connections: use processes=False")
        self._names = worker_names(n_workers, names)
        self._processes = processes
        if isinstance(self._options.secret, Mapping):
            raise ValueError("a local cluster is one party, with one secret for all its workers")
        self._secret = self._options.secret or Secret(os.urandom(32))
        self._network: Network | None = None if processes else Network()
        self._folder: str | None = None
        self._sockets = itertools.count()
        self._hosts: dict[str, Host] = {}  # every worker of the cluster, also one that died
        self._nursery: Nursery | None = None  # makes workers, if there are several
        self._leaving: set[Host] = set()  # those that were asked to end
        self._next_rank = len(self._names) + 1  # after the driver's; ranks are never given twice
        self._counter = len(self._names)  # for the names of later workers
        self._driver: Worker | None = None
        self._busy = asyncio.Lock()  # one change of the cluster at a time
        self._closed: asyncio.Future[None] | None = None  # made when closing begins

    # ── what it is ──────────────────────────────────────────────────────────────────────────────

    @property
    def driver(self) -> Worker:
        """This process as a worker of the cluster."""
        if self._driver is None or not self._driver.running:
            raise WorkerClosed("this cluster is not running", DRIVER)
        return self._driver

    @property
    def workers(self) -> list[Handle]:
        """The workers, without the driver, in order of rank."""
        plans = sorted((host.plan for host in self._hosts.values()), key=_rank)
        return [Handle(self, plan.name, _rank(plan)) for plan in plans]

    def __getitem__(self, name: str | int) -> Handle:
        for worker in self.workers:
            if name in (worker.name, worker.rank):
                return worker
        raise UnknownWorker(str(name), tuple(self._hosts))

    def __iter__(self) -> Iterator[Handle]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, name: object) -> bool:
        return getattr(name, "name", name) in self._hosts

    def logs(self, name: str) -> str:
        """The last lines that a worker has written, to both outputs."""
        return str(self._hosts[self[name].name].log)

    def state(self, name: str) -> str:
        """What a worker is doing: "running", "starting", "dead" or "closed"."""
        host = self._hosts[name]
        if host.ended.done():
            return "closed" if self._closed else "dead"
        joined = self._driver is not None and self._driver.running
        return "running" if joined and name in self.driver.members.roster.members else "starting"

    def pid(self, name: str) -> int | None:
        """The process of a worker; None if it lives in this one."""
        return self._hosts[name].pid

    def as_driver(self, func: Callable[..., T], *args: Any) -> T:
        """Call a function with this cluster's driver as the current worker."""
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
        states = ", ".join(f"{name} {self.state(name)}" for name in self._hosts)
        if self._closed is not None:
            return f"<LocalCluster of {len(self)} ({kind}), closed>"
        return f"<LocalCluster of {len(self)} ({kind}): {states or 'no workers'}>"

    def _repr_html_(self) -> str | None:
        return None if self._driver is None else as_html(self)

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> LocalCluster:
        return await self._open()

    def __await__(self) -> Generator[Any, None, LocalCluster]:
        return self._open().__await__()

    async def _open(self) -> LocalCluster:
        if self._driver is not None:
            raise RpcError("this cluster was started before; make another one")
        rank = len(self._names)
        try:
            self._driver = Worker.planned(self._plan(DRIVER, rank))
            await self._driver.start()
            await self._bring_up(list(zip(self._names, range(rank), strict=True)))
        except BaseException:
            await self._abandon()
            raise
        self._driver.make_current()
        self._driver.agent.parts[LocalCluster] = self  # lives as long as its driver does
        return self

    def _plan(self, name: str, rank: int) -> Plan:
        crowded = self._processes and len(self._names) >= _cores()
        spin = SHORT_SPIN if crowded else SPIN
        plan = Plan(
            name=name,
            rank=rank,
            options=self._options,
            secret=self._secret,
            network=self._network,
            listen=(self._address(rank),),
            spin=spin if self._processes else 0.0,
            crowded=crowded,
            # A worker of these modes imports nothing that a peer names.
            modules=() if self._options.mode == "trusted" else exposing_modules(),
        )
        if name == DRIVER:
            return plan
        # Of those that share a loop, the driver watches it.
        return replace(plan, coordinator=self.driver.agent.info, watch=self._processes)

    def _address(self, rank: int) -> str:
        if not self._processes:
            return f"memory:{rank}"
        if self._options.transport == "tcp":
            return "tcp:127.0.0.1:0"
        if self._folder is None:
            self._folder = private_folder()
        # A new one each time: a restarted worker must not be taken for the one before it.
        return f"unix:{self._folder}/{next(self._sockets)}"

    async def _bring_up(self, workers: Sequence[tuple[str, int]]) -> None:
        """Start workers, all at once, and wait until they can be called."""
        plans = [self._plan(name, rank) for name, rank in workers]
        hosts: dict[str, Host] = {}
        try:
            for host in self._start(plans):
                hosts[host.plan.name] = self._hosts[host.plan.name] = host
            await self._wait_until_joined(hosts)
            members = self.driver.members.roster.members
            for name, host in hosts.items():
                ended = functools.partial(self._ended, host, members.get(name))
                host.ended.add_done_callback(ended)
        except BaseException:
            for host in hosts.values():
                host.kill()
            await to_the_end(_all_ended(hosts.values()))
            raise

    def _start(self, plans: Sequence[Plan]) -> Sequence[Host]:
        """Start workers: in this loop, from the nursery, or one alone in a process of its own."""
        if not self._processes:
            return [LoopHost(plan) for plan in plans]
        if self._nursery is None or not self._nursery.open:
            if len(plans) < 2 or not can_fork():
                return [ProcessHost(plan) for plan in plans]
            self._nursery = Nursery()
        return self._nursery.make(plans)

    def _ended(self, host: Host, peer: PeerInfo | None, ended: asyncio.Future[int]) -> None:
        # The end of a process is known before anything else tells of it, if anything ever does.
        if peer is not None and self._driver is not None and self._driver.running:
            how = f"its process ended ({_how(ended.result())})"
            self._driver.members.process_ended(peer, how)
        expected = self._closed is not None or host in self._leaving
        self._leaving.discard(host)
        if not expected:
            name, code = host.plan.name, ended.result()
            _log.warning("%s ended unexpectedly (%s)", name, _how(code))

    async def _wait_until_joined(self, hosts: dict[str, Host]) -> None:
        joined = asyncio.ensure_future(self.driver.members.wait_for(hosts))
        waits: list[asyncio.Future[Any]] = [joined, *(host.ended for host in hosts.values())]
        try:
            await asyncio.wait(waits, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            if joined.done():
                return
        finally:
            joined.cancel()
            await asyncio.wait([joined])
        for name, host in hosts.items():
            if host.ended.done():
                raise RpcError(_failure(name, f"ended ({_how(host.ended.result())})", host))
        for name, host in hosts.items():
            if self.state(name) != "running":
                raise RpcError(_failure(name, f"was silent for {PATIENCE:g} s", host))

    # ── changing ────────────────────────────────────────────────────────────────────────────────

    async def scale(self, n: int) -> None:
        """Start or end workers until there are `n`; the last ones go first."""
        check_count(n)
        async with self._busy:
            self.driver  # noqa: B018 - raises when the cluster is closed
            new = []
            for _ in range(n - len(self)):
                new.append((self._fresh_name(), self._next_rank))
                self._next_rank += 1
            if new:
                try:
                    await self._bring_up(new)
                except BaseException:
                    for name, _ in new:
                        self._hosts.pop(name, None)
                    raise
            surplus = [worker.name for worker in self.workers[n:]]
            await asyncio.gather(*(self._end(name) for name in surplus))
            for name in surplus:
                del self._hosts[name]

    async def restart(self, name: str) -> None:
        """End a worker, if it has not ended yet, and start another one of its name and rank."""
        async with self._busy:
            worker = self[name]
            await self._end(worker.name)
            await self._bring_up([(worker.name, worker.rank)])

    async def kill(self, name: str) -> None:
        """Kill a worker, as SIGKILL does; it stays dead until it is restarted."""
        worker = self[name]
        host = self._hosts[worker.name]
        self._leaving.add(host)
        host.kill()
        await asyncio.shield(host.ended)
        await self.driver.members.wait_gone(worker.name)

    async def _end(self, name: str) -> None:
        """Let one worker leave in its own time, at most the grace; then kill it."""
        host, members = self._hosts[name], self.driver.members
        peer = members.roster.members.get(name)
        if not host.ended.done():
            self._leaving.add(host)
        if peer is not None and not host.ended.done():
            members.dismiss([peer], together=False, timeout=self._options.grace)
            await asyncio.wait([host.ended], timeout=_limited(self._options.grace) + LAST_WORDS)
        host.kill()
        await _all_ended([host])
        await members.wait_gone(name)

    def _fresh_name(self) -> str:
        while True:
            name = f"worker{self._counter}"
            self._counter += 1
            if name not in self._hosts:
                return name

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    async def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """End all workers and leave; within `timeout` (default `Options.grace`) + 1 s.

        Graceful: all finish their work first. Closing twice is the same as closing once.
        """
        if self._driver is None:
            return
        if self._driver.running:
            self._driver.agent.here()
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = closed = asyncio.get_running_loop().create_future()
        try:
            try:
                await self._driver.close(graceful, timeout)
            finally:
                await to_the_end(self._sweep_up())
        finally:
            closed.set_result(None)

    async def _sweep_up(self) -> None:
        """Wait until all have ended, and kill those that do not."""
        running = [host.ended for host in self._hosts.values() if not host.ended.done()]
        if running:
            await asyncio.wait(running, timeout=LAST_WORDS)
        hosts = list(self._hosts.values())
        for host in hosts:
            if not host.ended.done():
                _log.warning("%s did not end by itself and is killed", host.plan.name)
                host.kill()
        await _all_ended(hosts)
        if self._nursery is not None:
            await self._nursery.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _abandon(self) -> None:
        """Leave nothing behind of a start that failed or was interrupted."""
        for host in self._hosts.values():
            host.kill()
        await self.close(graceful=False)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(graceful=kind is None)


def _rank(plan: Plan) -> int:
    assert plan.rank is not None
    return plan.rank


def _how(code: int) -> str:
    """How a process ended, as `subprocess` numbers it: a signal is negative."""
    try:
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:  # a signal without a name
        return f"signal {-code}"


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _limited(seconds: float) -> float:
    return min(seconds, 1e6) if seconds != math.inf else 1e6


async def _all_ended(hosts: Iterable[Host]) -> None:
    for host in hosts:
        await asyncio.shield(host.ended)


def _failure(name: str, what: str, host: Host) -> str:
    said = host.log.tail(SHOWN)
    return f"worker {name!r} {what} before it joined" + (f"; it said:\n{said}" if said else "")


class Handle:
    """One worker of a cluster: `await cluster["worker0"].call(f, 1, 2)`."""

    __slots__ = ("_cluster", "name", "rank")

    def __init__(self, cluster: LocalCluster, name: str, rank: int) -> None:
        self._cluster = cluster
        self.name, self.rank = name, rank

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.rank)

    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function there; see `ag.rpc_async`."""
        call = functools.partial(self._cluster.driver.agent.call, frame=sys._getframe(1))
        return self._cluster.as_driver(call, self.info, func, args, kwargs)

    def remote(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function there and leave its value there; see `ag.remote`."""
        from aiograd.rref import remote

        return self._cluster.as_driver(remote, self.info, func, args, kwargs)

    def stream(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Iterate over an asynchronous generator there; see `ag.rpc_stream`."""
        return self._cluster.as_driver(api.rpc_stream, self.info, func, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere the cluster cannot be reached, but the worker can.
        return WorkerInfo, (self.name, self.rank)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Handle):
            return self._cluster is other._cluster and self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        return hash((id(self._cluster), self.name))

    def __repr__(self) -> str:
        state = self._cluster.state(self.name) if self.name in self._cluster else "gone"
        return f"<worker {self.name!r} rank={self.rank} {state}>"


COLOURS = {"running": GREEN, "starting": "#d9a21b", "dead": "#cc3d3d", "closed": GREY}


def as_html(cluster: LocalCluster) -> str:
    """Show a cluster as a small table."""
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
