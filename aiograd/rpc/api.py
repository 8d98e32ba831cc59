"""The public functions for calls: each finds the current agent and calls it.

rpc_async    on the loop or in a thread      a Future
rpc_sync     in a thread                     blocks for the result
rpc_stream   on the loop                     an async iterator
run_sync     in a thread                     blocks for any awaitable, which runs on the loop
Group        several workers at once
inline, expose, idempotent                   marks on functions, read by `callee.functions`
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Never,
    ParamSpec,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    overload,
)

from aiograd.errors import RpcError, WorkerClosed, WrongThread
from aiograd.rpc.agent import current_agent
from aiograd.rpc.balance import BalancedMap
from aiograd.rpc.callee.exposure import MARK
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.directory import To
from aiograd.rpc.future import Future
from aiograd.rpc.options import check_timeout
from aiograd.rpc.scope import RunningCall, current_scope

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")
E_co = TypeVar("E_co", covariant=True)
P = ParamSpec("P")
Kwargs: TypeAlias = Mapping[str, Any] | None

# The overloads below are for type checkers. Coroutine functions come first, because a function that
# returns a coroutine also fits the form after it. `args` fits the positional parameters of the
# function; where `kwargs` is given, the result is known and the arguments are not checked: typing
# cannot say what a dict holds. So `kwargs` is required in those forms: else they would accept every
# mistake in `args`.


@overload
def rpc_async(
    to: To, func: Callable[[], Coroutine[Any, Any, T]], *, timeout: float | None = None
) -> Future[T]: ...
@overload
def rpc_async(to: To, func: Callable[[], T], *, timeout: float | None = None) -> Future[T]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[[*Ts], Coroutine[Any, Any, T]],
    args: tuple[*Ts],
    *,
    timeout: float | None = None,
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], *, timeout: float | None = None
) -> Future[T]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> Future[T]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> Future[T]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[..., Coroutine[Any, Any, T]],
    *,
    kwargs: Kwargs,
    timeout: float | None = None,
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., T], *, kwargs: Kwargs, timeout: float | None = None
) -> Future[T]: ...
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
) -> Future[Any]:
    """Call `func(*args, **kwargs)` on worker `to`; await the result.

    The call starts at once, whether or not it is awaited; the Future may be awaited any number of
    times, and works in `asyncio.gather`, `wait` and `timeout`.

    - `to` is a name, a rank, a `WorkerInfo` or `cluster["worker0"]`. Calling oneself is allowed,
      and takes the same path: arguments and result are copies.
    - `func` is any function. An importable one is sent by reference, so the worker must be able to
      import its module; one of a script, notebook or another function by value, with what it uses.
      Functions of one script share their globals on a worker: what one sets, the others see there.
    - An `async def` runs on the worker's loop, a plain `def` in a thread there: neither stops the
      worker from answering, and plain ones may run at the same time. An operation (`ag.add`) or an
      `@ag.inline` function runs on the loop.
    - Arguments are copied as they are now; arrays of 64 KiB and more are *borrowed* until the call
      is done: do not write to them meanwhile, or send `a.copy()`. Tensors and RRefs are found at
      any depth; locks, open files and generators cannot travel (`SerializationError` says where).
    - Inside `async with ag.context()` gradients flow through the call; outside, tensors arrive as
      leaves of their own.
    - `timeout=None` is what is left of the surrounding call's time, else `Options.timeout` (60 s);
      `math.inf` is none. At the deadline `DeadlineExceeded` is raised, and the callee is cancelled.
    - Cancelling the future cancels the coroutine over there, with all that it waits for. A thread
      cannot be stopped: its result is dropped.
    - Unknown workers and arguments that cannot travel are raised here, all else by `await`: what
      the function raised, as its own type with the remote traceback as a note; `WorkerLost`, which
      says by `executed` whether the call may have run. It runs at most once and is never retried,
      unless the function is marked `@ag.idempotent`.

        >>> def scale(x, by=2):
        ...     return x * by
        >>> await ag.rpc_async("worker1", scale, args=(21,))
        42
        >>> await ag.rpc_async("worker1", scale, (21,), {"by": 3}, timeout=5.0)
        63
        >>> calls = [ag.rpc_async(rank, scale, args=(rank,)) for rank in (0, 1)]
        >>> await asyncio.gather(*calls)
        [0, 2]
        >>> await ag.rpc_async("worker1", int, args=("one",))
        Traceback (most recent call last):
            ...
        ValueError: invalid literal for int() with base 10: 'one'
    """
    # The caller's frame, to name its line if the call fails and is never awaited. Passed by hand:
    # a search for the first frame outside the library would be paid by every call.
    return current_agent().call(to, func, args, kwargs, timeout=timeout, frame=sys._getframe(1))


@overload
def rpc_sync(
    to: To, func: Callable[[], Coroutine[Any, Any, T]], *, timeout: float | None = None
) -> T: ...
@overload
def rpc_sync(to: To, func: Callable[[], T], *, timeout: float | None = None) -> T: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[[*Ts], Coroutine[Any, Any, T]],
    args: tuple[*Ts],
    *,
    timeout: float | None = None,
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], *, timeout: float | None = None
) -> T: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> T: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> T: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[..., Coroutine[Any, Any, T]],
    *,
    kwargs: Kwargs,
    timeout: float | None = None,
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., T], *, kwargs: Kwargs, timeout: float | None = None
) -> T: ...
def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
) -> Any:
    """Call `func(*args, **kwargs)` on worker `to` and wait for the result, in a thread.

    The blocking form of `rpc_async`, for plain functions that a worker runs and for other threads;
    WrongThread on the thread of an event loop.

        >>> def total(values):  # a plain function: worker0 runs it in a thread
        ...     return sum(ag.rpc_sync("worker1", abs, args=(v,)) for v in values)
        >>> await ag.rpc_async("worker0", total, args=([-1, 2],))
        3
    """
    agent = _agent_off_loop("await ag.rpc_async(...)")
    future: Future[Any] = Future(loop=agent.loop)
    ended = Latch(future)  # before the call: it may end before this thread gets to the next line
    agent.call(to, func, args, kwargs, timeout=timeout, frame=sys._getframe(1), future=future)
    try:
        return ended.wait(agent)
    finally:  # an error's traceback holds this frame, which must not hold the error in turn
        del future, ended


@overload
def rpc_stream(
    to: To,
    async_gen_func: Callable[[], AsyncIterator[T] | Iterator[T]],
    *,
    timeout: float | None = None,
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    async_gen_func: Callable[[*Ts], AsyncIterator[T] | Iterator[T]],
    args: tuple[*Ts],
    *,
    timeout: float | None = None,
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    async_gen_func: Callable[..., AsyncIterator[T] | Iterator[T]],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    async_gen_func: Callable[..., AsyncIterator[T] | Iterator[T]],
    *,
    kwargs: Kwargs,
    timeout: float | None = None,
) -> Stream[T]: ...
def rpc_stream(
    to: To,
    async_gen_func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
) -> Stream[Any]:
    """Iterate with `async for` over what a generator function yields on worker `to`.

    A slow reader slows the generator down; leaving the loop closes it. `timeout` (or the inherited
    budget) is for the whole stream; without one each item may take `Options.timeout`.

        >>> async def count(n):
        ...     for i in range(n):
        ...         yield i
        >>> [i async for i in ag.rpc_stream("worker1", count, args=(3,))]
        [0, 1, 2]
    """
    agent = current_agent()
    # A thread could not iterate asynchronously, and credits are given back on the loop.
    if not agent.here():
        raise WrongThread("a stream is read on the worker's loop: use run_sync for the whole loop")
    frame = sys._getframe(1)
    return agent.stream(to, async_gen_func, args, kwargs, timeout=timeout, frame=frame)


def run_sync(awaitable: Awaitable[T]) -> T:
    """Wait in a thread for an awaitable, which runs on the worker's loop in this context.

    WrongThread on the thread of an event loop. An interrupt (Ctrl-C) cancels the awaitable.

        >>> def work():  # in a thread of worker0
        ...     rref = ag.remote("worker1", pow, args=(2, 5))
        ...     return ag.run_sync(rref.to_here())
        >>> await ag.rpc_async("worker0", work)
        32
    """
    try:
        agent = _agent_off_loop("await it")
    except RpcError:
        if isinstance(awaitable, Coroutine):
            awaitable.close()  # else Python warns that it was never awaited, on top of the error
        raise
    future: asyncio.Future[Any] = agent.loop.create_future()
    ended = Latch(future)
    # The task is made on the loop, in a copy of this thread's context: current worker, autograd
    # context and deadline are the caller's.
    agent.from_thread(_start, agent, awaitable, future, contextvars.copy_context())
    try:
        return ended.wait(agent)  # type: ignore[no-any-return]
    finally:  # an error's traceback holds this frame, which must not hold the error in turn
        del future, ended, awaitable


def _start(
    agent: Agent,
    awaitable: Awaitable[Any],
    future: asyncio.Future[Any],
    context: contextvars.Context,
) -> None:
    task = agent.spawn(_resolve(future, awaitable), context)
    future.add_done_callback(lambda _: task.cancel())


async def _resolve(future: asyncio.Future[Any], awaitable: Awaitable[Any]) -> None:
    try:
        value = await awaitable
    except asyncio.CancelledError:
        future.cancel()
        raise
    except BaseException as error:
        future.set_exception(_settable(error))
    else:
        future.set_result(value)
    finally:  # as above
        del future, awaitable


def inline(func: F) -> F:
    """Mark a plain function as short and non-blocking: it runs on the callee's loop.

    >>> @ag.inline
    ... def add(a, b):
    ...     return a + b
    >>> await ag.rpc_async("worker1", add, args=(1, 2))
    3
    """
    return _mark(func, "__aiograd_inline__")


def expose(func: F) -> F:
    """Let `registered` and `restricted` peers call this function, by its module and name.

    On a class: let them instantiate it. On a method: let them call it through a reference.

        >>> @ag.expose
        ... def average(numbers):
        ...     return sum(numbers) / len(numbers)
        >>> await ag.rpc_async("worker1", average, args=([1, 3],))
        2.0
    """
    return _mark(func, MARK)


def idempotent(func: F) -> F:
    """Declare that running a function twice does no harm: its calls survive the loss of a worker.

    When the worker is lost, or is overloaded, the call is retried with backoff as `Options.retry`
    says (up to four times by default), also at a restarted worker of that name, and never past its
    deadline. Arrays and objects among the arguments must stay as they are until the call has ended.
    `remote` and `rpc_stream` are not retried: what they made would be gone.

        >>> @ag.idempotent
        ... def look_up(key):
        ...     return {"a": 1}[key]
        >>> await ag.rpc_async("worker1", look_up, args=("a",))
        1
    """
    return _mark(func, "__aiograd_idempotent__")


def _mark(func: F, mark: str) -> F:
    # An attribute, because it travels: a function sent by value keeps its `__dict__`, and one sent
    # by reference is marked by its own module at the callee.
    try:
        setattr(func, mark, True)
    except (AttributeError, TypeError):
        why = "only functions and classes written in Python can"
        raise TypeError(f"{func!r:.80} cannot be marked: {why}") from None
    return func


class Group(Generic[E_co]):
    """Several workers at once: `call` gives one result per worker, `map` one per item.

    The first failure cancels the rest and is raised; `group.within(return_exceptions=True)` gives
    exceptions as results instead, `group.within(3)` limits every call to three seconds.

        >>> group = ag.Group(["worker0", "worker1"])
        >>> await group.call(pow, 2, 3)
        [8, 8]
        >>> await group.within(3).map(str.upper, ["a", "b", "c"])
        ['A', 'B', 'C']
    """

    # What each result may be besides that of the function: never anything, or an exception.
    def __init__(self: Group[Never], names: Iterable[To]) -> None:
        if isinstance(names, str):  # else its letters would be the names
            raise TypeError(f"names should be several names, not the string {names!r}")
        self.names: list[To] = list(names)
        self._timeout: float | None = None
        self._return_exceptions = False

    @overload
    def within(
        self, seconds: float | None = None, return_exceptions: Literal[False] = False
    ) -> Group[Never]: ...
    @overload
    def within(
        self, seconds: float | None = None, *, return_exceptions: Literal[True]
    ) -> Group[BaseException]: ...
    @overload
    def within(
        self, seconds: float | None, return_exceptions: Literal[True]
    ) -> Group[BaseException]: ...
    def within(self, seconds: float | None = None, return_exceptions: bool = False) -> Group[Any]:
        """Return the same group with a timeout for each call, or with failures as results.

        Keywords of `call` belong to the called function, so these are given here:

            await group.within(3, return_exceptions=True).call(load, "data")

        None keeps the timeout that the group has. Without one it is what `rpc_async` takes: the
        rest of the surrounding call's time, else `Options.timeout`.
        """
        same: Group[Any] = Group(self.names)
        same._timeout = self._timeout if seconds is None else check_timeout(seconds)
        same._return_exceptions = return_exceptions
        return same

    @overload
    def call(
        self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[list[T | E_co]]: ...
    @overload
    def call(
        self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[list[T | E_co]]: ...
    def call(
        self, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[list[Any]]:
        """Call `func(*args, **kwargs)` on every member; results in the order of names."""
        calls = [(to, args, kwargs) for to in self.names]
        return _fan_out(func, calls, self._timeout, self._return_exceptions)

    @overload
    def map(
        self,
        func: Callable[[V], Coroutine[Any, Any, T]],
        iterable: Iterable[V],
        *,
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
        concurrency: int | None = None,
    ) -> asyncio.Future[list[T | E_co]]: ...
    @overload
    def map(
        self,
        func: Callable[[V], T],
        iterable: Iterable[V],
        *,
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
        concurrency: int | None = None,
    ) -> asyncio.Future[list[T | E_co]]: ...
    @overload
    def map(
        self,
        func: Callable[[V], Coroutine[Any, Any, T]],
        iterable: Iterable[V],
        *,
        timeout: float | None = None,
        return_exceptions: Literal[True],
        concurrency: int | None = None,
    ) -> asyncio.Future[list[T | BaseException]]: ...
    @overload
    def map(
        self,
        func: Callable[[V], T],
        iterable: Iterable[V],
        *,
        timeout: float | None = None,
        return_exceptions: Literal[True],
        concurrency: int | None = None,
    ) -> asyncio.Future[list[T | BaseException]]: ...
    def map(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        *,
        timeout: float | None = None,
        return_exceptions: bool = False,
        concurrency: int | None = None,
    ) -> asyncio.Future[list[Any]]:
        """Call `func(item)` for every item, each on the member that is free; results in order.

        A member works on `concurrency` items at once; by default on one, or as many as hide the
        messages of very short calls, and on 64 of a coroutine function. `timeout` is for each call,
        from when its item is given out. A member that is lost gets no further items.

            >>> await ag.Group(["worker0", "worker1"]).map(abs, [-1, 2, -3])
            [1, 2, 3]
        """
        # As a list at once: results have the order of items, and a failing iterator raises here.
        items = list(iterable)
        if items and not self.names:
            raise ValueError("a group without members cannot map anything")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is at least 1, not {concurrency}")
        agent = current_agent()
        work = BalancedMap(
            agent,
            self.names,
            func,
            items,
            timeout=self._timeout if timeout is None else timeout,
            return_exceptions=return_exceptions or self._return_exceptions,
            concurrency=concurrency,
            frame=sys._getframe(1),
        )
        if agent.here():
            work.start()
        else:  # in this thread's context, which `call_soon_threadsafe` copies
            agent.from_thread(work.start_or_fail)
        return work.results

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
    # The line that is named when a failure is never awaited: the caller of `call` or `map`.
    agent, frame = current_agent(), sys._getframe(2)
    futures: list[Future[Any]] = []
    try:
        for to, args, kwargs in calls:
            futures.append(agent.call(to, func, args, kwargs or None, timeout=timeout, frame=frame))
    except BaseException:  # an unknown worker, say: the caller gets no future to cancel the rest by
        for future in futures:
            future.cancel()
        raise

    def end(_: object) -> None:
        for future in futures:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                # Retrieved: the group raises the first failure, the others must not be logged.
                future.exception()

    if futures:
        together = asyncio.gather(*futures, return_exceptions=return_exceptions)
    else:
        together = agent.loop.create_future()
        together.set_result([])
    together.add_done_callback(end)
    return together


# ── waiting in a thread ─────────────────────────────────────────────────────────────────────────


def _agent_off_loop(instead: str) -> Agent:
    """Return the current agent, if this thread can wait for its loop; else raise WrongThread."""
    if asyncio._get_running_loop() is not None:
        raise WrongThread(f"this is an event loop's thread, blocking would stop it: {instead}")
    call = current_scope().call
    if isinstance(call, RunningCall) and call.cancelled:
        raise asyncio.CancelledError("the call that this thread runs was cancelled")
    agent = current_agent()
    # No loop runs in this thread, yet it is the one that should run the agent's, for example
    # between two `run_until_complete`: nothing would ever answer.
    if agent.here():
        raise WrongThread(
            f"this thread should run {agent.name}'s event loop: let it, and {instead}"
        )
    return agent


class Latch:
    """Lets a thread wait for a future of the loop. Make it before the loop knows the future."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self._lock = threading.Lock()
        self._lock.acquire()
        future.add_done_callback(lambda _: self._lock.release())

    def wait(self, agent: Agent) -> Any:
        """Block until the future is done; return its result or raise its error.

        CancelledError when the call that this thread runs is cancelled.
        """
        scope = current_scope()
        call = scope.call if isinstance(scope.call, RunningCall) else None
        if call is not None:
            call.begin_wait(self._future)
            if call.cancelled:
                agent.loop.call_soon_threadsafe(self._future.cancel)
        try:
            agent.pool.acquire(self._lock)  # a thread of the pool lets another one work meanwhile
        except BaseException:  # an interrupt: the result is no longer wanted
            agent.loop.call_soon_threadsafe(self._future.cancel)
            raise
        finally:
            if call is not None:
                call.end_wait(self._future)
        if self._future.cancelled() and agent.closed:
            raise WorkerClosed(f"{agent.name} was shut down", agent.name)
        try:
            return self._future.result()
        finally:
            del self  # an error's traceback holds this frame, which would hold the error in turn


def _settable(error: BaseException) -> BaseException:
    """Return what a future can hold in place of an error: StopIteration it refuses."""
    return RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
