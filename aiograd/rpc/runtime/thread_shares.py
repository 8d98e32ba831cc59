"""Shares of the thread pool: a partner whose functions block keeps no others from their threads.

    trusted peers ───────────────────────────▶ ThreadPool
    clinic ──▶ ThreadShare, 16 at a time ──────▶│
    lab    ──▶ ThreadShare, 16 at a time ──────▶│
                 └── later jobs wait here, and start in turns of the partners

Threads cannot be taken away from a function, so a share is never exceeded, even while the pool is
idle. All partners together leave a quarter of the pool to others; but every partner may always have
one thread. A job that blocks in a nested call does not count meanwhile, as in the pool itself.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from aiograd.rpc.runtime.threads import Job, Run, ThreadPool


class ThreadShares:
    """The shares of all partners of one worker, by name."""

    loop: asyncio.AbstractEventLoop
    pool: ThreadPool

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pool: ThreadPool, most: int, threads: int
    ) -> None:
        self.loop, self.pool = loop, pool
        self._most = min(most, max(1, threads // 2))
        self._together = threads - threads // 4
        self._running = 0
        self._waiting: deque[ThreadShare] = deque()  # those with jobs that wait, the next one first
        # Weak: a share lives as long as a link of its partner, or a job of it.
        self._shares: WeakValueDictionary[str, ThreadShare] = WeakValueDictionary()

    def of(self, name: str) -> ThreadShare:
        """Return the share of a partner; all its links have one."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = ThreadShare(self)
        return share

    def submit(self, share: ThreadShare, job: Job) -> None:
        """Run a job, or let it wait for its turn."""
        if self._may_start(share):
            self._start(share, job)
            return
        if not share.jobs:
            self._waiting.append(share)
        share.jobs.append(job)

    def count(self, share: ThreadShare, change: int) -> None:
        """Note that a job of a partner runs, blocks or ends; on the loop."""
        share.running += change
        self._running += change
        if change < 0:
            self._proceed()

    def _may_start(self, share: ThreadShare) -> bool:
        if share.running <= 0:
            return True
        return share.running < self._most and self._running < self._together

    def _start(self, share: ThreadShare, job: Job) -> None:
        share.running += 1
        self._running += 1
        self.pool.submit(_SharedJob(share, job))

    def _proceed(self) -> None:
        """Start jobs that wait, one of each partner in turn."""
        passed_over: deque[ThreadShare] = deque()
        started: deque[ThreadShare] = deque()
        for share in self._waiting:
            if self._may_start(share):
                self._start(share, share.jobs.popleft())
                if share.jobs:
                    started.append(share)
            else:
                passed_over.append(share)
        self._waiting = passed_over + started


class ThreadShare:
    """The jobs of one partner."""

    def __init__(self, shares: ThreadShares) -> None:
        self.shares: ThreadShares = shares
        self.jobs: deque[Job] = deque()  # that wait
        self.running: int = 0  # in the pool, and not blocked

    def submit(self, job: Job) -> None:
        """Run `job` in a thread, in its turn. Call it on the loop."""
        self.shares.submit(self, job)

    def run(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Return a future of `func(*args)`, as `ThreadPool.run`."""
        loop = self.shares.loop
        job = Run(loop.create_future(), contextvars.copy_context(), func, args)
        self.submit(job)
        return job.future

    def blocked(self, blocked: bool) -> None:
        """Note, in a thread, that a job of this share waits for something, or goes on."""
        loop, change = self.shares.loop, -1 if blocked else 1
        loop.call_soon_threadsafe(self.shares.count, self, change)


class _SharedJob:
    """A job that gives its place back when it has ended."""

    __slots__ = ("_job", "_share")

    def __init__(self, share: ThreadShare, job: Job) -> None:
        self._share, self._job = share, job

    def run(self) -> None:
        """Run the job, in a thread."""
        with self._share.shares.pool.noting(self._share.blocked):
            self._job.run()

    def finished(self) -> None:
        """Use its result, on the loop, and let the next one run."""
        self._share.shares.count(self._share, -1)
        self._job.finished()
