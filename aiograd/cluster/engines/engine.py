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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from aiograd.cluster.cluster import Cluster
from aiograd.cluster.config import DRIVER, WorkerPlan
from aiograd.cluster.joining.folders import PrivateFolder
from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.joining.listening import listen_host, resolve_once
from aiograd.cluster.processes.spawn import OutputLog
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import join_address
from aiograd.wire.secrets import Secret

__all__ = ["EngineHosts", "EngineWorker", "HostedWorker"]

_log = logging.getLogger("aiograd.cluster")


class EngineWorker:
    """One start of one worker in a process of the engine, as the driver sees it."""

    def __init__(self, plan: WorkerPlan, kill: Callable[[], None]) -> None:
        self.plan = plan
        self.log: OutputLog = OutputLog()  # empty: the engine keeps the output of its processes
        self.pid: int | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.why = ""  # it was lost, if the engine has said so
        self._kill = kill

    def kill(self) -> None:
        """Let the engine kill its process."""
        if not self.ended.done():
            self._kill()

    def end(self, code: int) -> None:
        """Note that nothing of it is left."""
        if not self.ended.done():
            self.ended.set_result(code)


class EngineHosts:
    """The base of hosts on an engine: what does not depend on which one it is."""

    kind = "on an engine"

    def __init__(self, options: Options) -> None:
        if isinstance(options.secret, Mapping):
            raise ValueError("a cluster is one party, with one secret for all its workers")
        self.options = options
        self._secret = options.secret or Secret(os.urandom(32))
        self._folder: PrivateFolder | None = None  # of the driver's Unix socket
        self._cluster: Cluster | None = None
        self.starts: dict[str, EngineWorker] = {}  # the latest of each name

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
        if elsewhere or not listen:
            towards = join_address(elsewhere[0] if elsewhere else "127.0.0.1", 1)
            host, port = await listen_host(self.options, towards, resolve_once)
            listen.append(join_address(host, port))
        return replace(driver, listen=tuple(listen))

    def attach(self, cluster: Cluster) -> Invitation:
        """Follow the members of a cluster from now on; gives what its workers join by."""
        member = cluster.driver.member
        if self._cluster is None:
            self._cluster = cluster
            member.departed.append(self._departed)
        return cluster.driver.invitation()

    def _departed(self, peer: PeerInfo, why: str | None) -> None:
        start = self.starts.get(peer.name)
        if start is not None:
            start.end(0 if why is None else 1)
            self.departed(start, peer, why)

    def departed(self, start: EngineWorker, peer: PeerInfo, why: str | None) -> None:
        """Take note that a worker left, or was lost for a reason."""

    async def close(self) -> None:
        """Remove the driver's folder."""
        if self._folder is not None:
            self._folder.close()


class HostedWorker:
    """A worker in a process of an engine, on the loop of the engine."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._worker = Worker.from_plan(plan)
        self._serving: asyncio.Task[bool] | None = None
        self.over = threading.Event()  # set when it has left

    @property
    def running(self) -> bool:
        """Tell whether it is a member."""
        return self._serving is not None and not self._serving.done()

    @property
    def worker(self) -> Worker:
        """The worker itself."""
        return self._worker

    async def start(self) -> tuple[str, int, int]:
        """Join, and serve from then on; gives name, rank and process."""
        loop = asyncio.get_running_loop()
        # A context of its own: that of the engine's task must not stay the worker's.
        context = contextvars.Context()
        await loop.create_task(self._worker.start(), context=context)
        context.run(self._worker.make_current)
        self._serving = loop.create_task(self._worker.serve(), context=context)
        self._serving.add_done_callback(self._served)
        return self._worker.name, self._worker.rank, os.getpid()

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
        """Leave the cluster; without effect if it has left."""
        if self.running:
            await self._worker.close(graceful)
        self.over.set()


def refuse(engine: str, error: BaseException, cure: str) -> RpcError:
    """Make the error for an engine that cannot do what a cluster needs."""
    made = RpcError(f"{engine}: {error}; {cure}")
    made.__cause__ = error
    return made
