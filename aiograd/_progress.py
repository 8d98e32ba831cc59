"""What long work looks like in a terminal: one line that fills, and is gone when the work is done.

    for step in (bar := Progress(range(300), "training")):
        ...
        bar.say(f"step {step}: loss {loss:.3f}")    # a line above it that stays

`Display` has one line for all bars of a process: `ag.progress` uses it, here and from other workers
(`rpc/progress.py`), in a terminal and below the cell of a notebook. Where nobody watches (a pipe, a
file, a dumb terminal) there is no bar, and lines are just printed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, Generic, TextIO, TypeVar

__all__ = ["DISPLAY", "Display", "Progress"]

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
        return bar_line(self._title, self._done, self._total, self._clock() - self._begun)

    def _write(self, text: str) -> None:
        if self._watched and self._running:
            self._to.write(text)
            self._to.flush()


def bar_line(title: str, done: int, total: int | None, passed: float) -> str:
    """Return one bar as text; `passed` are the seconds since it began."""
    if not total:
        return f"{title} {done}"
    full = min(done * _BAR // total, _BAR)
    bar = "█" * full + "░" * (_BAR - full)
    return f"{title} {bar} {done}/{total}{_time_left(done, total, passed)}"


def _time_left(done: int, total: int, passed: float) -> str:
    """Return how long it will take, once there is a second's worth of measurement."""
    # A guess from less than a second of work would jump about.
    if not done or passed < 1:
        return ""
    seconds = round(passed / done * (total - done))
    return (
        f" · {seconds // 60} min {seconds % 60} s left" if seconds > 99 else f" · {seconds} s left"
    )


class _Shown:
    """One bar of a display."""

    __slots__ = ("begun", "done", "over", "title", "total")

    def __init__(self, title: str, begun: float) -> None:
        self.title, self.begun, self.over = title, begun, False
        self.done, self.total = 0, None  # type: int, int | None


class Display:
    """The bars of one process in one line: those with the same title are added up.

    May be used from any thread. Nothing is written where nobody watches.
    """

    def __init__(
        self, to: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._to, self._clock = to, clock
        self._bars: dict[Any, _Shown] = {}
        self._drawn = -1.0
        self._width = 0  # columns of what a notebook shows now

    def update(self, key: Any, title: str, done: int, total: int | None) -> None:
        """Show a bar, or how far it is now; drawn ten times a second at most."""
        # Without a lock: each step is one operation on a dict, and a line is one write. The worst
        # that two threads can do is to draw twice.
        bar = self._bars.get(key)
        if bar is None or bar.over:
            bar = self._bars[key] = _Shown(title, self._clock())
        bar.done, bar.total = done, total
        if self._clock() - self._drawn >= _PAUSE:
            self._draw()

    def remove(self, key: Any) -> None:
        """Take a bar away."""
        bar = self._bars.get(key)
        if bar is not None:
            # It counts as long as there are others of its title: their sum must not jump back.
            bar.over = True
            same = [k for k, each in list(self._bars.items()) if each.title == bar.title]
            if all(self._bars[k].over for k in same if k in self._bars):
                for k in same:
                    self._bars.pop(k, None)
            self._draw()

    def say(self, text: str) -> None:
        """Print a line that stays; the bars make room for it."""
        to = sys.stdout if self._to is None else self._to
        if to is not None:
            clear = self._over(to, "") if self._watched(to) and self._bars else ""
            to.write(f"{clear}{text}\n")
            to.flush()
            self._draw()

    def line(self) -> str:
        """Return all bars as one line of text."""
        groups: dict[str, list[_Shown]] = {}
        for bar in list(self._bars.values()):
            groups.setdefault(bar.title, []).append(bar)
        now = self._clock()
        return "   ".join(_group_line(title, bars, now) for title, bars in groups.items())

    def _draw(self) -> None:
        self._drawn = self._clock()
        to = sys.stdout if self._to is None else self._to  # looked up: notebooks replace it
        if to is None or not self._watched(to):
            return
        room = shutil.get_terminal_size().columns - 1
        to.write(self._over(to, self.line()[:room]))
        to.flush()

    def _over(self, to: TextIO, line: str) -> str:
        """Return what replaces the line that is shown by another one."""
        if not _is_notebook(to):
            return _CLEAR + line
        # Notebooks go back to the start of the line, but erase none: spaces do.
        blank = " " * self._width
        self._width = len(line)
        return f"\r{blank}\r{line}"

    @staticmethod
    def _watched(to: TextIO) -> bool:
        return _is_notebook(to) or (to.isatty() and os.environ.get("TERM") != "dumb")


def _is_notebook(to: TextIO) -> bool:
    """Whether what is written appears below a cell."""
    return type(to).__module__.startswith("ipykernel.")


def _group_line(title: str, bars: list[_Shown], now: float) -> str:
    totals = [bar.total for bar in bars]
    total = None if None in totals else sum(filter(None, totals))
    passed = now - min(bar.begun for bar in bars)
    return bar_line(title, sum(bar.done for bar in bars), total, passed)


DISPLAY: Final = Display()  # of this process
