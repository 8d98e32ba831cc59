"""Coalesce notifications: send the first at once, batch what follows for 5 ms.

A message costs the same whether it carries one notification or a hundred, and notifications nobody
waits for (dropped references, released contexts) often come one per loop iteration. `schedule()` is
safe to call from finalizers in any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Final

INTERVAL: Final = 0.005  # seconds between two sends


class Coalescer:
    """Calls `send` on the loop soon after `schedule`, at most once per INTERVAL.

    What is to be sent is kept by the caller; `send` takes all of it. It runs in `context`, not in
    that of the code that happened to schedule it, which may have a deadline of its own.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: Context, send: Callable[[], None]
    ) -> None:
        self._loop, self._context, self._send = loop, context, send
        self._scheduled = False  # `send` will be called
        self._not_before = 0.0  # loop time
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Let `send` be called. For any thread and moment; RuntimeError if the loop is closed."""
        # No lock, because a finalizer may interrupt this very function: two threads that both see
        # False cost one more call of `send`, which finds nothing to do.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run, context=self._context)

    def _run(self) -> None:
        if self._loop.time() < self._not_before:
            self._timer = self._loop.call_at(self._not_before, self._run, context=self._context)
            return
        # The flag first: a notification that comes up during `send` schedules another one.
        self._timer, self._scheduled = None, False
        self._not_before = self._loop.time() + INTERVAL
        self._send()

    def close(self) -> None:
        """Cancel a call of `send` that waits for its interval."""
        if self._timer is not None:
            self._timer.cancel()
