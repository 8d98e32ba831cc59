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

_REAL = 20.0  # real seconds that a plain function may compute before the simulation gives up


class Crashed(BaseException):
    """Raised in a thread whose node is gone, so that the thread ends."""


class Turn:
    """One thread and whose turn it is."""

    def __init__(self) -> None:
        self._threads = threading.Semaphore(0)
        self._loops = threading.Semaphore(0)
        self.crashed = False
        self.ended = False

    def give(self) -> None:
        """On the loop: let the thread run until it ends or waits."""
        self._threads.release()
        if not self._loops.acquire(timeout=_REAL):
            raise RuntimeError("a plain function did not end; is it waiting for something real?")

    def take(self) -> None:
        """In the thread: begin."""
        self._threads.acquire()
        if self.crashed:
            raise Crashed

    def wait(self) -> None:
        """In the thread: let the loop run until it gives the turn back."""
        self._loops.release()
        self.take()

    def end(self) -> None:
        self.ended = True
        self._loops.release()


_local = threading.local()  # the turn of a running thread: contexts come and go inside it


class Threads:
    """All threads of one simulated node."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop, self.random = loop, rng
        self._turns: list[Turn] = []

    def run(self, job: Job) -> None:
        """Run a job until it ends or waits."""
        turn = Turn()
        self._turns.append(turn)
        threading.Thread(target=self._work, args=(turn, job), daemon=True).start()
        turn.give()

    def _work(self, turn: Turn, job: Job) -> None:
        _local.turn = turn
        try:
            turn.take()
            job.run()
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
        while not lock.acquire(blocking=False):
            self.loop.blocked.append((lock, contextvars.copy_context(), self._go_on, turn))
            turn.wait()

    def _go_on(self, turn: Turn) -> None:
        delay = self.random.choice((0.0, 0.0, 0.0002, 0.003))
        self.loop.call_later(delay, turn.give)

    def sleep(self, seconds: float, context: contextvars.Context) -> None:
        """In a thread: compute for so many simulated seconds, while the loop runs.

        `context` says whose thread this is: that of a crashed node never goes on.
        """
        turn: Turn = _local.turn
        self.loop.call_later(seconds, turn.give, context=context)
        turn.wait()

    def crash(self) -> None:
        """End every thread that waits; what it does on its way out reaches nobody."""
        for turn in list(self._turns):
            turn.crashed = True
            turn.give()


class SimPool(ThreadPool):
    """Runs jobs one after the other, each after a while; `limit` of them may be under way."""

    def __init__(
        self, threads: Threads, loop: asyncio.AbstractEventLoop, runtime: Any, limit: int, name: str
    ) -> None:
        super().__init__(loop, runtime, limit, name)
        self._sim = threads

    def submit(self, job: Job) -> None:
        delay = self._sim.random.choice((0.0, 0.0005, 0.002, 0.02))
        self._loop.call_later(delay, self._begin, job)

    def _begin(self, job: Job) -> None:
        if not self._closed:
            self._sim.run(job)

    @property
    def size(self) -> int:
        return 0

    def close(self) -> None:
        self._closed = True

    def acquire(self, lock: threading.Lock) -> None:
        self._sim.wait(lock)
