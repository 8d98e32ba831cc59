"""Threads for plain functions: as few as keep things moving.

One thread serves a shared queue; results go back to the loop in batches, with one wake-up. Another
thread starts only when the queue has not moved for a millisecond, or when a thread says that it is
about to block in a nested call. Threads blocked like that do not count against the limit, so nested
calls never starve. Idle threads end after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aiograd.rpc.runtime.runtime import Runtime

_log = logging.getLogger("aiograd")
_PATIENCE = 0.001  # seconds without progress after which another thread helps
# The same where a thread is idle: only if it has ended just now nobody takes the job, and to look
# after every job wakes up the loop while the thread needs the core.
_AT_EASE = 0.05
_AGAIN = 0.1  # seconds after which a thread is started again that could not be
_IDLE = 10.0  # seconds without work after which a thread ends


class Job(Protocol):
    def run(self) -> None:
        """In a thread. Must not raise."""

    def finished(self) -> None:
        """On the loop, afterwards."""


class ThreadPool:
    """Runs jobs off the loop, at most `limit` unblocked ones at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, runtime: Runtime, limit: int, name: str
    ) -> None:
        self._loop, self._runtime, self._limit, self._name = loop, runtime, limit, name
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: deque[Job] = deque()
        self._waking = False  # a wake-up of the loop is under way
        self._threads: set[int] = set()
        self._starting = 0
        self._blocked: set[int] = set()
        self._submitted = self._collected = 0  # jobs ever; different while one is under way
        self._taken = 0  # jobs taken so far: whether the queue moves
        self._watched = -1  # `_taken` when the watchdog looked last
        self._watchdog: asyncio.TimerHandle | None = None
        self._at_ease = False  # it will not look soon
        self._short = False  # no thread could be started the last time
        self._closed = False

    def submit(self, job: Job) -> None:
        """On the loop: run `job` in a thread."""
        self._submitted += 1
        self._queue.put(job)
        if not self._threads and not self._starting:
            self._start()
        elif self._submitted - self._collected > len(self._threads):
            if self._watchdog is None or self._at_ease:
                self._watch(_PATIENCE)
        elif self._watchdog is None:
            self._watch(_AT_EASE)

    def run(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """On the loop: what `func(*args)` returns in a thread, in a copy of this context."""
        job = _Run(self._loop.create_future(), contextvars.copy_context(), func, args)
        self.submit(job)
        return job.future

    @property
    def busy(self) -> bool:
        """Whether a thread has something to do."""
        return self._submitted != self._collected

    @property
    def size(self) -> int:
        return len(self._threads) + self._starting

    def close(self) -> None:
        """End every idle thread now, the others when their function returns."""
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in range(self.size):
            self._queue.put(None)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """In a thread: what follows waits for something else, so let another thread work."""
        me = threading.get_ident()
        if me not in self._threads:
            yield
            return
        self._blocked.add(me)
        if not self._queue.empty():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._help)
        try:
            yield
        finally:
            self._blocked.discard(me)

    def acquire(self, lock: threading.Lock) -> None:
        """In a thread: wait for a lock that the loop will release."""
        with self.blocked():
            lock.acquire()

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        if self._closed or self.size - len(self._blocked) >= self._limit:
            return
        self._starting += 1
        try:
            self._runtime.start_thread(self._serve, f"aiograd-{self._name}")
        except (RuntimeError, MemoryError) as error:
            # No memory for a stack, or too many threads on this machine. Whatever waits goes on
            # waiting, and it is tried again: an error here would end the link of who called last.
            self._starting -= 1
            if not self._short:
                _log.warning("%s: no thread can be started for now: %s", self._name, error)
            self._short = True
            self._watch(_AGAIN)
        else:
            self._short = False

    def _help(self) -> None:
        if not self._queue.empty() and not self._starting:
            self._start()

    def _watch(self, seconds: float) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watched, self._at_ease = self._taken, seconds > _PATIENCE
        self._watchdog = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._watchdog = None
        if self._closed or self._queue.empty():
            return
        if self._taken == self._watched:
            self._help()
        if self._watchdog is None:
            self._watch(_PATIENCE)

    def _collect(self) -> None:
        self._waking = False
        done = self._done
        while done:
            self._collected += 1
            done.popleft().finished()

    # ── in threads ──────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        me = threading.get_ident()
        self._threads.add(me)
        self._starting -= 1
        get, done = self._queue.get, self._done
        try:
            while True:
                try:
                    job: Any = get(timeout=_IDLE)
                except queue.Empty:
                    return
                if job is None:
                    return
                self._taken += 1
                job.run()
                done.append(job)
                del job
                if not self._waking:
                    self._waking = True
                    try:
                        self._loop.call_soon_threadsafe(self._collect)
                    except RuntimeError:  # the loop is closed, nobody wants the result
                        return
        finally:
            self._threads.discard(me)


class _Run:
    """A function whose result is awaited."""

    def __init__(
        self,
        future: asyncio.Future[Any],
        context: contextvars.Context,
        func: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.future, self._context, self._func, self._args = future, context, func, args
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._context.run(self._func, *self._args)
        except BaseException as error:
            self._error = error

    def finished(self) -> None:
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._value)
        elif isinstance(self._error, StopIteration):  # a future cannot hold it
            self.future.set_exception(RuntimeError(f"the function raised {self._error!r}"))
        else:
            self.future.set_exception(self._error)
