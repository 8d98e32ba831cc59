"""A worker of a cluster in the user's hand, and what a cluster looks like in a notebook."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiograd.card import BLUE, GREEN, GREY, card, code, dot, table
from aiograd.rpc import api
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.future import Future

if TYPE_CHECKING:
    from aiograd.cluster.local import LocalCluster


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
