"""The functions for a program that is one worker: `init_rpc`, `shutdown`, `barrier`, and so on.

They act on the current worker, which `rpc/scope.py` keeps in a ContextVar.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from aiograd.cluster.config import plan_join
from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError, WorkerClosed
from aiograd.rpc import scope
from aiograd.rpc.api import inline
from aiograd.rpc.directory import WorkerInfo, WorkerList
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

    Arguments that are not given come from the environment of `aiograd run`, torchrun, Slurm, MPI or
    Kubernetes. Rank 0 listens at `rendezvous`: "host:port", "unix:path" or "file:path"; a world of
    one needs none, and without a `world_size` others may join at any time. Runs on the current
    loop; installs no signal handlers and no loop policy. On two hosts:

        worker = await ag.init_rpc("trainer", rank=0, world_size=2, rendezvous="host:29500")

        >>> worker = await ag.init_rpc("solo", rank=0, world_size=1)
        >>> await ag.rpc_async("solo", abs, args=(-1,))
        1
        >>> await ag.shutdown()
    """
    # Only this context: a LocalCluster in the same process, say, is another worker, and may stay.
    agent = scope.AGENT.get()
    if agent is not None and not agent.closed:
        raise RpcError(f"this context is worker {agent.name!r} already; shut it down first")
    worker = Worker(name, rank=rank, world_size=world_size, rendezvous=rendezvous, options=options)
    await worker.start()
    worker.make_current()
    return worker


async def join(
    where: Invitation | str,
    name: str | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    options: Options | None = None,
    patience: float = 60.0,
) -> Worker:
    """Enter a running open cluster; the worker is current, unless this context has one already.

    `where` is an `Invitation`, "host:port" or "unix:path" of any member, or "file:path", which rank
    0 or `Invitation.save` wrote. The coordinator assigns the rank, and the name unless it is given;
    variables of launchers are not read, except that AIOGRAD_SECRET_FILE names the secret where
    `aiograd run` has not set it. A name that DNS does not know yet, and a coordinator that is late,
    are waited for, at most `patience` seconds. `labels` can be read by all members, in
    `WorkerInfo.labels`. RpcError or AuthError if this process cannot join.

        >>> async with ag.LocalCluster(1) as cluster:
        ...     guest = await ag.join(cluster.driver.invitation(), labels={"gpu": "no"})
        ...     print(guest.name, guest.rank, ag.get_worker_info(guest.name).labels)
        ...     await guest.close()
        worker2 2 {'gpu': 'no'}
    """
    worker = Worker.from_plan(plan_join(where, name, labels, options, patience, os.environ))
    await worker.start()
    # A guest beside another worker, such as a driver, does not take its calls over.
    agent = scope.AGENT.get()
    if agent is None or agent.closed:
        worker.make_current()
    return worker


async def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave the cluster with the current worker; see `Worker.close`.

    >>> worker = await ag.init_rpc("solo", rank=0, world_size=1)
    >>> await ag.shutdown()
    >>> ag.current_worker()
    Traceback (most recent call last):
        ...
    aiograd.errors.WorkerClosed: ...
    """
    await current_worker().close(graceful, timeout)


def current_worker() -> Worker:
    """Give the worker of this context, else the last one started in this process and still open.

    WorkerClosed if there is none.

        >>> ag.current_worker().name
        'driver'
    """
    # An agent without a worker is possible: tests and bootstrapping use agents alone.
    worker = scope.current().parts.get(Worker)
    if not isinstance(worker, Worker):
        raise WorkerClosed()
    return worker


def get_worker_info(name_or_rank: str | int | None = None) -> WorkerInfo:
    """Look a member up by name or rank; without an argument, the current worker.

    UnknownWorker if there is no such member.

        >>> ag.get_worker_info().name, ag.get_worker_info("worker1").rank
        ('driver', 1)
    """
    return current_worker().get_worker_info(name_or_rank)


def workers() -> list[WorkerInfo]:
    """List the members of the cluster, in order of rank; `suspect` ones are silent at present.

    >>> [worker.name for worker in ag.workers()]
    ['worker0', 'worker1', 'driver']
    """
    return WorkerList(current_worker().workers())


async def barrier(names: Iterable[str] | None = None, timeout: float | None = None) -> None:
    """Wait until all members, or all of `names`, have reached this barrier.

    Concurrent barriers of the same workers pair up in the order of their calls. A worker whose wait
    is cancelled or exceeds `timeout` (DeadlineExceeded) counts as not arrived, and may try again.
    WorkerLost if a participant leaves or is lost.

        >>> async def step():
        ...     await ag.barrier(["worker0", "worker1"])
        ...     return "both are here"
        >>> await ag.Group(["worker0", "worker1"]).call(step)
        ['both are here', 'both are here']
    """
    await _gather(None, names, timeout, "barrier")


async def all_gather(
    value: Any, names: Iterable[str] | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """Exchange a value with all members, or all of `names`; gives the values by name.

    Pairs up, times out and fails as `barrier` does.

        >>> async def share():
        ...     name = ag.get_worker_info().name
        ...     return await ag.all_gather(len(name), ["worker0", "worker1"])
        >>> await ag.Group(["worker0", "worker1"]).call(share)
        [{'worker0': 7, 'worker1': 7}, {'worker0': 7, 'worker1': 7}]
    """
    return await _gather(value, names, timeout, "all_gather")


async def _gather(
    value: Any, names: Iterable[str] | None, timeout: float | None, what: str
) -> dict[str, Any]:
    worker = current_worker()
    # Inside a call, no longer than its remaining budget: the caller does not wait for more.
    seconds, _ = worker.agent.deadline(timeout)
    return await worker.member.collectives.gather(value, names, seconds, what)


@inline
def debug_info() -> dict[str, int]:
    """Give the counters of the current worker; all are 0 at rest, except `workers`.

    >>> ag.debug_info()["workers"], ag.debug_info()["pending_calls"]
    (3, 0)
    >>> (await ag.rpc_async("worker1", ag.debug_info))["workers"]
    3
    """
    return current_worker().debug_info()


# Not counted as a call: reading the counters of a worker must not change them.
debug_info.__aiograd_quiet__ = True  # type: ignore[attr-defined]
