"""Polling for a moment after traffic, because an idle core takes long to wake up.

The loop then runs around without sleeping, and so meets the answer that is already under way. Where
workers share cores, it offers its core to the others after every round, and goes to sleep at once
if one of them takes it to compute: the kernel wakes up who sleeps sooner than it comes back to who
polls. It also stops soon, gives way to threads, and leaves it for a while when it waited in vain
again and again.
"""

from __future__ import annotations

import asyncio

from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.runtime.threads import ThreadPool

_MISSES = 8  # times in vain, in a row
_REST = 200  # reads for which it is left
_CROWDED = 100e-6  # seconds until our core is ours again: more than other loops take to look around


class Polling:
    """Keeps one loop awake for `runtime.spin` seconds after each read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runtime: Runtime, pool: ThreadPool) -> None:
        self._loop, self._runtime, self._pool = loop, runtime, pool
        self._until = 0.0
        self._misses = 0
        self._busy = False  # something came since the last round
        self.awake = False
        self.rest = 0  # reads still to come until it is tried again
        self.closed = False

    def stay_awake(self) -> None:
        """There was traffic, so more will come soon."""
        if not self._runtime.spin:
            return
        if self.rest:
            self.rest -= 1
            return
        self._until = self._runtime.time() + self._runtime.spin
        self._busy = True
        if self.awake:
            self._misses = 0
        else:
            self.awake = True
            self._loop.call_soon(self._poll)

    def function_ended(self) -> None:
        """A thread is done: more may come soon, unless it computed for longer than we poll."""
        if self._runtime.spin and self._runtime.time() < self._until:
            self.stay_awake()

    def _poll(self) -> None:
        if self._busy:  # what came has caused more to do, in this very round
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
            self._misses += 1
            if self._misses == _MISSES:
                self._misses, self.rest = 0, _REST

    def _is_core_free(self, now: float) -> bool:
        """Let others have our core for a moment; whether a moment was enough for them."""
        if not self._runtime.crowded:
            return True
        self._runtime.give_way()
        return self._runtime.time() - now < _CROWDED
