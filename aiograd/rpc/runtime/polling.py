"""Polling: keep the loop spinning for a moment after traffic instead of blocking in select.

    read ─▶ stay_awake ─▶ _poll ─▶ _poll ─▶ …  until `runtime.spin` seconds pass without traffic
                            │
                            ├─ a thread of the pool runs        ─▶ sleep
                            ├─ the core was not free (crowded)  ─▶ sleep
                            └─ 8 times without traffic          ─▶ not at all for the next 200 reads

Waking an idle core takes longer than a small call, so the reply is usually met while spinning.
Small calls among more workers than cores take a third to half of the time they take without.

With more workers than cores, the loop yields its core after every iteration and sleeps as soon as
another process uses it, because the scheduler prefers a process that wakes up to one that spins.
"""

from __future__ import annotations

import asyncio

from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.runtime.threads import ThreadPool

_MISSES = 8  # spins in a row that ended without traffic
_REST = 200  # reads without spinning after that
# Seconds that our core may be used by others when we yield it: more than another loop takes to poll
# once.
_CROWDED = 100e-6


class Polling:
    """Keeps one loop awake for `runtime.spin` seconds after each read."""

    rest: int

    def __init__(self, loop: asyncio.AbstractEventLoop, runtime: Runtime, pool: ThreadPool) -> None:
        self._loop, self._runtime, self._pool = loop, runtime, pool
        self._until = 0.0
        self._misses = 0
        self._busy = False  # there was traffic since the last iteration
        self.awake: bool = False
        self.rest = 0  # reads still to come until the loop spins again
        self.closed = False

    def stay_awake(self) -> None:
        """Spin from now on: there was traffic, so more will come soon."""
        if not self._runtime.spin:
            return
        if self.rest:
            self.rest -= 1
            return
        self._until = self._runtime.time() + self._runtime.spin
        self._busy = True
        if self.awake:
            self._misses = 0  # this spin met traffic
        else:
            self.awake = True
            self._loop.call_soon(self._poll)

    def function_ended(self) -> None:
        """Spin again after a function in a thread, unless it ran for longer than the loop spins.

        Between heavy functions spinning only keeps other workers from computing.
        """
        if self._runtime.spin and self._runtime.time() < self._until:
            self.stay_awake()

    def _poll(self) -> None:
        if self._busy:
            # What came has caused more to do in this very iteration: no need to ask the clock.
            self._busy = False
            self._loop.call_soon(self._poll)
            return
        now = self._runtime.time()
        if self._pool.busy or self.closed:  # a thread needs the interpreter more than we do
            self.awake = False
        elif now < self._until and self._is_core_free(now):
            self._loop.call_soon(self._poll)
        else:
            self.awake = False
            # A worker whose peers always take longer than `spin` would burn its core for nothing.
            self._misses += 1
            if self._misses == _MISSES:
                self._misses, self.rest = 0, _REST

    def _is_core_free(self, now: float) -> bool:
        """Yield the core for a moment; whether a moment was enough for the others."""
        if not self._runtime.crowded:
            return True
        self._runtime.give_way()
        return self._runtime.time() - now < _CROWDED
