"""What long work looks like in a terminal: one line that fills, and is gone when the work is done.

    for step in (bar := Progress(range(300), "training")):
        ...
        bar.say(f"step {step}: loss {loss:.3f}")    # a line above it that stays

Where no terminal is attached (a pipe, a file, a notebook, a dumb terminal) there is no bar, and
lines are just printed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Final, Generic, TextIO, TypeVar

__all__ = ["Progress"]

T = TypeVar("T")
_PAUSE: Final = 0.1  # seconds between two drawings; more often would only cost time
_BAR: Final = 30  # columns
_CLEAR: Final = "\r\x1b[K"


class Progress(Generic[T]):
    """Iterate over `items` and show how far it is; `total` if they have no length of their own."""

    def __init__(
        self,
        items: Iterable[T],
        title: str = "",
        *,
        total: int | None = None,
        to: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._items, self._title = items, title
        self._total = len(items) if total is None and isinstance(items, Sized) else total
        self._to = sys.stdout if to is None else to
        self._clock = clock
        self._watched = self._to.isatty() and os.environ.get("TERM") != "dumb"
        self._running = False
        self._begun = self._drawn = -1.0  # when
        self._done = 0

    def __iter__(self) -> Iterator[T]:
        self._begun, self._done, self._running = self._clock(), 0, True
        try:
            for item in self._items:
                # Looked at for every item, drawn ten times a second: fast loops are not slowed
                # down.
                if self._clock() - self._drawn >= _PAUSE:
                    self._draw()
                yield item
                self._done += 1
        finally:
            # Also when the loop is left early or by an error: the terminal is left clean.
            self._write(_CLEAR)
            self._running = False

    def say(self, text: str) -> None:
        """Print a line; the bar makes room for it."""
        self._write(_CLEAR)
        self._to.write(f"{text}\n")
        self._draw()
        self._to.flush()

    def _draw(self) -> None:
        self._drawn = self._clock()
        # A full line would wrap, and the next drawing would leave it behind. Asked each time, since
        # a window may be resized.
        room = shutil.get_terminal_size().columns - 1
        self._write(_CLEAR + self._line()[:room])

    def _line(self) -> str:
        if not self._total:
            return f"{self._title} {self._done}"
        full = min(self._done * _BAR // self._total, _BAR)
        bar = "█" * full + "░" * (_BAR - full)
        return f"{self._title} {bar} {self._done}/{self._total}{self._left()}"

    def _left(self) -> str:
        """Return how long it will take, once there is a second's worth of measurement."""
        passed = self._clock() - self._begun
        # A guess from less than a second of work would jump about.
        if not self._done or not self._total or passed < 1:
            return ""
        seconds = round(passed / self._done * (self._total - self._done))
        return (
            f" · {seconds // 60} min {seconds % 60} s left"
            if seconds > 99
            else f" · {seconds} s left"
        )

    def _write(self, text: str) -> None:
        if self._watched and self._running:
            self._to.write(text)
            self._to.flush()
