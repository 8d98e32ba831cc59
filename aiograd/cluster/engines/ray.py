"""`RayCluster`: workers inside actors of Ray.

One asynchronous actor per worker, in a placement group: the worker runs on the actor's own loop, so
`ray.get`, the runtime context and Ray's own libraries work inside called functions.

    driver                                     actor
    placement_group(bundles, strategy)
    Actor.remote(plan with invitation) ──────▶ HostedWorker joins the driver directly
    wait() ◀────────────────────────────────── why it left; Ray's error if the actor died, which
                                               becomes the cause of the loss

The invitation is an argument of the actor, never in `runtime_env`, which Ray logs and shows. Needs
`pip install aiograd[ray]`, also on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aiograd.cluster.cluster import Cluster, StartedWorker
from aiograd.cluster.config import JOIN_TIMEOUT, WorkerPlan, check_count
from aiograd.cluster.engines.engine import EngineHosts, EngineWorker, HostedWorker
from aiograd.cluster.membership.collectives import mark_retrieved
from aiograd.errors import RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import locality

__all__ = ["RayCluster"]

_log = logging.getLogger("aiograd.cluster")

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class RayCluster(Cluster):
    """Workers `worker0 … worker{n-1}` inside actors of Ray, and this process as `driver`.

    `ray.init()` comes first. `resources` are those of one worker (default one CPU), `strategy` says
    how Ray spreads them over its nodes, and `runtime_env` is that of the actors. Leaving removes
    the actors and their placement group. RpcError if Ray has not the resources.

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
        super().__init__(hosts, n, None, options)


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
        super().__init__(options)
        self._resources, self._strategy = resources, strategy
        self._runtime_env, self._patience = runtime_env, patience
        self._groups: list[Any] = []  # placement groups; one more for each growth
        self._bundles: dict[str, tuple[Any, int]] = {}  # group and number in it, by name
        self._actors: dict[str, Any] = {}

    async def count(self) -> int:
        """Return how many workers fit onto what Ray has free."""
        free = ray.available_resources()
        return int(min(free.get(name, 0) // amount for name, amount in self._resources.items()))

    async def nodes(self) -> Sequence[tuple[str, str]]:
        """Give the addresses of Ray's nodes; those of this host have its locality."""
        if not ray.is_initialized():
            raise RpcError("Ray is not running in this process: call `ray.init()` first")
        own = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        return [
            (node["NodeManagerAddress"], locality() if node["NodeID"] == own else node["NodeID"])
            for node in alive
            # Several nodes on one machine, as tests start them, have its address.
            if node["NodeID"] == own or node["NodeManagerAddress"] != _own_address()
        ]

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Make an actor for each place: in its old bundle if it had one, else in a new group."""
        invitation = self.attach(cluster)
        # Ray knows better than a broken connection how an actor ended.
        cluster.driver.agent.dialer.exit_is_reported = lambda peer: peer.name in self.starts
        new = [name for name, _ in places if name not in self._bundles]
        if new:
            group = await self._reserve(len(new))
            self._bundles |= {name: (group, i) for i, name in enumerate(new)}
        starts = []
        for name, rank in places:
            plan = WorkerPlan(name=name, rank=rank, options=self.options, invitation=invitation)
            group, number = self._bundles[name]
            actor = self._actor(group, number).remote(plan)
            start = EngineWorker(plan, functools.partial(_kill, actor))
            self.starts[name], self._actors[name] = start, actor
            cluster.driver.agent.spawn(self._watch(cluster, start, actor))
            starts.append(start)
        return starts

    async def _reserve(self, count: int) -> Any:
        """Reserve the resources of some workers; RpcError if Ray does not have them in time."""
        if not count:
            return None
        bundles = [dict(self._resources) for _ in range(count)]
        group = placement_group(bundles, strategy=self._strategy)
        self._groups.append(group)
        ready = _future(group.ready())
        ready.add_done_callback(mark_retrieved)  # it fails when the group is removed
        done, _ = await asyncio.wait([ready], timeout=self._patience)
        if not done:
            missing = f"{count} bundles of {self._resources} ({self._strategy})"
            free = {key: ray.available_resources().get(key, 0.0) for key in self._resources}
            raise RpcError(
                f"Ray could not place {missing} within {self._patience:g} s; it has {free} free on "
                f"{len(ray.nodes())} nodes: ask for less, add nodes, or free some"
            )
        return group

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
            # Calls of `leave` and `alive` while `run` waits for the end.
            "max_concurrency": 8,
        }
        if self._runtime_env:
            settings["runtime_env"] = self._runtime_env
        return ray.remote(Actor).options(**settings)

    async def _watch(self, cluster: Cluster, start: EngineWorker, actor: Any) -> None:
        """Follow one actor until it ends; how it ended is what Ray says of it."""
        name = start.plan.name
        try:
            start.pid = await _future(actor.join.remote())
            await _future(actor.wait.remote())
            start.end(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            start.why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            start.log.add(str(error))
            peer = cluster.driver.member.roster.members.get(name)
            if peer is not None and start.pid is not None:
                cluster.driver.coordinator.process_ended(peer, f"Ray: {start.why}", error)
            start.end(1)
        if self._actors.get(name) is actor:
            _kill(actor)

    def departed(self, start: EngineWorker, peer: PeerInfo, why: str | None) -> None:
        """Free what a worker held that is not to come back."""
        _kill(self._actors.get(peer.name))

    async def close(self) -> None:
        """Kill the actors, and remove the placement groups."""
        for actor in self._actors.values():
            _kill(actor)
        for group in self._groups:
            with contextlib.suppress(Exception):  # Ray may have been shut down
                remove_placement_group(group)
        self._groups.clear()
        await super().close()


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())


def _future(reference: Any) -> asyncio.Future[Any]:
    """Give the result of a Ray reference as a future of this loop."""
    return asyncio.wrap_future(reference.future())


def _kill(actor: Any) -> None:
    if actor is not None:
        with contextlib.suppress(Exception):  # Ray may have been shut down
            ray.kill(actor)


class Actor:
    """One worker, on the loop of an asynchronous actor."""

    def __init__(self, plan: WorkerPlan) -> None:
        context = ray.get_runtime_context()
        labels = (f"ray.node={context.get_node_id()}", f"ray.actor={context.get_actor_id()}")
        self._plan = replace(plan, labels=labels)
        self._hosted: HostedWorker | None = None

    async def join(self) -> int:
        """Join the cluster; gives the process id."""
        self._hosted = HostedWorker(self._plan)
        _, _, pid = await self._hosted.start()
        return pid

    async def wait(self) -> str:
        """Wait until the worker has left; gives the reason."""
        assert self._hosted is not None
        return await self._hosted.wait()
