"""`RayCluster`: workers inside actors of Ray.

One asynchronous actor per worker, in a placement group: the worker runs on the actor's own loop, so
`ray.get`, the runtime context and Ray's own libraries work inside called functions.

    driver                                     actor
    placement_group(bundles, strategy)
    Actor.remote(plan with invitation) ──────▶ HostedWorker joins the driver directly
    wait() ◀────────────────────────────────── why it left; Ray's error if the actor died, which
                                               becomes the cause of the loss

The invitation is an argument of the actor, never in `runtime_env`, which Ray logs and shows. Calls
of Ray that ask its servers run in threads: they block for as long as a server does not answer.
Needs `pip install aiograd[ray]`, also on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
from aiograd.cluster.membership.collectives import mark_retrieved
from aiograd.cluster.worker import run_to_completion
from aiograd.errors import AiogradError, RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import locality

__all__ = ["RayCluster"]

_log = logging.getLogger("aiograd.cluster")
T = TypeVar("T")

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# Seconds for a member to remove its sockets before its actor is killed.
EVICT_TIMEOUT: Final = 0.3
# Seconds that a loss waits for what Ray says of it. It takes 0.02 to 0.1 s, more on a busy machine.
REPORT_TIMEOUT: Final = 0.5
ANSWER: Final = 10.0  # seconds for Ray's servers to answer
SUMMARY: Final = 300  # characters of what Ray says, in an error
PLACING: Final = 1  # seconds, whole ones for Ray, between two looks whether nobody waits any more


class RayCluster(EngineCluster):
    """Workers `worker0 … worker{n-1}` inside actors of Ray, and this process as `driver`.

    `ray.init()` comes first. `resources` are those of one worker (default one CPU), `strategy` says
    how Ray spreads them over its nodes, and `runtime_env` is that of the actors. Leaving removes
    the actors and their placement group. RpcError if Ray has not the resources, or a worker does
    not come, within `patience` seconds each.

        ray.init()
        async with ag.cluster.RayCluster(4, resources={"CPU": 1}) as cluster:
            await cluster["worker0"].call(f, 1)
    """

    def __init__(
        self,
        n: int,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        *,
        options: Options | None = None,
        patience: float = JOIN_TIMEOUT,
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is one of {STRATEGIES}, not {strategy!r}")
        check_count(n)
        wanted = {"CPU": 1.0} if resources is None else dict(resources)
        if not wanted or any(amount <= 0 for amount in wanted.values()):
            raise ValueError(f"resources are positive amounts, not {wanted}")
        options = options or Options()
        hosts = RayHosts(wanted, strategy, dict(runtime_env or {}), options, patience)
        super().__init__(hosts, n, options, patience)


class RayHosts(EngineHosts):
    """Actors of Ray."""

    kind = "on Ray"

    def __init__(
        self,
        resources: dict[str, float],
        strategy: str,
        runtime_env: dict[str, Any],
        options: Options,
        patience: float,
    ) -> None:
        super().__init__(options, patience)
        self._resources, self._strategy = resources, strategy
        self._runtime_env = runtime_env
        self._groups: list[Any] = []  # placement groups; one more for each growth
        self._bundles: dict[str, tuple[Any, int]] = {}  # group and number in it, by name
        self._free: list[tuple[Any, int]] = []  # bundles whose worker was scaled away
        self._actors: dict[str, Any] = {}  # by name of the worker

    async def _ask(self, what: str, ask: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Ask Ray something in a thread; RpcError if it fails or does not answer."""
        _check_running()
        try:
            async with asyncio.timeout(ANSWER):
                return await asyncio.to_thread(ask, *args, **kwargs)
        except AiogradError:
            raise
        except Exception as error:
            address = "its address"
            if ray.is_initialized():
                address = ray.get_runtime_context().gcs_address
            error = error if str(error) else TimeoutError(f"no answer in {ANSWER:g} s")
            raise refuse(f"Ray did not {what}", error, f"is Ray running at {address}?") from error

    async def count(self) -> int:
        """Return how many workers fit onto what Ray has free."""
        free = await self._ask("say what is free", ray.available_resources)
        return int(min(free.get(name, 0) // amount for name, amount in self._resources.items()))

    async def nodes(self) -> Sequence[tuple[str, str]]:
        """Give the addresses of Ray's nodes; those of this host have its locality."""
        return await self._ask("list its nodes", _nodes)

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Make an actor for each place: in its old bundle if it had one, in a free or a new one."""
        invitation = self.attach(cluster)
        # Ray knows better than a broken connection how an actor ended.
        dialer = cluster.driver.agent.dialer
        dialer.exit_is_reported = lambda peer: peer.name in self.starts
        dialer.report_timeout = REPORT_TIMEOUT
        group = await self._reserve([name for name, _ in places if name not in self._bundles])
        starts = []
        for name, rank in places:
            plan = WorkerPlan(
                name=name,
                rank=rank,
                options=self.options,
                invitation=invitation,
                join_timeout=self.patience,
            )
            actor = self._actor(*self._bundles[name]).remote(plan)
            start = EngineWorker(plan, functools.partial(self._kill, name, actor))
            self.starts[name], self._actors[name] = start, actor
            self.spawn(self._watch(cluster, start, actor))
            starts.append(start)
        if group is not None:
            try:
                # The actors are on their way meanwhile: Ray starts them as soon as there is room.
                await self._wait_until_placed(group)
            except BaseException:
                for start in starts:
                    start.kill()
                    self._release(start.plan.name)
                raise
        return starts

    async def _reserve(self, names: Sequence[str]) -> Any:
        """Find a bundle for each worker; gives the placement group that was made for it, if any."""
        names = list(names)
        while names and self._free:
            self._bundles[names.pop(0)] = self._free.pop(0)
        if not names:
            return None
        bundles = [dict(self._resources) for _ in names]
        make = functools.partial(placement_group, bundles, strategy=self._strategy)
        # To its end, also if the start is cancelled: a group that nobody knows would stay.
        group = await run_to_completion(self._make_group(make))
        self._bundles |= {name: (group, number) for number, name in enumerate(names)}
        return group

    async def _make_group(self, make: Callable[[], Any]) -> Any:
        group = await self._ask("make a placement group", make)
        self._groups.append(group)
        return group

    async def _wait_until_placed(self, group: Any) -> None:
        """Wait until Ray has reserved a placement group; RpcError if it has not the resources."""
        # `group.ready()` would start a process of its own, only to say so.
        loop = asyncio.get_running_loop()
        end = loop.time() + self.patience
        while loop.time() < end:
            # In short turns: a thread cannot be cancelled.
            if await self._ask("place workers", group.wait, PLACING):
                return
        missing = f"{group.bundle_count} bundles of {self._resources} ({self._strategy})"
        free, nodes = await self._ask("say what is free", _free_resources, self._resources)
        raise RpcError(
            f"Ray could not place {missing} within {self.patience:g} s; it has {free} free on "
            f"{', '.join(nodes) or 'no node'}: ask for less, add nodes, or free some"
        )

    def _actor(self, group: Any, number: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        amounts = dict(self._resources)
        settings: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "resources": amounts,
            "scheduling_strategy": strategy,
            # Calls of `leave` while `wait` waits for the end.
            "max_concurrency": 8,
        }
        if self._runtime_env:
            settings["runtime_env"] = self._runtime_env
        return ray.remote(Actor).options(**settings)

    async def _watch(self, cluster: Cluster, start: EngineWorker, actor: Any) -> None:
        """Follow one actor until it ends; how it ended is what Ray says of it."""
        name = start.plan.name
        try:
            joining = _ask_actor(actor, "join")
            await asyncio.wait([joining], timeout=self.patience)
            if not joining.done():
                where = await self._ask("say where it is", _node_of, *self._bundles[name])
                start.fail(
                    RpcError(
                        f"{name!r} did not join from Ray within {self.patience:g} s; its actor is "
                        f"on {where}: look at its log there, or give more patience"
                    )
                )
                await _evict(actor)
                return
            await joining
            await _ask_actor(actor, "wait")
            _kill(actor)
            if cluster.is_leaving(start) and not cluster.restarts(name):
                self._release(name)
            start.end(0)
        except Exception as error:
            _kill(actor)
            start.log.add(str(error))
            peer = cluster.driver.member.roster.members.get(name) if cluster.driver_runs else None
            # By rank and process: a later start of this name is none of its business.
            if peer is not None and start.pid is not None and self._actors.get(name) is actor:
                why = f"Ray: {type(error).__name__}: {_summary(error)}"
                cluster.driver.coordinator.process_ended(peer, why, error)
                start.end(1)
            else:
                start.fail(_not_started(name, error))

    def _kill(self, name: str, actor: Any) -> None:
        start = self.starts.get(name)
        if start is not None and start.condemned:
            _kill(actor)
        else:
            self.spawn(_evict(actor))

    def departed(self, start: EngineWorker, peer: PeerInfo, why: str | None) -> None:
        """Kill the actor of a worker that was lost: perhaps it only cannot be reached."""
        # One that left is closing its sockets now. It has ended when its actor says so.
        if why is not None and ray.is_initialized():
            self.spawn(_evict(self._actors[peer.name]))
        elif why is not None:
            start.end(1)  # Ray has taken it along

    def _release(self, name: str) -> None:
        """Make the bundle of a worker free, and remove a placement group that is not in use."""
        if self._cluster is None or self._cluster.closing:
            return  # all of them are removed, when all workers have ended
        group, number = self._bundles.pop(name, (None, 0))
        if group is None:
            return
        self._free.append((group, number))
        if not any(used is group for used, _ in self._bundles.values()):
            self._free = [each for each in self._free if each[0] is not group]
            self.spawn(self._remove(group))

    async def _remove(self, group: Any) -> None:
        await _remove([group])
        if group in self._groups:  # not before: `close` removes what is left
            self._groups.remove(group)

    async def close(self) -> None:
        """Kill the actors, and remove the placement groups."""
        for actor in self._actors.values():
            _kill(actor)
        groups, self._groups = self._groups, []
        await _remove(groups)
        await super().close()


def _nodes() -> list[tuple[str, str]]:
    own = ray.get_runtime_context().get_node_id()
    address = ray.util.get_node_ip_address()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        (node["NodeManagerAddress"], locality() if node["NodeID"] == own else node["NodeID"])
        for node in alive
        # Several nodes on one machine, as tests start them, have its address.
        if node["NodeID"] == own or node["NodeManagerAddress"] != address
    ]


def _free_resources(wanted: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    free = ray.available_resources()
    alive = [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
    return {key: free.get(key, 0.0) for key in wanted}, alive


def _node_of(group: Any, number: int) -> str:
    """Name the host on which Ray has placed a bundle."""
    table = placement_group_table(group)
    node = table.get("bundles_to_node_id", {}).get(number, "")
    hosts = {each["NodeID"]: each["NodeManagerHostname"] for each in ray.nodes()}
    return f"{hosts.get(node, 'an unknown host')} (node {node or 'unknown'})"


def _check_running() -> None:
    """RpcError if Ray was shut down: most of its functions would start another one."""
    if not ray.is_initialized():
        raise RpcError("Ray is not running in this process: call `ray.init()` first")


def _ask_actor(actor: Any, method: str) -> asyncio.Future[Any]:
    """Call a method of an actor; gives its result as a future of this loop."""
    _check_running()
    future = asyncio.wrap_future(getattr(actor, method).remote().future())
    future.add_done_callback(mark_retrieved)  # nobody may be left to read it
    return future


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it may be dead, and Ray may have been shut down
        _check_running()
        ray.kill(actor)


async def _evict(actor: Any) -> None:
    """Let a member remove its sockets, if it can, and kill its actor."""
    try:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(EVICT_TIMEOUT):
                await _ask_actor(actor, "leave")
    finally:
        _kill(actor)


async def _remove(groups: Sequence[Any]) -> None:
    """Remove placement groups; within bounded time, because Ray may be gone."""

    def remove() -> None:
        for group in groups:
            if ray.is_initialized():
                remove_placement_group(group)

    if not groups:
        return
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await asyncio.to_thread(remove)
    except Exception as error:
        _log.warning("Ray did not remove placement groups: %r", error)


def _summary(error: BaseException) -> str:
    """Give what Ray says of the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line.startswith("The actor is dead because")]
    text = (reasons or lines or [""])[0]
    return text if len(text) <= SUMMARY else text[:SUMMARY] + " …"


def _not_started(name: str, error: Exception) -> RpcError:
    """Say why an actor did not become a member, and where."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RpcError):  # it ran, and the cluster has refused it
        return refuse(f"{name!r} could not join from Ray", cause, "see its versions and addresses")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = RpcError(f"{_summary(error)}; {lines[-1][:SUMMARY]}" if lines else repr(error))
    said.__cause__ = error
    cure = "every node needs the Python, numpy and aiograd[ray] of this one"
    return refuse(f"Ray could not start {name!r}", said, cure)


class Actor:
    """One worker, on the loop of an asynchronous actor."""

    def __init__(self, plan: WorkerPlan) -> None:
        context = ray.get_runtime_context()
        labels = (f"ray.node={context.get_node_id()}", f"ray.actor={context.get_actor_id()}")
        self._plan = replace(plan, labels=labels)
        self._hosted: HostedWorker | None = None

    async def join(self) -> None:
        """Join the cluster."""
        self._hosted = HostedWorker(self._plan)
        await self._hosted.start()

    async def wait(self) -> str:
        """Wait until the worker has left; gives the reason."""
        assert self._hosted is not None
        return await self._hosted.wait()

    async def leave(self) -> None:
        """Leave at once."""
        if self._hosted is not None:
            await self._hosted.leave(graceful=False)
