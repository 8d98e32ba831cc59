"""How an invocation runs: right here, as a task, in a thread, or as a stream; to its end or not.

    start ─┬─ service, op, @inline function, light builtin ──▶ right here
           ├─ coroutine function ─────────────▶ task
           ├─ generator (stream) ─────────────▶ task
           ├─ any other function ─────────────▶ thread
           └─ delegate ──▶ what it names, in its turn, as one of the above
    an awaitable result ──▶ task ──▶ `responses`

What runs right here cannot be cancelled and has ended before anything else happens, so it is not
tracked. Everything else is tracked until it is answered: a coroutine is cancelled when its caller
cancels the call, or its time is over. A thread cannot be stopped: its result is dropped, and it
counts as abandoned until it returns. The calls that it waits for are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
from collections.abc import Callable
from types import CoroutineType, FrameType
from typing import Any, Final, Protocol

from aiograd.errors import ProtocolError, SerializationError, WorkerLost
from aiograd.rpc.callee.functions import DELEGATE, INLINE, LIGHT, TASK
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.callee.responses import ResponseHost, Responses
from aiograd.rpc.channel import Channel
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.envelope import pack_value
from aiograd.rpc.extension import Departure
from aiograd.rpc.observe.tracing import visit
from aiograd.rpc.runtime.thread_shares import ThreadShares
from aiograd.rpc.scope import SCOPE, CallScope, RunningCall, enter_scope
from aiograd.wire.codec import Codec
from aiograd.wire.framing import Frame
from aiograd.wire.messages import CALL, ITEM, POST
from aiograd.wire.safecodec import DataCodec

WINDOW: Final = 8  # items of a stream on their way: enough to hide the journey, few to stop soon
AGES: Final = 1e9  # seconds; nobody waits longer, and clocks cannot count much further
_ABOUT_NOW: Final = 0.1  # seconds that deadlines of one moment may differ between two workers
_END: Final = object()


class ExecutionHost(ResponseHost, Protocol):
    """What running functions needs of the worker."""

    profiles: Any  # recordings of everything that is called here; None: nothing observes calls
    tally: Any  # counts what is called here; then `profiles` is not None
    # Gives what runs in place of a function that is called here; None: the function itself.
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None

    @property
    def services(self) -> dict[str, Callable[..., Any]]:
        """The services of the layers above, by name."""

    @property
    def pool(self) -> Any:
        """The threads."""

    @property
    def thread_shares(self) -> ThreadShares:
        """The parts of them that partners may use."""

    @property
    def polling(self) -> Any:
        """What keeps the loop spinning for a moment after traffic."""

    @property
    def runtime(self) -> Any:
        """The clock, for recordings."""

    def restricts(self, peer: PeerInfo) -> bool:
        """Whether only plain data crosses the connection to a peer."""

    def codec_for(self, peer: PeerInfo) -> Codec | DataCodec:
        """Return the codec for what is exchanged with a peer."""


class Execution:
    """What one peer has called here, and runs."""

    def __init__(
        self,
        channel: Channel,
        host: ExecutionHost,
        responses: Responses,
        guest: PeerInfo | None,
    ) -> None:
        self._channel, self._host, self._responses = channel, host, responses
        self._guest = guest  # the peer, if it may call only what is exposed
        self._loop, self._deadlines = host.loop, host.deadlines
        # A partner's functions have a share of the threads.
        account = channel.account
        self.threads: Any = host.pool if account is None else host.thread_shares.of(account.name)
        self.running: dict[int, Invocation] = {}  # tracked, by number
        self.abandoned: int = 0  # threads that compute for nobody

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def start(self, invocation: Invocation) -> None:
        """Run an invocation whose arguments are decoded and may be used."""
        host, target = self._host, invocation.target
        if invocation.kind != CALL:
            return self._serve(invocation)
        if target.mode == DELEGATE:
            return self._delegate(invocation)
        here = target.mode == INLINE and invocation.stream is None
        if not here and target.builtin and invocation.stream is None and not invocation.kwargs:
            light = LIGHT.get(target.func)
            here = light is not None and light(invocation.args)
        if invocation.execution is None:
            if not here:
                self.track(invocation)
            elif target.kind != "op":  # ops make no calls, so nothing asks for their deadline
                assert invocation.context is not None
                self.enter_scope(invocation.context, self.deadline(invocation.budget))
        if invocation.record is not None or host.profiles is not None:
            invocation.visit = visit(invocation, host)
        if host.wrapper is not None and target.kind != "op":
            invocation.func = host.wrapper(invocation.func)
        context = invocation.context
        if here:
            assert context is not None
            kwargs = invocation.kwargs
            try:
                if kwargs:
                    value = context.run(invocation.func, *invocation.args, **kwargs)
                else:
                    value = context.run(invocation.func, *invocation.args)
            except BaseException as error:
                return self.fail(invocation, error)
            if target.kind == "op" and invocation.execution is None:  # never a coroutine
                return self._responses.succeed(invocation, value)
            return self.returned_here(invocation, value)
        if invocation.stream is not None:
            invocation.task = self._loop.create_task(invocation.stream.drive(), context=context)
        elif target.mode == TASK:
            invocation.task = self._loop.create_task(self._perform(invocation), context=context)
        else:
            invocation.in_thread = True
            self.threads.submit(_ThreadJob(self, invocation))

    def _delegate(self, invocation: Invocation) -> None:
        """Start what runs in place of an invocation's function, when it is its turn."""
        if invocation.execution is None:
            self.track(invocation)
        assert invocation.context is not None
        args, kwargs = invocation.args, invocation.kwargs or {}
        try:
            delegate = invocation.context.run(invocation.func, *args, **kwargs)
        except BaseException as error:
            return self.fail(invocation, error)
        invocation.target, invocation.args, invocation.kwargs, turn = delegate
        invocation.func = invocation.target.func
        if turn is not None:
            invocation.turn = turn
            come = turn.wait()
            if come is not None:
                invocation.task = self._host.spawn(self._wait_and_start(invocation, [come]))
                return
        self.start(invocation)

    def start_after(self, invocation: Invocation, waits: list[asyncio.Future[Any]]) -> None:
        """Run an invocation when everything that its arguments brought may be used."""
        self.track(invocation)
        invocation.task = self._host.spawn(self._wait_and_start(invocation, waits))

    async def _wait_and_start(
        self, invocation: Invocation, waits: list[asyncio.Future[Any]]
    ) -> None:
        try:
            while waits:  # none is held on to: the traceback of its error would hold it in turn
                await waits.pop(0)
        except asyncio.CancelledError as error:
            self.fail(invocation, error)
            invocation.args, invocation.kwargs = (), None  # see `_abandon`
            raise
        except Exception as error:
            self._forget(invocation)
            return self._responses.refuse(invocation, error)
        invocation.task = None
        if not invocation.abandoned:
            self.start(invocation)

    def track(self, invocation: Invocation) -> None:
        """Let an invocation be cancelled by its caller, and by its deadline."""
        self.running[invocation.id] = invocation
        invocation.execution = self
        budget, deadline = invocation.budget, math.inf
        if budget <= AGES:
            deadline = self._loop.time() + budget
            invocation.bucket = bucket = self._deadlines.bucket(deadline, budget)
            bucket[invocation] = None
        else:
            invocation.came = self._loop.time()
        if invocation.kind == CALL:
            assert invocation.context is not None
            scope = CallScope(deadline, self._guest, None, RunningCall())
            invocation.context.run(enter_scope, scope)

    def deadline(self, budget: float) -> float:
        """Return the loop time at which a call that has come just now must have ended."""
        return self._loop.time() + budget if budget <= AGES else math.inf

    def enter_scope(self, context: contextvars.Context, deadline: float) -> None:
        """Let calls that a function makes in this context inherit its deadline."""
        context.run(enter_scope, CallScope(deadline, self._guest, None, object()))

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _serve(self, invocation: Invocation) -> None:
        """Run a service of the library, which is always done right here."""
        host, context = self._host, invocation.context
        assert context is not None
        handler = host.services.get(invocation.target.name)
        if handler is None:
            why = f"no service {invocation.target.name!r}"
            return self._responses.refuse(invocation, ProtocolError(why, host.name))
        try:
            value = context.run(handler, self._channel.peer, *invocation.args)
        except Exception as error:
            return self.fail(invocation, error)
        if value is not None or invocation.kind != POST:  # else there is nothing to answer
            self.returned_here(invocation, value)

    def returned_here(self, invocation: Invocation, value: Any) -> None:
        """Answer with what a function has returned, or wait for it."""
        # A class attribute, as `asyncio.isfuture` looks for it: two calls less for most results.
        if isinstance(value, CoroutineType) or hasattr(value.__class__, "_asyncio_future_blocking"):
            if invocation.execution is None:
                self.track(invocation)
            else:  # a thread has returned it, perhaps after it was abandoned
                self.running[invocation.id] = invocation
            invocation.func, invocation.args, invocation.kwargs = _await_value, (value,), None
            invocation.task = self._loop.create_task(
                self._perform(invocation), context=invocation.context
            )
        elif invocation.execution is None:
            self._responses.succeed(invocation, value)
        else:
            self.succeed(invocation, value)

    async def _perform(self, invocation: Invocation) -> None:
        try:
            value = await invocation.func(*invocation.args, **(invocation.kwargs or {}))
        except asyncio.CancelledError as error:
            self.fail(invocation, _ended_with_loop(self._host.name) or error)
            # The task keeps the error, whose traceback holds this frame and those of the function.
            # Without this they would hold the task in turn, and the function's arguments, until
            # the next garbage collection.
            invocation.task = None
            if invocation.abandoned:
                raise
        except BaseException as error:  # SystemExit in a function must not end the worker
            self.fail(invocation, error)
        else:
            self.succeed(invocation, value)
        finally:
            # An error's traceback holds this frame, which must not hold the arguments.
            invocation.args, invocation.kwargs = (), None

    def returned(self, invocation: Invocation, value: Any, error: BaseException | None) -> None:
        """Answer what a thread has computed."""
        self._host.polling.function_ended()
        if invocation.abandoned:
            self.abandoned -= 1
        if error is not None:
            self.fail(invocation, error)
        elif invocation.abandoned and invocation.token is None:
            self._forget(invocation)
            if invocation.visit is not None:  # it is not answered, which would end that
                invocation.visit.end(None, asyncio.CancelledError())
            if is_unfinished(value):
                _discard(value)
        else:
            invocation.in_thread = False
            self.returned_here(invocation, value)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def succeed(self, invocation: Invocation, value: Any) -> None:
        """Answer with a value; the invocation is over."""
        if invocation.execution is not None:
            self._forget(invocation)
        self._responses.succeed(invocation, value)

    def fail(self, invocation: Invocation, error: BaseException) -> None:
        """Answer with an exception; the invocation is over."""
        if invocation.execution is not None:
            self._forget(invocation)
        self._responses.fail(invocation, error)

    def discharge(self, invocation: Invocation) -> None:
        """Give back the memory of a partner's arguments."""
        self._channel.budget.release(invocation.charged)
        invocation.charged = 0

    def _forget(self, invocation: Invocation) -> None:
        self.running.pop(invocation.id, None)
        if invocation.charged:
            self.discharge(invocation)
        if invocation.turn is not None:
            invocation.turn.finish()
        bucket = invocation.bucket
        if bucket is not None:
            bucket.pop(invocation, None)
            invocation.bucket = None

    def credit(self, id: int, count: int) -> None:
        """Let a stream go on: its reader can take `count` items more."""
        invocation = self.running.get(id)
        if invocation is not None and invocation.stream is not None:
            invocation.stream.credit(count)

    def cancel(self, id: int) -> None:
        """Abandon an invocation whose caller has cancelled it."""
        invocation = self.running.get(id)
        if invocation is not None:
            self._abandon(invocation)
            self._cancel_waits(invocation)

    def expired(self, invocation: Invocation) -> None:
        """Abandon an invocation whose deadline has come."""
        invocation.bucket = None
        if invocation.id in self.running:
            self._abandon(invocation)
            self._cancel_waits(invocation)

    def abandon_all(self) -> None:
        """Abandon everything: the peer is gone."""
        for invocation in list(self.running.values()):
            self._abandon(invocation)
            self._cancel_waits(invocation)

    def _cancel_waits(self, invocation: Invocation) -> None:
        """Cancel the calls that an abandoned invocation waits for in a thread."""
        # The value of a creation (with a token) may be wanted by others.
        if invocation.token is not None or invocation.context is None:
            return
        scope = invocation.context.get(SCOPE)
        if scope is None or not isinstance(scope.call, RunningCall):
            return
        left = scope.deadline - self._loop.time()
        if left > _ABOUT_NOW:
            scope.call.cancel()
        elif scope.call.waits:
            # Its time is over, here or at its caller. Calls that the thread waits for have the same
            # deadline, and their error says so; what else it waits for (`run_sync`) has none.
            self._loop.call_later(left + _ABOUT_NOW, scope.call.cancel)

    def _abandon(self, invocation: Invocation) -> None:
        if invocation.abandoned:
            return
        invocation.abandoned = True
        task = invocation.task
        if task is not None:
            task.cancel()
            coroutine: Any = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                # A task cancelled before its first step never runs, so nothing in it can tell.
                if invocation.func is _await_value:
                    _discard(invocation.args[0])
                self.fail(invocation, asyncio.CancelledError())
                # The task keeps its error, whose traceback holds the frame that holds the
                # invocation: a circle through a field that the collector does not look at.
                invocation.args, invocation.kwargs = (), None
        elif invocation.in_thread:
            self.abandoned += 1
            self.running.pop(invocation.id, None)
            # Thousands may wait for a thread: their arguments are dropped now. None, not (): a
            # thread that takes the job in this moment must not run the function without them.
            if invocation.token is None and not invocation.begun:
                invocation.args = invocation.kwargs = None
                if invocation.charged:
                    self.discharge(invocation)

    def number_of(self, call: Any) -> int | None:
        """Return the number of a call that runs here, by the identity in its scope."""
        for id, invocation in self.running.items():
            scope = None if invocation.context is None else invocation.context.get(SCOPE)
            if scope is not None and scope.call is call:
                return id
        return None

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of everything that runs."""
        return [each.task for each in self.running.values() if each.task is not None]


class _ThreadJob:
    """An invocation as a job of the thread pool."""

    __slots__ = ("_error", "_execution", "_invocation", "_value")

    def __init__(self, execution: Execution, invocation: Invocation) -> None:
        self._execution, self._invocation = execution, invocation
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the function, in a thread."""
        invocation = self._invocation
        if invocation.abandoned and invocation.token is None:
            return  # abandoned while it waited for a thread
        assert invocation.context is not None
        kwargs = invocation.kwargs or {}
        invocation.begun = True
        args = invocation.args
        if args is None:  # dropped by `_abandon`
            return
        try:
            self._value = invocation.context.run(invocation.func, *args, **kwargs)
        except BaseException as error:
            self._error = error

    def finished(self) -> None:
        """Hand over the result, on the loop."""
        # The traceback of the error holds frames that hold this job in turn.
        error, self._error = self._error, None
        self._execution.returned(self._invocation, self._value, error)


