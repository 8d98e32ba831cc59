"""Threads that take turns with the loop, so that plain functions are part of the simulation.

A job runs in a real thread, because it may block in `rpc_sync`; but the loop stands still while it
runs, and goes on when it has ended or waits for a lock. So exactly one of them runs at any
moment, and the seed alone decides what happens.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from typing import Any

from aiograd.rpc.runtime.threads import Job, ThreadPool
from aiograd.testing.simulator.loop import SimLoop

# Real seconds that a plain function may run before the simulation gives up. Only a function that
# waits for something outside of the simulation takes that long.
_REAL = 20.0


class Crashed(BaseException):
    """Raised in a thread whose node is gone, so that the thread ends."""


class Turn:
    """One thread, which runs only while the loop waits for it.

    One semaphore for each direction: of the two, exactly one runs at any moment.
    """

    def __init__(self) -> None:
        self._threads = threading.Semaphore(0)
        self._loops = threading.Semaphore(0)
        self.crashed = False
        self.ended: bool = False

    def give(self) -> None:
        """On the loop: let the thread run until it ends or waits.

        Raise RuntimeError when it does neither for `_REAL` seconds.
        """
        self._threads.release()
        if not self._loops.acquire(timeout=_REAL):
            raise RuntimeError("a plain function did not end; is it waiting for something real?")

    def take(self) -> None:
        """In the thread: wait for the turn; raise `Crashed` if the node is gone."""
        self._threads.acquire()
        if self.crashed:
            raise Crashed

    def wait(self) -> None:
        """In the thread: let the loop run until it gives the turn back."""
        self._loops.release()
        self.take()

    def end(self) -> None:
        """In the thread: give the turn back for the last time."""
        self.ended = True
        self._loops.release()


# The turn of a running thread. Not a ContextVar: a job enters other contexts while it runs.
_local = threading.local()


class Threads:
    """All threads of one simulated node."""

    loop: SimLoop

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.random: random.Random = rng
        self._turns: list[Turn] = []

    def run(self, job: Job) -> None:
        """Run a job until it ends or waits."""
        # A thread for each job: one that waits in `rpc_sync` must not keep others from running.
        turn = Turn()
        self._turns.append(turn)
        threading.Thread(target=self._work, args=(turn, job), daemon=True).start()
        turn.give()

    def _work(self, turn: Turn, job: Job) -> None:
        _local.turn = turn
        try:
            turn.take()
            job.run()
            # A job may catch `Crashed` on its way out; its result must still have no effect.
            if not turn.crashed:
                self.loop.call_soon_threadsafe(job.finished)
        except Crashed:
            pass
        finally:
            if turn in self._turns:
                self._turns.remove(turn)
            turn.end()

    def wait(self, lock: threading.Lock) -> None:
        """In a thread: let the loop run until it has released the lock."""
        turn: Turn = _local.turn
        # A loop: another thread may take the lock between its release and this thread's turn.
        while not lock.acquire(blocking=False):
            self.loop.blocked.append((lock, contextvars.copy_context(), self._go_on, turn))
            turn.wait()

    def _go_on(self, turn: Turn) -> None:
        # An operating system takes its time to wake up a thread.
        delay = self.random.choice((0.0, 0.0, 0.0002, 0.003))
        self.loop.call_later(delay, turn.give)

    def sleep(self, seconds: float, context: contextvars.Context) -> None:
        """In a thread: compute for some simulated seconds, while the loop runs.

        `context` is that of the thread's node: the thread of a crashed node never goes on.
        """
        turn: Turn = _local.turn
        self.loop.call_later(seconds, turn.give, context=context)
        turn.wait()

    def crash(self) -> None:
        """End every thread that waits; what it does on its way out has no effect."""
        for turn in list(self._turns):
            turn.crashed = True
            turn.give()


class SimPool(ThreadPool):
    """The pool of one node: starts each job after a random delay, in a thread of its own.

    `limit` is not applied: jobs run one at a time in any case, except while they wait.
    """

    def __init__(
        self, threads: Threads, loop: asyncio.AbstractEventLoop, runtime: Any, limit: int, name: str
    ) -> None:
        super().__init__(loop, runtime, limit, name)
        self._sim = threads

    def submit(self, job: Job) -> None:
        """As `Pool.submit`."""
        delay = self._sim.random.choice((0.0, 0.0005, 0.002, 0.02))
        self._loop.call_later(delay, self._begin, job)

    def _begin(self, job: Job) -> None:
        if not self._closed:
            self._sim.run(job)

    @property
    def size(self) -> int:
        """There are no threads to be counted as a leak: each ends with its job."""
        return 0

    def close(self) -> None:
        """Start no more jobs."""
        self._closed = True

    def acquire(self, lock: threading.Lock) -> None:
        """As `Pool.acquire`: let the loop run meanwhile."""
        self._sim.wait(lock)
