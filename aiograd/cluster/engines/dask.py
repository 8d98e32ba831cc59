"""`DaskCluster`: workers inside the workers of a Dask cluster.

Dask decides where its workers are and how many there are. A worker plugin joins each of them to the
driver, on its own loop, also those that come later or come back; the driver says who is wanted.

    driver                              Dask worker
    register_plugin ──────────────────▶ JoinPlugin.setup: `cluster.place` with the key of this
    assign(key) ◀────────────────────── Dask worker; name and rank, or "not wanted"
    submit(hold, workers=[address]) ──▶ a task that has seceded: the scheduler sees a busy worker,
                                        so that adaptive scaling does not retire it as idle
    a client that is gone ────────────▶ Farewell, on the scheduler, removes the plugin

The key is Dask's name of the worker, which it keeps when its nanny restarts it, so the member comes
back under its name. Needs `pip install aiograd[dask]`, also where scheduler and workers run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import distributed
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from aiograd.cluster.cluster import Cluster, StartedWorker
from aiograd.cluster.config import WorkerPlan, check_count
from aiograd.cluster.engines.engine import EngineHosts, EngineWorker, HostedWorker, refuse
from aiograd.errors import RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import locality

__all__ = ["DaskCluster"]

_log = logging.getLogger("aiograd.cluster")

MEMBERS: Final = "_aiograd_members"  # attribute of a Dask worker: its members, by cluster


class DaskCluster(Cluster):
    """Workers `worker0 … worker{n-1}` inside the workers of a Dask cluster.

    `client` is a `distributed.Client`, blocking or asynchronous. Without `n`, every Dask worker is
    one, and those that come later join by themselves; with `n`, as many are used. Dask's nannies
    bring killed workers back, under the same name. Leaving removes everything but Dask itself.

        async with ag.cluster.DaskCluster(client) as cluster:
            await cluster["worker0"].call(f, 1)
    """

    def __init__(
        self, client: Any, n: int | None = None, *, options: Options | None = None
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
        if not isinstance(client, distributed.Client):
            raise TypeError(f"client should be a distributed.Client, not {type(client).__name__}")
        if n is not None:
            check_count(n)
        options = options or Options()
        super().__init__(DaskHosts(client, options, everyone=n is None), n, None, options)


class DaskHosts(EngineHosts):
    """The workers of a Dask cluster."""

    kind = "on Dask"

    def __init__(self, client: Any, options: Options, *, everyone: bool) -> None:
        super().__init__(options)
        self._client, self._everyone = client, everyone
        self._token = f"aiograd-{os.urandom(8).hex()}"  # the name of the plugin
        self._plugged = False
        self._wanted: list[tuple[str, int]] = []  # places for whichever Dask worker asks first
        self._places: dict[str, tuple[str, int]] = {}  # by key: who has been somewhere comes back
        self._unwanted: set[str] = set()  # keys that were scaled away
        self._addresses: dict[str, str] = {}  # of Dask workers, by the name of their member
        self._holds: dict[str, Any] = {}  # futures of the tasks that keep them, by name

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the client, without blocking this loop."""
        bound = functools.partial(getattr(self._client, method), *args, **kwargs)
        try:
            if self._client.asynchronous:
                answer = bound()
                return await answer if asyncio.iscoroutine(answer) or _awaitable(answer) else answer
            return await asyncio.to_thread(bound)
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            cure = "is its scheduler running, and can its workers import this aiograd?"
            raise refuse(f"Dask did not {method}", error, cure) from error

    async def _workers(self) -> dict[str, Any]:
        """Give what the scheduler knows of its workers, by address."""
        found = await self._ask("run_on_scheduler", _list_workers)
        return dict(found)

    async def count(self) -> int:
        """Return how many workers Dask has now."""
        return len(await self._workers())

    async def nodes(self) -> Sequence[tuple[str, str]]:
        """Ask every Dask worker where it is."""
        found = await self._ask("run", locality, on_error="ignore")
        return [
            (address.partition("://")[2].rpartition(":")[0], at) for address, at in found.items()
        ]

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Let Dask workers that are no members take these places; ask Dask for more if needed."""
        invitation = self.attach(cluster)
        starts = [self._start(cluster, place) for place in places]
        if not self._plugged:
            self._plugged = True
            cluster.driver.coordinator.assign = self._assign
            self._wanted += places
            plan = WorkerPlan(name="", rank=None, options=self.options, invitation=invitation)
            await self._ask("register_plugin", Farewell(self._token, self._client.id))
            await self._ask("register_plugin", JoinPlugin(self._token, plan), name=self._token)
        elif any(place in self._places.values() for place in places):
            await self._restart(places)
        else:
            self._wanted += places
            await self._find_room(cluster)
        if self._wanted:
            await self._check_room(cluster)
        return starts

    def _start(self, cluster: Cluster, place: tuple[str, int]) -> EngineWorker:
        name, rank = place
        plan = WorkerPlan(name=name, rank=rank, options=self.options)
        start = EngineWorker(plan, functools.partial(self._kill, cluster, name))
        self.starts[name] = start
        return start

    async def _find_room(self, cluster: Cluster) -> None:
        """Let Dask workers that are there join; if they are too few, ask Dask for more."""
        members = set(self._addresses.values())
        free = [address for address in await self._workers() if address not in members]
        free = free[: len(self._wanted)]
        missing = len(self._wanted) - len(free)
        if missing and getattr(self._client.cluster, "scale", None) is not None:
            scaled = self._client.cluster.scale(len(await self._workers()) + missing)
            if _awaitable(scaled):
                await scaled
        if free:
            await self._ask("run", _join_here, self._token, workers=free)

    async def _check_room(self, cluster: Cluster) -> None:
        """RpcError if Dask has too few workers, and nobody adds any."""
        workers = await self._workers()
        if getattr(self._client.cluster, "scale", None) is None and self._wanted:
            names = ", ".join(name for name, _ in self._wanted)
            self._wanted.clear()
            raise RpcError(
                f"Dask has {len(workers)} workers, and none is left for {names}: add workers to "
                f"{self._client.scheduler.address}, or ask for fewer"
            )

    async def _restart(self, places: Sequence[tuple[str, int]]) -> None:
        """Restart the Dask workers that have these places; the plugin joins them again."""
        for place in [each for each in self._places.values() if each in places]:
            address = self._addresses.get(place[0], "")
            if address not in await self._workers():
                self._wanted.append(place)  # for the next worker that comes
                continue
            with contextlib.suppress(RpcError):  # without a nanny it cannot be restarted
                await self._ask("restart_workers", [address])
            if address in await self._workers():
                await self._ask("run", _join_here, self._token, workers=[address])

    def _assign(self, key: str) -> tuple[str, int] | None:
        """Give a Dask worker its place: the one it had, one that waits, or a new one."""
        cluster = self._cluster
        if cluster is None:
            return None
        place = self._places.get(key)
        if place is None and self._wanted:
            place = self._wanted.pop(0)
        elif place is None and self._everyone and key not in self._unwanted:
            place = cluster.next_place()
        if place is None:
            return None
        self._unwanted.discard(key)
        self._places[key] = place
        start = self.starts.get(place[0])
        if start is None or start.ended.done():
            cluster.adopt(self._start(cluster, place))
        cluster.driver.agent.spawn(self._hold(cluster, place[0]))
        return place

    async def _hold(self, cluster: Cluster, name: str) -> None:
        """Keep Dask from retiring the worker of a member, when it has joined."""
        await cluster.driver.coordinator.wait_until_known([name])
        labels = cluster.driver.get_worker_info(name).labels
        address = self._addresses[name] = labels["dask.worker"]
        self.starts[name].pid = int(labels["pid"])
        with contextlib.suppress(RpcError):
            self._holds[name] = await self._submit(address, name)
        if not self._plugged:  # closed meanwhile
            self._release(name)

    async def _submit(self, address: str, name: str) -> Any:
        submit = functools.partial(
            self._client.submit,
            hold,
            self._token,
            key=f"{self._token}-{name}-{os.urandom(4).hex()}",
            workers=[address],
            allow_other_workers=False,
            pure=False,
        )
        return submit() if self._client.asynchronous else await asyncio.to_thread(submit)

    def departed(self, start: EngineWorker, peer: PeerInfo, why: str | None) -> None:
        """Forget a worker that Dask retired; one that was lost stays, until it is back."""
        assert self._cluster is not None
        name = peer.name
        self._release(name)
        if why is not None or self._cluster.restarts(name):
            return
        self._addresses.pop(name, None)
        if self._cluster.is_leaving(start):
            # Scaled away: it joins again only if it is asked to.
            gone = {key for key, place in self._places.items() if place[0] == name}
            self._unwanted |= gone
            self._places = {key: each for key, each in self._places.items() if key not in gone}
        else:
            self._cluster.forget(name)

    def _release(self, name: str) -> None:
        future = self._holds.pop(name, None)
        if future is not None:
            with contextlib.suppress(Exception):  # the client may be closed
                future.release()

    def _kill(self, cluster: Cluster, name: str) -> None:
        address = self._addresses.get(name)
        if address is None or not cluster.driver_runs:
            return
        killing = self._ask("run", _kill_process, workers=[address], wait=False)
        cluster.driver.agent.spawn(_quietly(killing))

    async def close(self) -> None:
        """Remove the plugins and tasks; Dask stays as it is."""
        plugged, self._plugged = self._plugged, False
        for name in list(self._holds):
            self._release(name)
        if plugged:
            for method in ("unregister_worker_plugin", "unregister_scheduler_plugin"):
                name = self._token if "worker" in method else f"{self._token}-farewell"
                await _quietly(self._ask(method, name))
        await super().close()


def _awaitable(value: Any) -> bool:
    return hasattr(value, "__await__")


async def _quietly(work: Any) -> None:
    """Await something whose failure means that there is nothing left to do."""
    try:
        await work
    except Exception as error:
        _log.debug("Dask: %s", error)


# ── on the scheduler ────────────────────────────────────────────────────────────────────────────


def _list_workers(dask_scheduler: Any) -> dict[str, str]:
    return {address: str(state.name) for address, state in dask_scheduler.workers.items()}


class Farewell(SchedulerPlugin):  # type: ignore[misc]  # distributed has no types
    """Removes the plugin of a cluster whose client is gone: else later workers dial nobody."""

    def __init__(self, token: str, client: str) -> None:
        self.name = f"{token}-farewell"
        self._token, self._client = token, client

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Remove the plugins, if it was the client of the driver."""
        if client != self._client:
            return

        async def remove() -> None:
            if self._token in scheduler.worker_plugins:
                await scheduler.unregister_worker_plugin(comm=None, name=self._token)
            with contextlib.suppress(Exception):
                scheduler.remove_plugin(self.name)

        scheduler.loop.add_callback(remove)


