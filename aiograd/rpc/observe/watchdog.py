"""The watchdog logs what blocks the event loop.

A blocked loop cannot report itself, so a thread asks it for a sign of life again and again. When
none comes for a second, the thread logs the stack of the loop's thread:

    asked ──answered──▶ pause ──▶ asked …
      └──1 s without an answer──▶ log the stack ──answered──▶ log how long it took

What blocks it is also told to `blocked`, which leaves a note for those who look at the cluster.

One thread per worker, which wakes up four times a second; in a process of its own, every five
seconds while no call is under way (`rest`). It runs from the start, because a blocked loop could
not start it. Code that blocks the loop and holds the interpreter lock stops this thread,
too, and is logged when it releases the lock.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol

_log = logging.getLogger("aiograd")

BLOCKED: Final = 1.0  # seconds without a sign of life that are worth a line
PAUSE: Final = 0.25  # seconds between an answer and the next question
RESTING: Final = 5.0  # the same while the worker rests: a question wakes up two threads
# Seconds. A process that was stopped as a whole (SIGSTOP, a suspended laptop) finds `BLOCKED` over
# when it goes on, though its loop answers at once. It is given this long to do so.
_DOUBT: Final = 0.1
_FRAMES: Final = 30  # innermost frames that are shown


Blockage = tuple[float, FrameType | None]  # seconds, and the innermost frame of the loop's thread


class Clock(Protocol):
    """What the watchdog needs of a runtime."""

    def time(self) -> float:
        """Return seconds of a clock that never goes back."""

    def start_thread(self, target: Callable[[], None], name: str) -> None:
        """Run `target` in a thread."""


class WatchedWorker(Protocol):
    """What the watchdog needs of a worker."""

    @property
    def name(self) -> str:
        """The name of the worker."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop to watch."""

    @property
    def thread(self) -> int:
        """The ident of the thread that runs the loop."""

    @property
    def runtime(self) -> Clock:
        """The clock and the threads of the worker."""


class Watchdog:
    """Watches the loop of one worker, from `start` to `close`.

    `blocked` is called in the watchdog's thread, every second while the loop is blocked, and with
    None when it goes on: others cannot ask the loop where it is.
    """

    def __init__(
        self, worker: WatchedWorker, blocked: Callable[[Blockage | None], None] | None = None
    ) -> None:
        self._worker = worker
        self._blocked = blocked
        self._sign = threading.Event()  # a sign of life, or `close`
        self._ended = False
        self.lag: float = 0.0  # seconds that the last sign of life took: how long a message waits
        self.largest_lag: float = 0.0  # the longest so far
        self._resting = False

    def start(self) -> None:
        """Start the thread."""
        self._worker.runtime.start_thread(self._watch, f"aiograd-watchdog-{self._worker.name}")

    def rest(self, resting: bool) -> None:
        """Ask less often from now on, or as usual again: at once. On the loop."""
        self._resting = resting
        if not resting:
            self._sign.set()  # the loop turns, so this is no lie while a question is open

    def close(self) -> None:
        """End the thread soon; does not wait for it."""
        self._ended = True
        self._sign.set()

    def _watch(self) -> None:
        while not self._ended:
            self._sign.clear()
            asked = self._worker.runtime.time()
            # A callback, not a look at some counter of the loop: it also wakes up an idle loop,
            # which else would look like a blocked one.
            try:
                self._worker.loop.call_soon_threadsafe(self._sign.set)
            except RuntimeError:  # the loop is closed
                return
            if not (self._sign.wait(BLOCKED) or self._sign.wait(_DOUBT)):
                self._report(asked)
            if self._sign.is_set() and not self._ended:
                self.lag = self._worker.runtime.time() - asked
                self.largest_lag = max(self.lag, self.largest_lag)
            if not self._ended:
                self._sign.clear()
                self._sign.wait(RESTING if self._resting else PAUSE)

    def _report(self, asked: float) -> None:
        worker = self._worker
        # A loop that is not running at all (between two `run_until_complete`) blocks nothing.
        if self._ended or not worker.loop.is_running():
            return
        frame = sys._current_frames().get(worker.thread)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "?"
        del frame  # it would keep everything alive that the loop works on
        self._tell(asked)
        _log.warning(
            "%s: the event loop has been blocked for %.1f s; plain functions and "
            "`await asyncio.to_thread(...)` do not block it. It is here:\n%s",
            worker.name,
            worker.runtime.time() - asked,
            stack.rstrip(),
        )
        # One line per blocking, and one when it is over; a stack every second would fill the log.
        while not self._sign.wait(BLOCKED):
            if worker.loop.is_closed() or not worker.loop.is_running():
                break
            self._tell(asked)
        if self._blocked is not None:
            self._blocked(None)
        if not self._ended and self._sign.is_set():
            blocked = worker.runtime.time() - asked
            _log.warning("%s: the event loop goes on after %.1f s", worker.name, blocked)

    def _tell(self, asked: float) -> None:
        if self._blocked is not None:
            frame = sys._current_frames().get(self._worker.thread)
            self._blocked((self._worker.runtime.time() - asked, frame))