def invocation_in(frame: FrameType) -> Invocation | None:
    """Return the invocation that a thread runs, if this is the frame that runs it."""
    if frame.f_code is not _ThreadJob.run.__code__:
        return None
    found = frame.f_locals.get("invocation")
    return found if isinstance(found, Invocation) else None


class StreamSource:
    """The writer's end of a stream: drives the generator as far as credits reach."""

    def __init__(
        self, channel: Channel, host: ExecutionHost, execution: Execution, invocation: Invocation
    ) -> None:
        self._channel, self._host, self._execution = channel, host, execution
        self._invocation = invocation
        self._credits = WINDOW
        self._more = asyncio.Event()

    def credit(self, count: int) -> None:
        """Let `count` items more be sent."""
        self._credits = min(self._credits + count, WINDOW)
        self._more.set()

    async def drive(self) -> None:
        """Run the generator to its end, and answer."""
        invocation, execution = self._invocation, self._execution
        try:
            generator = invocation.func(*invocation.args, **(invocation.kwargs or {}))
            if inspect.isasyncgen(generator) or hasattr(generator, "__aiter__"):
                await self._drive_async(generator)
            elif inspect.isgenerator(generator) or hasattr(generator, "__iter__"):
                await self._drive_plain(iter(generator))
            else:
                if inspect.iscoroutine(generator):
                    generator.close()
                kind = type(generator).__name__
                raise TypeError(f"rpc_stream needs a generator function, this one gave {kind}")
        except asyncio.CancelledError as error:
            execution.fail(invocation, _ended_with_loop(self._host.name) or error)
            invocation.task = None  # as in `_perform`
            if invocation.abandoned:
                raise
        except BaseException as error:
            execution.fail(invocation, error)
        else:
            execution.succeed(invocation, None)
        finally:
            # The invocation holds this source, and the traceback of an error this frame.
            invocation.args, invocation.kwargs, invocation.stream = (), None, None

    async def _drive_async(self, generator: Any) -> None:
        try:
            async for item in generator:
                await self._send(item)
        finally:
            if hasattr(generator, "aclose"):
                await generator.aclose()

    async def _drive_plain(self, generator: Any) -> None:
        run = self._execution.threads.run
        try:
            while (item := await run(next, generator, _END)) is not _END:
                await self._send(item)
        finally:
            if hasattr(generator, "close"):
                # It may still be inside `next` in its thread: it is closed when that is over.
                closing = self._host.spawn(_close(run, generator))
                with contextlib.suppress(Exception):
                    await asyncio.shield(closing)

    async def _send(self, item: Any) -> None:
        while self._credits == 0:
            self._more.clear()
            await self._more.wait()
        self._credits -= 1
        channel, host, invocation = self._channel, self._host, self._invocation
        departure = Departure(channel.peer, "reply", invocation.carried)
        try:
            flags, payload = pack_value(host, channel, item, departure, "item")
        except SerializationError as error:
            raise SerializationError(error.path, error.what, host.name) from None
        frame = Frame(ITEM, flags, invocation.id, 0.0, 0, payload)
        channel.send(frame, "reply", departure.undo)


async def _close(run: Any, generator: Any) -> None:
    for _ in range(1000):
        try:
            await run(generator.close)
        except ValueError:  # it is still executing
            await asyncio.sleep(0.01)
        else:
            return


async def _await_value(awaitable: Any) -> Any:
    try:
        return await awaitable
    finally:
        del awaitable  # a failed future, its error, the traceback and this frame: no circle


def _ended_with_loop(worker: str) -> WorkerLost | None:
    """Return the error for what `asyncio.run` cancels at its end; None for another cancellation.

    A program that fails leaves its worker open, and `asyncio.run` then cancels all tasks at once,
    also those that run for others. These lose a worker; their function was not cancelled by itself.
    """
    current, tasks = asyncio.current_task(), asyncio.all_tasks()
    if current is None or not all(task.cancelling() for task in tasks):
        return None
    return WorkerLost(worker, "unknown", "its event loop was shut down")


def is_unfinished(value: Any) -> bool:
    """Whether a result must be awaited. Other awaitables, such as an RRef, are values."""
    return isinstance(value, CoroutineType) or asyncio.isfuture(value)


def _discard(value: Any) -> None:
    if inspect.iscoroutine(value):
        value.close()
    else:
        value.cancel()