# ── on a Dask worker ────────────────────────────────────────────────────────────────────────────


class JoinPlugin(WorkerPlugin):  # type: ignore[misc]  # distributed has no types
    """Joins a Dask worker to the cluster, and leaves when it is closed."""

    idempotent = True

    def __init__(self, token: str, plan: WorkerPlan) -> None:
        self.name, self.plan = token, plan

    async def setup(self, worker: Any) -> None:
        """Join; a failure is logged, because no Dask worker should die of it."""
        try:
            await join_from(worker, self.name, self.plan)
        except Exception as error:
            _log.warning("Dask worker %s does not join: %s", worker.address, error)

    async def teardown(self, worker: Any) -> None:
        """Leave gracefully."""
        member = getattr(worker, MEMBERS, {}).pop(self.name, None)
        if member is not None:
            await member.leave()


async def join_from(worker: Any, token: str, plan: WorkerPlan) -> bool:
    """Let a Dask worker join; False if it is a member, or not wanted."""
    members: dict[str, HostedWorker] = worker.__dict__.setdefault(MEMBERS, {})
    member = members.get(token)
    if member is not None and member.running:
        return False
    name = str(worker.name)
    # A name that is the address changes with every start; that of its nanny stays.
    nanny = str(getattr(worker, "nanny", None) or "")
    key = name if name != worker.address else nanny or name
    labels = (f"dask.worker={worker.address}", f"dask.name={name}", f"pid={os.getpid()}")
    member = HostedWorker(replace(plan, key=f"the Dask worker {key}", labels=labels))
    try:
        await member.start()
    except RpcError as error:
        if "does not want" in str(error):
            return False
        raise
    members[token] = member
    return True


async def _join_here(token: str, dask_worker: Any) -> bool:
    plugin = dask_worker.plugins.get(token)
    return plugin is not None and await join_from(dask_worker, token, plugin.plan)


async def _kill_process() -> None:  # a coroutine: only those need not be waited for
    os.kill(os.getpid(), signal.SIGKILL)


def hold(token: str) -> None:
    """Keep a Dask worker busy, as its scheduler sees it, until its member has left."""
    worker: Any = distributed.get_worker()
    member = getattr(worker, MEMBERS, {}).get(token)
    distributed.secede()
    if member is not None:
        member.over.wait()
