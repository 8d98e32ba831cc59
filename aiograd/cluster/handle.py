"""`Handle`: one worker of a cluster for its user, to call it."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from aiograd.cluster.worker import Worker
from aiograd.rpc import api
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.future import Future
from aiograd.rpc.options import check_timeout
from aiograd.rref import RRef, remote

__all__ = ["Handle"]

T = TypeVar("T")
P = ParamSpec("P")


class Home(Protocol):
    """What a handle needs of its cluster."""

    @property
    def driver(self) -> Worker:
        """This process as a worker of the cluster."""

    def as_driver(self, func: Callable[..., T], *args: Any) -> T:
        """Call a function with the driver as the current worker."""

    def state(self, name: str) -> str:
        """Give the state of a worker."""

    def describe(self, name: str, rank: int) -> WorkerInfo:
        """Give a worker as other members see it."""

    def __contains__(self, name: object) -> bool: ...


class Handle:
    """One worker of a cluster: `await cluster["worker0"].call(f, 1, 2)`.

    All arguments are those of the function, keywords too, and an editor checks them:
    `cluster["worker0"].within(3).call(f, 1, key=2)` has a timeout of three seconds.

        >>> async with ag.LocalCluster(2, processes=False) as cluster:
        ...     worker = cluster["worker0"]
        ...     print(await worker.call(divmod, 7, 2))
        ...     print(await worker.within(3).remote(list, "ab"))
        ...     print([n async for n in worker.stream(range, 3)])
        (3, 1)
        ['a', 'b']
        [0, 1, 2]
    """

    __slots__ = ("_cluster", "_timeout", "name", "rank")

    _cluster: Home
    _timeout: float | None  # of each call; None is what `ag.rpc_async` takes
    name: str
    rank: int

    def __init__(self, cluster: Home, name: str, rank: int, timeout: float | None = None) -> None:
        self._cluster, self._timeout = cluster, timeout
        self.name, self.rank = name, rank

    @property
    def info(self) -> WorkerInfo:
        """The worker as other members see it."""
        return self._cluster.describe(self.name, self.rank)

    def within(self, seconds: float) -> Handle:
        """Return a handle of the same worker whose calls, values and streams have a timeout."""
        return Handle(self._cluster, self.name, self.rank, check_timeout(seconds))

    @overload
    def call(
        self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def call(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function there; see `ag.rpc_async`."""
        # The frame of the user: an error that nobody awaits is logged with the user's line.
        call = functools.partial(
            self._cluster.driver.agent.call, frame=sys._getframe(1), timeout=self._timeout
        )
        return self._cluster.as_driver(call, self, func, args, kwargs)

    @overload
    def remote(
        self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    @overload
    def remote(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    def remote(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Call a function there and keep its value there; see `ag.remote`."""
        make = functools.partial(remote, timeout=self._timeout)
        made: RRef[Any] = self._cluster.as_driver(make, self, func, args, kwargs)
        return made

    def stream(
        self,
        func: Callable[P, AsyncIterator[T] | Iterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Stream[T]:
        """Iterate over an asynchronous generator there; see `ag.rpc_stream`."""
        read = functools.partial(api.rpc_stream, timeout=self._timeout)
        items: Stream[T] = self._cluster.as_driver(read, self, func, args, kwargs)
        return items

    def __reduce__(self) -> tuple[Any, ...]:
        # Another worker cannot reach the cluster object, but it can call the worker.
        return WorkerInfo, (self.name, self.rank)

    def __eq__(self, other: object) -> bool:
        # By cluster, too: each one has a `worker0`.
        if isinstance(other, Handle):
            return self._cluster is other._cluster and self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        return hash((id(self._cluster), self.name))

    def __repr__(self) -> str:
        state = self._cluster.state(self.name) if self.name in self._cluster else "gone"
        return f"<worker {self.name!r} rank={self.rank} {state}>"
