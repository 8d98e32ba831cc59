"""The thread pool for plain functions: as few threads as keep jobs moving.

    loop                         threads
    submit(job) ──▶ queue ─────▶ job.run()
    job.finished() ◀── done ◀──┘               one wake-up of the loop per batch of results

One thread serves the queue. Another one starts only when the queue has not moved for a millisecond,
or when a thread says that it is about to block in a nested call. Blocked threads do not count
against the limit, so nested calls never starve. Idle threads end after a while.
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
from typing import Any, Protocol

_log = logging.getLogger("aiograd")
_STALLED = 0.001  # seconds without progress of the queue after which another thread starts
# The same where a thread is idle: the job stays only if that thread has ended just now. To look
# after a millisecond, after every job, would wake up the loop while the thread needs the core.
_STALLED_IDLE = 0.05
_RETRY = 0.1  # seconds after which a thread is started again that could not be
_IDLE = 10.0  # seconds without work after which a thread ends


class Starter(Protocol):
    """What starts threads (`Runtime` is one)."""

    def start_thread(self, target: Callable[[], None], name: str) -> None:
        """Run `target` in a thread. RuntimeError or MemoryError if the system has none."""


class Job(Protocol):
    """One run of a function off the loop."""

    def run(self) -> None:
        """Do the work, in a thread. Must not raise."""

    def finished(self) -> None:
        """Use the result, on the loop."""


class ThreadPool:
    """Runs jobs off the loop, at most `limit` unblocked ones at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, runtime: Starter, limit: int, name: str
    ) -> None:
        self._loop, self._runtime, self._limit, self._name = loop, runtime, limit, name
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: deque[Job] = deque()
        self._waking = False  # a wake-up of the loop is under way
        self._threads: set[int] = set()
        self._starting = 0
        self._blocked: set[int] = set()
        self._noted: dict[int, Callable[[bool], None]] = {}  # by thread: who wants to know of that
        self._submitted = self._collected = 0  # jobs ever; different while one is under way
        self._taken = 0  # jobs taken so far: whether the queue moves
        self._taken_before = -1  # `_taken` when the timer was set
        self._timer: asyncio.TimerHandle | None = None  # looks whether the queue stalls
        self._relaxed = False  # the timer is set to `_STALLED_IDLE`
        self._short = False  # no thread could be started the last time
        self._closed = False

    def submit(self, job: Job) -> None:
        """Run `job` in a thread. Call it on the loop."""
        self._submitted += 1
        self._queue.put(job)
        if not self._threads and not self._starting:
            self._start()
        elif self._submitted - self._collected > len(self._threads):
            if self._timer is None or self._relaxed:
                self._watch(_STALLED)
        elif self._timer is None:
            self._watch(_STALLED_IDLE)

    def run(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Return a future of `func(*args)`, run in a thread in a copy of this context.

        Call it on the loop.
        """
        job = Run(self._loop.create_future(), contextvars.copy_context(), func, args)
        self.submit(job)
        return job.future

    @property
    def busy(self) -> bool:
        """Whether a job is queued, runs, or waits for its `finished`."""
        return self._submitted != self._collected

    @property
    def size(self) -> int:
        """The number of threads, including blocked ones and those about to start."""
        return len(self._threads) + self._starting

    def close(self) -> None:
        """End every idle thread now, the others when their function returns."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Queued jobs are dropped before the ends are queued: else threads would still run them.
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        # One for each thread, as each takes exactly one and ends. Running ones find theirs later.
        for _ in range(self.size):
            self._queue.put(None)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Let another thread work while the code in this block waits. In a thread of the pool.

        In other threads it does nothing.
        """
        me = threading.get_ident()
        if me not in self._threads:
            yield
            return
        self._blocked.add(me)
        note = self._noted.get(me)
        if note is not None:
            note(True)
        # At once, not after `_STALLED`: what is queued may be what this thread waits for.
        if not self._queue.empty():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._help)
        try:
            yield
        finally:
            self._blocked.discard(me)
            if note is not None:
                note(False)

    @contextlib.contextmanager
    def noting(self, blocked: Callable[[bool], None]) -> Iterator[None]:
        """Call `blocked` when the code in this block begins to wait, and when it goes on."""
        me = threading.get_ident()
        self._noted[me] = blocked
        try:
            yield
        finally:
            del self._noted[me]

    def acquire(self, lock: threading.Lock) -> None:
        """Wait, in a thread, for a lock that the loop will release.

        The simulator overrides it: there, threads run in turns.
        """
        with self.blocked():
            lock.acquire()

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        # Blocked threads do not count: each waits for a call that may need a thread here, so a
        # limit that counts them would be a deadlock as soon as calls nest deeper than it.
        if self._closed or self.size - len(self._blocked) >= self._limit:
            return
        self._starting += 1
        try:
            self._runtime.start_thread(self._serve, f"aiograd-{self._name}")
        except (RuntimeError, MemoryError) as error:
            # No memory for a stack, or too many threads on this machine. Queued jobs go on waiting
            # and the start is retried: an error here would end the link of the latest caller.
            self._starting -= 1
            if not self._short:
                _log.warning("%s: no thread can be started for now: %s", self._name, error)
            self._short = True
            self._watch(_RETRY)
        else:
            self._short = False

    def _help(self) -> None:
        if not self._queue.empty() and not self._starting:
            self._start()

    def _watch(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._taken_before, self._relaxed = self._taken, seconds > _STALLED
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._closed or self._queue.empty():
            return
        if self._taken == self._taken_before:
            self._help()
        if self._timer is None:  # else `_start` failed, and has set it to retry
            self._watch(_STALLED)

    def _collect(self) -> None:
        self._waking = False
        done = self._done
        while done:
            self._collected += 1
            done.popleft().finished()

    # ── in threads ──────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        me = threading.get_ident()
        # In this order: between the two the thread counts twice, which is harmless. In the other
        # one it would not count, and `submit` could start another.
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
                # This frame must not keep the arguments and result of the last job alive while it
                # waits for the next.
                del job
                # Unlocked. `_collect` clears the flag before it looks at `done`: a job appended
                # after that finds the flag clear, one appended before is collected.
                if not self._waking:
                    self._waking = True
                    try:
                        self._loop.call_soon_threadsafe(self._collect)
                    except RuntimeError:  # the loop is closed: no result can be used any more
                        return
        finally:
            self._threads.discard(me)


class Run:
    """A job that resolves a future with the result of a function."""

    future: asyncio.Future[Any]

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
        """Call the function, in a thread."""
        try:
            self._value = self._context.run(self._func, *self._args)
        except BaseException as error:
            self._error = error

    def finished(self) -> None:
        """Resolve the future, on the loop, unless it was cancelled meanwhile."""
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._value)
        elif isinstance(self._error, StopIteration):  # a future cannot hold it
            self.future.set_exception(RuntimeError(f"the function raised {self._error!r}"))
        else:
            self.future.set_exception(self._error)
