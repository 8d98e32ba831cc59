"""`LocalCluster`: workers on this machine, with this process as their driver and coordinator.

Workers run in processes of their own or, with `processes=False`, as tasks of this loop over an
in-process network. `cluster.py` has what all clusters share.

    LocalHosts      starts workers: `SpawnedWorker`, `ForkedWorker` or `LoopWorker`
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aiograd.cluster.cluster import Cluster, StartedWorker
from aiograd.cluster.config import DRIVER, THREAD_VARIABLES, WorkerPlan, check_count
from aiograd.cluster.joining.folders import PrivateFolder
from aiograd.cluster.processes.forkserver import ForkServer, can_fork, preloaded
from aiograd.cluster.processes.spawn import OutputLog, SpawnedWorker
from aiograd.cluster.worker import Worker
from aiograd.rpc.callee.exposure import exposing_modules
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network
from aiograd.wire.secrets import Secret

__all__ = ["LocalCluster"]

# Seconds a loop polls after traffic: if every worker has a core of its own, and if some share one.
# Long enough to meet the reply of a function that runs in a thread of the peer.
SPIN, SHORT_SPIN = 500e-6, 300e-6


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


class LocalHosts:
    """Processes of this machine, or tasks of this loop."""

    def __init__(self, n_workers: int, processes: bool, options: Options) -> None:
        self._processes, self._options = processes, options
        self.kind = "processes" if processes else "in this loop"
        if isinstance(options.secret, Mapping):
            raise ValueError("a local cluster is one party, with one secret for all its workers")
        if processes:
            options.check_proof_of_names(None)
        self._secret = options.secret or Secret(os.urandom(32))
        self._network: Network | None = None if processes else Network()
        self._folder: PrivateFolder | None = None  # of Unix sockets
        self._sockets = itertools.count()  # numbers of Unix sockets
        self._forkserver: ForkServer | None = None  # if there are several processes
        # `>=`: the driver needs a core as well.
        self._crowded = processes and n_workers >= _cores()
        self._threads = 0
        if processes and not any(name in os.environ for name in THREAD_VARIABLES):
            # What the user has not said: each worker computes on its part of the other cores.
            self._threads = max(1, (_cores() - 1) // max(1, n_workers))

    async def count(self) -> int:
        """Return how many workers suit this machine."""
        return _cores()

    async def driver_plan(self, rank: int) -> WorkerPlan:
        """Make the plan of the driver."""
        return self._plan(DRIVER, rank)

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Start workers: as tasks of this loop, by the fork server, or by exec."""
        coordinator, alone = cluster.driver.agent.info, self._processes
        if self._processes:
            # Processes are watched: how one ended is said by its exit, not by its connections.
            cluster.driver.agent.dialer.exit_is_reported = lambda peer: peer.name in cluster
        plans = [
            # One watchdog per loop is enough: the driver's, if workers share its loop.
            replace(self._plan(*place), coordinator=coordinator, watch=alone, background=alone)
            for place in places
        ]
        if not self._processes:
            return [LoopWorker(plan) for plan in plans]
        if self._forkserver is None or not self._forkserver.open:
            # A fork server for one worker would only be one more process to start, unless there is
            # a library to load before the worker has a loop that the import would block.
            if (len(plans) < 2 and not preloaded()) or not can_fork():
                return [SpawnedWorker(plan) for plan in plans]
            self._forkserver = ForkServer()
        return self._forkserver.fork_workers(plans)

    async def close(self) -> None:
        """End the fork server, and remove the folder of sockets."""
        # After its workers: it exits by itself when the last of them has.
        if self._forkserver is not None:
            await self._forkserver.close()
        if self._folder is not None:
            self._folder.close()

    def _plan(self, name: str, rank: int) -> WorkerPlan:
        spin = SHORT_SPIN if self._crowded else SPIN
        return WorkerPlan(
            name=name,
            rank=rank,
            options=self._options,
            secret=self._secret,
            network=self._network,
            listen=(self._address(rank),),
            # Polling saves the wake-up of another core; workers of one loop need none.
            spin=spin if self._processes else 0.0,
            crowded=self._crowded,
            threads=self._threads,
            # In the other modes a worker imports nothing that a peer names, so the modules that
            # expose functions are imported at its start.
            modules=() if self._options.mode == "trusted" else exposing_modules(),
        )

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


class LocalCluster(Cluster):
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
        options = options or Options()
        # Before anything starts: a mistake in an argument should not cost the start of processes.
        if processes and options.transport == "memory":
            raise ValueError("processes cannot share memory connections: use processes=False")
        check_count(n_workers)
        hosts = LocalHosts(n_workers, processes, options)
        super().__init__(hosts, n_workers, names, options, dashboard)


def _cores() -> int:
    # What this process may use: a container or `taskset` may allow fewer than the machine has.
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
