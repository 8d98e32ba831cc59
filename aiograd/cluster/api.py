"""The current worker: becoming one, asking it, meeting others as it, and leaving.

These are the functions for a program that is one worker; which one that is, `rpc/scope.py` knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError, WorkerClosed
from aiograd.rpc import scope
from aiograd.rpc.api import inline
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.options import Options


async def init_rpc(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    options: Options | None = None,
) -> Worker:
    """Join a cluster from this process and make the worker current; `shutdown` leaves it.

    What is not given comes from the environment. Runs on the current loop; installs no signal
    handlers and no loop policy.

        worker = await ag.init_rpc("trainer", rank=0, world_size=2, rendezvous="host:29500")
    """
    agent = scope.AGENT.get()
    if agent is not None and not agent.closed:
        raise RpcError(f"this context is worker {agent.name!r} already; shut it down first")
    worker = Worker(name, rank=rank, world_size=world_size, rendezvous=rendezvous, options=options)
    await worker.start()
    worker.make_current()
    return worker


async def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave the cluster with the current worker; see `Worker.close`."""
    await current_worker().close(graceful, timeout)


def current_worker() -> Worker:
    """The worker of this context, else the last one started in this process and still open."""
    worker = scope.current().parts.get(Worker)
    if not isinstance(worker, Worker):
        raise WorkerClosed()
    return worker


def get_worker_info(name_or_rank: str | int | None = None) -> WorkerInfo:
    """Look a member up by name or rank; without an argument, the current worker."""
    return current_worker().get_worker_info(name_or_rank)


def workers() -> list[WorkerInfo]:
    """List the members of the cluster, in order of rank; `suspect` ones say nothing just now."""
    return current_worker().workers()


async def barrier(names: Iterable[str] | None = None, timeout: float | None = None) -> None:
    """Wait until all members, or all of `names`, have come to this barrier.

    Concurrent ones of the same workers pair up in the order of their calls. Whoever gives up, by
    `timeout` or cancelled, has not come, and may come again.
    """
    await _gather(None, names, timeout, "barrier")


async def all_gather(
    value: Any, names: Iterable[str] | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """Give a value, and get everyone's, by name: of all members, or of all of `names`."""
    return await _gather(value, names, timeout, "all_gather")


async def _gather(
    value: Any, names: Iterable[str] | None, timeout: float | None, what: str
) -> dict[str, Any]:
    worker = current_worker()
    seconds, _ = worker.agent.deadline(timeout)  # no longer than the call that this is in
    return await worker.members.assembly.gather(value, names, seconds, what)


@inline
def debug_info() -> dict[str, int]:
    """Give the counters of the current worker; all of them are 0 at rest, except `workers`."""
    return current_worker().debug_info()


debug_info.__aiograd_quiet__ = True  # type: ignore[attr-defined]  # looking changes nothing
