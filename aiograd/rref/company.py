"""What comes up one by one is told together: the first at once, what follows after a short while.

A message costs the same whether it tells of one thing or of many. Things nobody waits for, such as
dropped references, come up at any moment, and often one per call in a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Final

WHILE: Final = 0.005  # seconds


class Company:
    """Lets `tell` be called, on the loop, soon after something has come up."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: Context, tell: Callable[[], None]
    ) -> None:
        self._loop, self._context, self._tell = loop, context, tell
        self._expected = False  # `tell` will be called
        self._not_before = 0.0  # loop time
        self._later: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Something has come up. For any thread and moment; RuntimeError if the loop is closed."""
        if not self._expected:
            self._expected = True
            self._loop.call_soon_threadsafe(self._go, context=self._context)

    def _go(self) -> None:
        if self._loop.time() < self._not_before:
            self._later = self._loop.call_at(self._not_before, self._go, context=self._context)
            return
        self._later, self._expected = None, False
        self._not_before = self._loop.time() + WHILE
        self._tell()

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
