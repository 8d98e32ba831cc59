"""`DaskCluster`: workers inside the workers of a Dask cluster.

Dask decides where its workers are and how many there are. A worker plugin joins each of them to the
driver, on its own loop, also those that come later or come back; the driver says who is wanted.

    driver                              Dask worker
    register_plugin ──────────────────▶ setup of the plugin: `cluster.place` with the key of this
    assign(key) ◀────────────────────── Dask worker; name and rank, or "not wanted"
    submit(hold, workers=[address]) ──▶ a task that has seceded: the scheduler sees a busy worker,
                                        so that adaptive scaling does not retire it as idle
    trouble() ────────────────────────▶ why one did not join: no Dask worker fails because of us
    a client that is gone ────────────▶ a scheduler plugin removes the worker plugin

The key is Dask's name of the worker, which it keeps when its nanny restarts it, so the member comes
back under its name. Needs `pip install aiograd[dask]`, also where the Dask workers run. What the
scheduler gets, and the plugin itself, travel by value: they can be loaded without aiograd.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import distributed
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from aiograd.cluster.cluster import Cluster, StartedWorker
from aiograd.cluster.config import JOIN_TIMEOUT, WorkerPlan, check_count
from aiograd.cluster.engines.engine import (
    CLOSE_TIMEOUT,
    EngineCluster,
    EngineHosts,
    EngineWorker,
    HostedWorker,
    refuse,
)
from aiograd.errors import AiogradError, RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import locality

__all__ = ["DaskCluster"]

_log = logging.getLogger("aiograd.cluster")

MEMBERS: Final = "_aiograd_members"  # attribute of a Dask worker: its members, by cluster
LOOK: Final = 1.0  # seconds between two looks why a worker does not join
CURE: Final = "every Dask worker needs the Python, numpy and aiograd[dask] of this process"


class DaskCluster(EngineCluster):
    """Workers `worker0 … worker{n-1}` inside the workers of a Dask cluster.

    `client` is a `distributed.Client`, blocking or asynchronous. Without `n`, every Dask worker is
    one, and those that come later join by themselves; with `n`, as many are used. Dask's nannies
    bring killed workers back, under the same name. Leaving removes everything but Dask itself.
    RpcError if a worker has not joined within `patience` seconds, or cannot.

        async with ag.cluster.DaskCluster(client) as cluster:
            await cluster["worker0"].call(f, 1)
    """

    def __init__(
        self,
        client: Any,
        n: int | None = None,
        *,
        options: Options | None = None,
        patience: float = JOIN_TIMEOUT,
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
        if not isinstance(client, distributed.Client):
            raise TypeError(f"client should be a distributed.Client, not {type(client).__name__}")
        if n is not None:
            check_count(n)
        options = options or Options()
        hosts = DaskHosts(client, options, patience, everyone=n is None)
        super().__init__(hosts, n, options, patience)


class DaskHosts(EngineHosts):
    """The workers of a Dask cluster."""

    kind = "on Dask"

    def __init__(self, client: Any, options: Options, patience: float, *, everyone: bool) -> None:
        super().__init__(options, patience)
        self._client, self._everyone = client, everyone
        self._token = f"aiograd-{os.urandom(8).hex()}"  # the name of the plugin
        self._plugged = False
        self._unplugging: asyncio.Task[None] | None = None
        self._wanted: list[tuple[str, int]] = []  # places for whichever Dask worker asks first
        self._places: dict[str, tuple[str, int]] = {}  # by key: who has been somewhere comes back
        self._unwanted: set[str] = set()  # keys that were scaled away
        self._addresses: dict[str, str] = {}  # of Dask workers, by the name of their member
        self._holds: dict[str, Any] = {}  # futures of the tasks that keep them, by name

    async def _ask(
        self, method: str, *args: Any, within: float | None = None, **kwargs: Any
    ) -> Any:
        """Call the client, without blocking this loop; RpcError if it fails or takes too long."""
        seconds = self.patience if within is None else within
        bound = functools.partial(getattr(self._client, method), *args, **kwargs)
        try:
            async with asyncio.timeout(seconds):
                if not self._client.asynchronous:
                    return await asyncio.to_thread(bound)
                answer = bound()
                return await answer if hasattr(answer, "__await__") else answer
        except AiogradError:
            raise
        except TimeoutError as error:
            silent = TimeoutError(f"no answer within {seconds:g} s{await self._silent()}")
            raise refuse(f"Dask did not {method}", silent, "is it overloaded?") from error
        except Exception as error:
            cure = f"is its scheduler running at {self._scheduler()}? {CURE}"
            raise refuse(f"Dask did not {method}", error, cure) from error

    def _scheduler(self) -> str:
        return str(getattr(self._client.scheduler, "address", "") or "an unknown address")

    async def _silent(self) -> str:
        """Name the Dask workers that the scheduler has not heard of for long."""
        try:
            ask = self._client.run_on_scheduler
            async with asyncio.timeout(1.0):
                if self._client.asynchronous:
                    found = await ask(_silent_workers())
                else:
                    found = await asyncio.to_thread(ask, _silent_workers())
        except Exception:
            return f" from its scheduler at {self._scheduler()}"
        return f"; it has not heard of {', '.join(found)}" if found else ""

    async def _workers(self) -> list[str]:
        """Give the addresses of the workers that the scheduler knows."""
        return list(await self._ask("run_on_scheduler", _list_workers()))

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
        starts = [self._start(place) for place in places]
        first = not self._plugged
        try:
            if first:
                self._plugged = True
                cluster.driver.coordinator.assign = self._assign
                # Also without grace: the members are to be gone before the cluster is closed.
                cluster.driver.left.add_done_callback(lambda _: self._unplug())
                self._wanted += places
                plan = WorkerPlan(
                    name="",
                    rank=None,
                    options=self.options,
                    invitation=invitation,
                    join_timeout=self.patience,
                )
                farewell = make_farewell(self._token, self._client.id)
                await self._ask("register_plugin", farewell, name=farewell.name)
                plugin = make_plugin(self._token, pickle.dumps(plan))
                await self._ask("register_plugin", plugin, name=self._token)
            elif any(place in self._places.values() for place in places):
                await self._restart(places)
            else:
                self._wanted += places
                await self._find_room()
            await self._check_room(starts, first)
        except BaseException:
            for start in starts:
                start.kill()
            raise
        for start in starts:
            self.spawn(self._follow(start))
        return starts

    def _start(self, place: tuple[str, int]) -> EngineWorker:
        name, rank = place
        plan = WorkerPlan(name=name, rank=rank, options=self.options)
        start = EngineWorker(plan, lambda: self._kill(start))
        self.starts[name] = start
        return start

    # ── finding Dask workers ────────────────────────────────────────────────────────────────────

    async def _find_room(self) -> None:
        """Let Dask workers that are there join; if they are too few, ask Dask for more."""
        members, workers = set(self._addresses.values()), await self._workers()
        free = [address for address in workers if address not in members]
        free = free[: len(self._wanted)]
        missing = len(self._wanted) - len(free)
        if missing and getattr(self._client.cluster, "scale", None) is not None:
            scaled = self._client.cluster.scale(len(workers) + missing)
            if hasattr(scaled, "__await__"):
                await scaled
        if free:
            await self._ask("run", _join_here, self._token, workers=free)

    async def _check_room(self, starts: Sequence[EngineWorker], first: bool) -> None:
        """RpcError if places are left, and no Dask worker will take them."""
        left = [start.plan.name for start in starts if self._place(start) in self._wanted]
        grows = getattr(self._client.cluster, "scale", None) is not None
        if not left or (grows and not (first and self._everyone)):
            return
        trouble, workers = await self._trouble(), await self._workers()
        needed = sum(not start.ended.done() for start in self.starts.values())
        if not trouble and len(workers) >= needed:
            return  # some were restarted meanwhile, and are on their way
        said = "".join(f"; {text}" for _, text in trouble)
        cure = CURE if trouble else f"add workers to {self._scheduler()}, or ask for fewer"
        raise RpcError(
            f"Dask has {len(workers)} workers, and none is left for {', '.join(left)}{said}: {cure}"
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

    async def _trouble(self) -> list[tuple[str, str]]:
        """Ask the Dask workers why they do not join: their keys, and what each says."""
        found = await self._ask("run", _say_trouble(), self._token, on_error="ignore")
        return [
            (key, f"Dask worker {address} on {host}: {text}")
            for address, answer in found.items()
            for key, host, text in answer
        ]

    async def _follow(self, start: EngineWorker) -> None:
        """Wait until a worker has joined; fail its start if it cannot."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.patience
        arrived: asyncio.Future[Any] = loop.create_task(start.arrived.wait())
        try:
            await asyncio.sleep(0)  # it may have joined before this task began
            while not arrived.done() and not start.ended.done():
                await self._look(start, late=loop.time() >= end)
                await asyncio.wait(
                    {arrived, start.ended}, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            arrived.cancel()

    async def _look(self, start: EngineWorker, late: bool) -> None:
        """Fail a start that has no hope, or that is late, with what is known of it."""
        place = self._place(start)
        keys = [key for key, taken in self._places.items() if taken == place]
        try:
            trouble = await self._trouble()
            said = [text for key, text in trouble if key in keys or (late and not keys)]
            count = len(await self._workers()) if late else 0
        except RpcError as error:
            said, count = [str(error)] if late else [], 0
        if start.arrived.is_set() or not (said or late):
            return
        name, where = start.plan.name, keys[0] if keys else f"any of its {count} workers"
        waited = f" within {self.patience:g} s" if late else ""
        text = f"Dask did not start {name!r} on {where}{waited}"
        start.fail(RpcError(f"{'; '.join((text, *said))}; {CURE}"))
        self._drop(start)
        if self._cluster is not None and self._everyone and start.adopted:
            _log.warning("%s", start.failure)
            self._cluster.forget(name)

    # ── members ─────────────────────────────────────────────────────────────────────────────────

    def _place(self, start: EngineWorker) -> tuple[str, int]:
        assert start.plan.rank is not None
        return start.plan.name, start.plan.rank

    def _drop(self, start: EngineWorker) -> list[str]:
        """Take the place of a worker back; gives the keys of those that had it."""
        place = self._place(start)
        keys = [key for key, taken in self._places.items() if taken == place]
        self._wanted = [each for each in self._wanted if each != place]
        for key in keys:
            del self._places[key]
        return keys

    def _assign(self, key: str) -> tuple[str, int] | None:
        """Give a Dask worker its place: the one it had, one that waits, or a new one."""
        cluster = self._cluster
        if cluster is None:
            return None
        place = self._places.get(key)
        if place is None and self._wanted:
            place = self._wanted[0]
        elif place is None and self._everyone and key not in self._unwanted:
            place = cluster.next_place()
        if place is None:
            return None
        # A place has one holder: another worker may have taken that of one that did not come back.
        self._wanted = [each for each in self._wanted if each != place]
        self._places = {k: each for k, each in self._places.items() if each != place}
        self._unwanted.discard(key)
        self._places[key] = place
        start = self.starts.get(place[0])
        if start is None or start.ended.done():
            start = self._start(place)
            start.adopted = True
            cluster.adopt(start)
            self.spawn(self._follow(start))
        return place

    def joined(self, start: EngineWorker, peer: PeerInfo) -> None:
        """Keep Dask from retiring the worker of a member."""
        address = self._addresses[peer.name] = peer.info.labels.get("dask.worker", "")
        self.spawn(self._hold(start, address))

    async def _hold(self, start: EngineWorker, address: str) -> None:
        name = start.plan.name
        submit = functools.partial(
            self._client.submit,
            hold,
            self._token,
            key=f"{self._token}-{name}-{os.urandom(4).hex()}",
            workers=[address],
            allow_other_workers=False,
            pure=False,
        )
        try:
            held = submit() if self._client.asynchronous else await asyncio.to_thread(submit)
        except Exception as error:
            _log.warning("Dask may retire the worker of %s: %s", name, error)
            return
        self._release(name)
        self._holds[name] = held
        if not self._plugged or start.ended.done():  # gone meanwhile
            self._release(name)

    def departed(self, start: EngineWorker, peer: PeerInfo, why: str | None) -> None:
        """Forget a worker that Dask retired; one that was lost stays, until it is back."""
        assert self._cluster is not None
        name = peer.name
        leaving = self._cluster.is_leaving(start)
        super().departed(start, peer, why)
        self._release(name)
        if why is not None or self._cluster.restarts(name):
            return
        self._addresses.pop(name, None)
        if leaving:
            # Scaled away: it joins again only if it is asked to.
            self._unwanted.update(self._drop(start))
        else:
            self._cluster.forget(name)

    def _release(self, name: str) -> None:
        future = self._holds.pop(name, None)
        if future is not None:
            with contextlib.suppress(Exception):  # the client may be closed
                future.release()

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def _kill(self, start: EngineWorker) -> None:
        name, cluster = start.plan.name, self._cluster
        if self._place(start) in self._wanted or cluster is None or not cluster.driver_runs:
            self._drop(start)
            start.end(1)  # nobody has it, or `close` lets it leave
            return
        address = self._addresses.get(name)
        # A Dask worker may live in this process, as in its own tests.
        if start.condemned and address is not None and start.pid != os.getpid():
            killing = self._ask("run", _kill_process, workers=[address], wait=False)
            self.spawn(_quietly(killing))
        else:
            # The process is Dask's, and may have work of others.
            keys = [key for key, taken in self._places.items() if taken == self._place(start)]
            self.spawn(self._evict(start, keys))

    async def _evict(self, start: EngineWorker, keys: Sequence[str]) -> None:
        """Let the member leave at once that has, or is about to have, one of these places."""
        await _quietly(self._ask("run", _leave_here, self._token, keys, within=CLOSE_TIMEOUT))
        start.end(1)

    def _unplug(self) -> None:
        """Begin to remove everything of ours from Dask, once."""
        if self._unplugging is None and self._plugged:
            self._plugged = False
            self._unplugging = asyncio.get_running_loop().create_task(self._remove_plugins())

    async def _remove_plugins(self) -> None:
        for name in list(self._holds):
            self._release(name)
        # Its teardown lets the members leave, and returns when they have.
        for method, name in (
            ("unregister_worker_plugin", self._token),
            ("unregister_scheduler_plugin", f"{self._token}-farewell"),
        ):
            await _quietly(self._ask(method, name, within=CLOSE_TIMEOUT))
        for start in self.starts.values():
            start.end(0)

    async def close(self) -> None:
        """Remove the plugins and tasks; Dask stays as it is."""
        self._unplug()
        if self._unplugging is not None:
            await self._unplugging
        await super().close()


async def _quietly(work: Awaitable[Any]) -> None:
    """Await something whose failure means that there is nothing left to do."""
    try:
        await work
    except Exception as error:
        _log.debug("Dask: %s", error)


# ── by value: what can be loaded without aiograd ────────────────────────────────────────────────

# Functions and classes inside functions, because cloudpickle sends those by value. They use nothing
# of this module.


def _list_workers() -> Callable[..., Any]:
    def list_workers(dask_scheduler: Any) -> list[str]:
        return list(dask_scheduler.workers)

    return list_workers


def _silent_workers() -> Callable[..., Any]:
    def silent_workers(dask_scheduler: Any) -> list[str]:
        from time import time

        now = time()
        return [
            f"{state.name} at {address} for {now - state.last_seen:.0f} s"
            for address, state in dask_scheduler.workers.items()
            if now - state.last_seen > 2
        ]

    return silent_workers


def _say_trouble() -> Callable[..., Any]:
    def say_trouble(token: str, dask_worker: Any) -> list[tuple[str, str, str]]:
        plugin = dask_worker.plugins.get(token)
        return list(plugin.trouble) if plugin is not None else []

    return say_trouble


def make_farewell(token: str, client: str) -> Any:
    """Make the scheduler plugin that removes the worker plugin of a client that is gone.

    Without it later workers would dial a driver that has died.
    """

    class Farewell(SchedulerPlugin):  # type: ignore[misc]  # distributed has no types
        def __init__(self, token: str, client: str) -> None:
            self.name = f"{token}-farewell"
            self.token, self.client = token, client

        def remove_client(self, scheduler: Any, client: str) -> None:
            if client != self.client:
                return

            async def remove() -> None:
                if self.token in scheduler.worker_plugins:
                    await scheduler.unregister_worker_plugin(comm=None, name=self.token)
                if self.name in scheduler.plugins:
                    scheduler.remove_plugin(self.name)

            scheduler.loop.add_callback(remove)

    return Farewell(token, client)


def make_plugin(token: str, plan: bytes) -> Any:
    """Make the worker plugin that joins a Dask worker, and lets it leave when it is closed."""

    class Join(WorkerPlugin):  # type: ignore[misc]  # distributed has no types
        idempotent = True

        def __init__(self, token: str, plan: bytes) -> None:
            self.name, self.plan = token, plan
            self.trouble: list[tuple[str, str, str]] = []  # key, host, and why it does not join

        async def setup(self, worker: Any) -> None:
            import logging
            import socket

            # A name that is the address changes with every start; that of its nanny stays.
            name, nanny = str(worker.name), str(getattr(worker, "nanny", None) or "")
            key = f"the Dask worker {name if name != worker.address else nanny or name}"
            # A failure is kept for the driver, because no Dask worker should die of it.
            self.trouble = []
            try:
                from aiograd.cluster.engines.dask import join_from

                await join_from(worker, self.name, self.plan, key)
            except Exception as error:
                self.trouble.append((key, socket.gethostname(), f"{type(error).__name__}: {error}"))
                log = logging.getLogger("distributed.worker")
                log.warning("%s on %s does not join aiograd: %s", *self.trouble[0])

        async def teardown(self, worker: Any) -> None:
            member = worker.__dict__.get("_aiograd_members", {}).pop(self.name, None)
            if member is not None:
                await member.leave()

    return Join(token, plan)


# ── on a Dask worker ────────────────────────────────────────────────────────────────────────────


async def join_from(worker: Any, token: str, plan: bytes, key: str) -> bool:
    """Let a Dask worker join; False if it is a member, or not wanted."""
    members: dict[str, HostedWorker] = worker.__dict__.setdefault(MEMBERS, {})
    member = members.get(token)
    if member is not None and member.leaving:  # it was scaled away just now
        await member.wait()
    if member is not None and member.running:
        return False
    labels = (f"dask.worker={worker.address}", f"dask.name={worker.name}")
    member = HostedWorker(replace(pickle.loads(plan), key=key, labels=labels))
    members[token] = member  # before it has joined: `teardown` ends it then, too
    try:
        await member.start()
    except RpcError as error:
        if "does not want" in str(error):
            return False
        raise
    return True


async def _join_here(token: str, dask_worker: Any) -> None:
    plugin = dask_worker.plugins.get(token)
    if plugin is not None:
        await plugin.setup(dask_worker)


async def _leave_here(token: str, keys: Sequence[str], dask_worker: Any) -> None:
    member = dask_worker.__dict__.get(MEMBERS, {}).get(token)
    if member is not None and member.key in keys:
        await member.leave(graceful=False)


async def _kill_process() -> None:  # a coroutine: only those need not be waited for
    os.kill(os.getpid(), signal.SIGKILL)


def hold(token: str) -> None:
    """Keep a Dask worker busy, as its scheduler sees it, until its member has left."""
    worker: Any = distributed.get_worker()
    member = getattr(worker, MEMBERS, {}).get(token)
    distributed.secede()
    if member is not None:
        member.over.wait()
