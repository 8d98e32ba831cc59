"""What clusters on other engines share: Dask, Ray and ssh.

    driver's process                                   a process of the engine
    EngineHosts.driver_plan ─▶ driver listens
    EngineHosts.start ─────── plan with invitation ──▶ HostedWorker: a `Worker` on the engine's loop
    EngineWorker.ended ◀───── the member left or was lost

The engine decides where processes are, and when they begin and end; messages go directly between
workers. The driver listens on this host alone while all processes of the engine are here.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from aiograd.cluster.cluster import Cluster, StartedWorker
from aiograd.cluster.config import DRIVER, JOIN_TIMEOUT, WorkerPlan
from aiograd.cluster.joining.folders import PrivateFolder
from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.joining.listening import listen_host, resolve_once
from aiograd.cluster.joining.rendezvous import read_secret_file
from aiograd.cluster.processes.spawn import OutputLog
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.transport.interfaces import join_address
from aiograd.wire.secrets import Secret

__all__ = ["PID", "EngineCluster", "EngineHosts", "EngineWorker", "HostedWorker", "refuse"]

_log = logging.getLogger("aiograd.cluster")

PID: Final = "pid"  # the label of a hosted worker with the id of its process
# Seconds after which a kill counts as done that the engine does not confirm: it may be gone itself.
KILL_TIMEOUT: Final = 1.0
CLOSE_TIMEOUT: Final = 2.0  # seconds for an engine to remove what is ours


class EngineWorker:
    """One start of one worker in a process of the engine, as the driver sees it."""

    def __init__(self, plan: WorkerPlan, kill: Callable[[], None]) -> None:
        self.plan = plan
        self.log: OutputLog = OutputLog()  # empty: the engine keeps the output of its processes
        self.pid: int | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.arrived = asyncio.Event()  # it has joined
        self.adopted = False  # the engine has started it by itself
        self.failure: RpcError | None = None  # why it could not be started
        self.condemned = False  # the user wants its process killed, not only the member gone
        self._kill = kill

    def kill(self) -> None:
        """Let the engine end it; `ended` follows within a second, whatever the engine does."""
        if not self.ended.done():
            asyncio.get_running_loop().call_later(KILL_TIMEOUT, self.end, 1)
            self._kill()

    def end(self, code: int) -> None:
        """Note that nothing of it is left."""
        if not self.ended.done():
            self.ended.set_result(code)

    def fail(self, failure: RpcError) -> None:
        """Note that it could not be started, and why."""
        if not self.ended.done():
            self.failure = failure
            self.ended.set_result(1)


class EngineCluster(Cluster):
    """The base of clusters on an engine."""

    def __init__(
        self, hosts: EngineHosts, n: int | None, options: Options, patience: float
    ) -> None:
        # A second more: the hosts know better than the cluster why somebody did not come.
        super().__init__(hosts, n, None, options, patience=patience + 1.0)
        self._engine = hosts

    async def kill(self, name: str) -> None:
        """Kill the process of a worker, as SIGKILL does; the engine may bring it back.

        Returns when it is no member any more.
        """
        # Without this, a process of the engine is left alive, and its member alone is ended.
        start = self._engine.starts.get(self[name].name)
        if start is not None:
            start.condemned = True
        await super().kill(name)


class EngineHosts:
    """The base of hosts on an engine: what does not depend on which one it is."""

    kind = "on an engine"

    def __init__(self, options: Options, patience: float = JOIN_TIMEOUT) -> None:
        if isinstance(options.secret, Mapping) or isinstance(options.secret_file, Mapping):
            raise ValueError("a cluster is one party, with one secret for all its workers")
        if options.secret is not None:
            self._secret = Secret(options.secret)
        elif options.secret_file is not None:
            self._secret = read_secret_file(os.fspath(options.secret_file))
        else:
            self._secret = Secret(os.urandom(32))
        # Workers get it with the invitation: the file is on this host.
        self.options = replace(options, secret_file=None)
        self.patience = check_timeout(patience)
        self._folder: PrivateFolder | None = None  # of the driver's Unix socket
        self._cluster: Cluster | None = None
        self.starts: dict[str, EngineWorker] = {}  # the latest of each name
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until the hosts are closed.

        Not a task of the driver's agent: what an engine says of its processes has to arrive, and
        they have to be ended, after the driver has closed as well.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s: %r", self.kind, error)

    async def count(self) -> int:
        """Return how many workers there can be."""
        raise NotImplementedError

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Begin to start workers of these names and ranks."""
        raise NotImplementedError

    async def nodes(self) -> Sequence[tuple[str, str]]:
        """List the address and the locality of the hosts on which workers may run."""
        raise NotImplementedError

    async def driver_plan(self, rank: int) -> WorkerPlan:
        """Make the plan of the driver; it listens for other hosts if the engine has any."""
        driver = WorkerPlan(name=DRIVER, rank=rank, options=self.options, secret=self._secret)
        here = Worker.from_plan(driver).whereabouts()[1]
        listen = []
        if self.options.transport != "tcp":
            self._folder = PrivateFolder()
            listen.append(f"unix:{self._folder.path}/driver")
        elsewhere = [address for address, locality in await self.nodes() if locality != here]
        # Also if the user says where: a host that seems to be this one may be a container of it.
        if elsewhere or not listen or self.options.listen is not None:
            towards = {join_address(each, 1) for each in elsewhere or ["127.0.0.1"]}
            routes = [listen_host(self.options, each, resolve_once) for each in towards]
            places = set(await asyncio.gather(*routes))
            # Several networks lead to the workers: at all addresses of this host.
            place = places.pop() if len(places) == 1 else ("0.0.0.0", 0)
            listen.append(join_address(*place))
        return replace(driver, listen=tuple(listen))

    def attach(self, cluster: Cluster) -> Invitation:
        """Follow the members of a cluster from now on; gives what its workers join by."""
        member = cluster.driver.member
        if self._cluster is None:
            self._cluster = cluster
            member.joined.append(self._joined)
            member.departed.append(self._departed)
        return cluster.driver.invitation()

    def _joined(self, peer: PeerInfo) -> None:
        start = self.starts.get(peer.name)
        if start is not None:
            pid = peer.info.labels.get(PID, "")
            start.pid = int(pid) if pid.isdecimal() else None
            start.arrived.set()
            self.joined(start, peer)

    def joined(self, start: EngineWorker, peer: PeerInfo) -> None:
        """Take note that a worker can be called."""

    def _departed(self, peer: PeerInfo, why: str | None) -> None:
        start = self.starts.get(peer.name)
        if start is not None:
            self.departed(start, peer, why)

    def departed(self, start: EngineWorker, peer: PeerInfo, why: str | None) -> None:
        """Take note that a worker left, or was lost for a reason."""
        start.end(0 if why is None else 1)

    async def close(self) -> None:
        """End what still runs for these hosts, and remove the driver's folder."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._folder is not None:
            self._folder.close()


class HostedWorker:
    """A worker in a process of an engine, on the loop of the engine."""

    def __init__(self, plan: WorkerPlan) -> None:
        labels = (*plan.labels, f"{PID}={os.getpid()}")
        self._worker = Worker.from_plan(replace(plan, labels=labels))
        self.key: str = plan.key  # what the engine calls this process
        # A context of its own: that of the engine's task must not stay the worker's.
        self._context = contextvars.Context()
        self._joining: asyncio.Task[Worker] | None = None
        self._serving: asyncio.Task[bool] | None = None
        self.over = threading.Event()  # set when it has left

    @property
    def running(self) -> bool:
        """Tell whether it is a member, or about to be one."""
        task = self._serving or self._joining
        return task is not None and not task.done()

    @property
    def leaving(self) -> bool:
        """Tell whether it was dismissed, and is about to leave."""
        serving = self._serving
        return serving is not None and not serving.done() and self._worker.member.dismissed.done()

    async def start(self) -> None:
        """Join, and serve from then on."""
        loop = asyncio.get_running_loop()
        self._joining = loop.create_task(self._worker.start(), context=self._context)
        try:
            await self._joining
        except BaseException:
            self.over.set()
            raise
        self._context.run(self._worker.make_current)
        self._serving = loop.create_task(self._worker.serve(), context=self._context)
        self._serving.add_done_callback(self._served)

    def _served(self, serving: asyncio.Task[bool]) -> None:
        self.over.set()
        if not serving.cancelled() and (error := serving.exception()) is not None:
            _log.warning("%s: served until %r", self._worker.name, error)

    async def wait(self) -> str:
        """Wait until it has left; gives the reason."""
        if self._serving is not None:
            await asyncio.wait([self._serving])
        return await self._worker.left

    async def leave(self, graceful: bool = True) -> None:
        """Leave the cluster, or do not join any more; without effect if it has left."""
        if self._joining is not None and not self._joining.done():
            self._joining.cancel()
            await asyncio.wait([self._joining])
        elif self._serving is not None and not self._serving.done():
            await self._worker.close(graceful)
            self._serving.cancel()  # nobody dismisses it any more
            await asyncio.wait([self._serving])
        self.over.set()


def refuse(engine: str, error: BaseException, cure: str) -> RpcError:
    """Make the error for an engine that cannot do what a cluster needs."""
    made = RpcError(f"{engine}: {error}; {cure}")
    made.__cause__ = error
    return made
