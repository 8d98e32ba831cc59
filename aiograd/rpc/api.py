"""The public functions for calls; each finds the current agent and lets it work."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from aiograd.errors import RpcError, WorkerClosed, WrongThread
from aiograd.rpc.agent import current_agent
from aiograd.rpc.callee.exposure import MARK
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.future import Future

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Future[Any]:
    """Call `func(*args, **kwargs)` on worker `to`; await the result.

    Starts at once. Unknown workers and arguments that cannot travel are raised here, everything
    else by `await`. `timeout=None` is what is left of the surrounding call's time, else
    `Options.timeout`; `math.inf` is none.
    """
    return current_agent().call(to, func, args, kwargs, timeout=timeout, frame=sys._getframe(1))


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """The blocking form of `rpc_async`, for code off the loop."""
    agent = _agent_off_loop("await ag.rpc_async(...)")
    future: Future[Any] = Future(loop=agent.loop)
    ended = _Latch(future)
    agent.call(to, func, args, kwargs, timeout=timeout, frame=sys._getframe(1), future=future)
    return ended.wait(agent)


def rpc_stream(
    to: Any,
    async_gen_func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Stream:
    """Iterate with `async for` over what a generator function yields on worker `to`.

    A slow reader slows the generator down; leaving the loop closes it. `timeout` (or the inherited
    budget) is for the whole stream; without one each item may take `Options.timeout`.
    """
    agent = current_agent()
    if not agent.here():
        raise WrongThread("a stream is read on the worker's loop: use run_sync for the whole loop")
    return agent.stream(to, async_gen_func, args, kwargs, timeout=timeout)


def run_sync(awaitable: Awaitable[T]) -> T:
    """Wait, off the loop, for anything awaitable: it runs on the worker's loop, in this context."""
    try:
        agent = _agent_off_loop("await it")
    except RpcError:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise
    future: asyncio.Future[Any] = agent.loop.create_future()
    ended = _Latch(future)
    context = contextvars.copy_context()

    async def work() -> None:
        try:
            value = await awaitable
        except asyncio.CancelledError:
            future.cancel()
            raise
        except BaseException as error:
            future.set_exception(_settable(error))
        else:
            future.set_result(value)

    def start() -> None:
        task = agent.spawn(work(), context)
        future.add_done_callback(lambda _: task.cancel())

    agent.from_thread(start)
    return ended.wait(agent)  # type: ignore[no-any-return]


def inline(func: F) -> F:
    """Mark a plain function as short and non-blocking: it runs on the callee's loop."""
    return _mark(func, "__aiograd_inline__")


def expose(func: F) -> F:
    """Let `registered` and `restricted` peers call this function, by its module and name.

    Of a class: let them make it. Of a method: let them call it where they hold a reference.
    """
    return _mark(func, MARK)


def idempotent(func: F) -> F:
    """Say that running a function twice does no harm: its calls survive the loss of a worker.

    When the worker is lost, or refuses for want of room, the call is made again up to four times,
    also at a restarted worker of that name, with growing pauses and never past its deadline.
    Arrays and objects among the arguments must stay as they are until the call has ended. `remote`
    and `rpc_stream` are not repeated: what they made would be gone.
    """
    return _mark(func, "__aiograd_idempotent__")


def _mark(func: F, mark: str) -> F:
    try:
        setattr(func, mark, True)
    except (AttributeError, TypeError):
        why = "only functions and classes written in Python can"
        raise TypeError(f"{func!r:.80} cannot be marked: {why}") from None
    return func


class Group:
    """Several workers at once.

        await Group(["worker0", "worker1"]).call(load, "data")        # one result per worker
        await Group(cluster.workers).map(score, range(1000))          # one result per item

    The first failure cancels the rest and is raised; `return_exceptions=True` gives exceptions as
    results instead.
    """

    def __init__(self, names: Any) -> None:
        if isinstance(names, str):
            raise TypeError(f"names should be several names, not the string {names!r}")
        self.names = list(names)

    def call(
        self,
        func: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> asyncio.Future[list[Any]]:
        """Call `func(*args, **kwargs)` on every member; results in the order of names."""
        calls = [(to, args, kwargs) for to in self.names]
        return _fan_out(func, calls, timeout, return_exceptions)

    def map(
        self,
        func: Callable[..., Any],
        iterable: Any,
        *,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> asyncio.Future[list[Any]]:
        """Call `func(item)` for every item, the members in turn; results in the order of items."""
        items = list(iterable)
        if items and not self.names:
            raise ValueError("a group without members cannot map anything")
        members = len(self.names)
        calls: list[Any] = [(self.names[i % members], (x,), {}) for i, x in enumerate(items)]
        return _fan_out(func, calls, timeout, return_exceptions)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Group({self.names!r})"


def _fan_out(
    func: Callable[..., Any],
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]],
    timeout: float | None,
    return_exceptions: bool,
) -> asyncio.Future[list[Any]]:
    agent, frame = current_agent(), sys._getframe(2)
    futures: list[Future[Any]] = []
    try:
        for to, args, kwargs in calls:
            futures.append(agent.call(to, func, args, kwargs or None, timeout=timeout, frame=frame))
    except BaseException:
        for future in futures:
            future.cancel()
        raise

    def end(_: object) -> None:
        for future in futures:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # looked at: the group tells of the first one

    if futures:
        together = asyncio.gather(*futures, return_exceptions=return_exceptions)
    else:
        together = agent.loop.create_future()
        together.set_result([])
    together.add_done_callback(end)
    return together


# ── waiting in a thread ─────────────────────────────────────────────────────────────────────────


def _agent_off_loop(instead: str) -> Agent:
    """The current agent, if this thread can wait for its loop."""
    if asyncio._get_running_loop() is not None:
        raise WrongThread(f"this is an event loop's thread, blocking would stop it: {instead}")
    agent = current_agent()
    if agent.here():
        raise WrongThread(
            f"this thread should run {agent.name}'s event loop: let it, and {instead}"
        )
    return agent


class _Latch:
    """Lets a thread wait for a future of the loop. Made before the loop knows the future."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self._lock = threading.Lock()
        self._lock.acquire()
        future.add_done_callback(lambda _: self._lock.release())

    def wait(self, agent: Agent) -> Any:
        try:
            agent.pool.acquire(self._lock)
        except BaseException:  # an interrupt: what we waited for is no longer wanted
            agent.loop.call_soon_threadsafe(self._future.cancel)
            raise
        if self._future.cancelled() and agent.closed:
            raise WorkerClosed(f"{agent.name} was shut down", agent.name)
        try:
            return self._future.result()
        finally:
            del self  # an error's traceback holds this frame, which would hold the error in turn


def _settable(error: BaseException) -> BaseException:
    """A future cannot hold StopIteration."""
    return RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
