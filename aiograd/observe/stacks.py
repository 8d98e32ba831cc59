"""Where tasks and threads are: stacks as lines of text, and the line of user code in them.

A coroutine that waits is a chain of frames, from the task's own coroutine to the innermost one
(`cr_await`). A thread is a chain of frames in the other direction (`f_back`). Both are read when
somebody asks; nothing is kept.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Final

Place = tuple[str, int, str, bool]  # file, line, function, whether it is user code

# Frames that only wait for others: the line that led to them says more.
_LIBRARIES: Final = ("aiograd.", "asyncio.", "concurrent.", "contextlib.", "uvloop.")
_MODULES: Final = frozenset(
    {"asyncio", "threading", "contextlib", "queue", "selectors", "uvloop", "aiograd", "runpy"}
)
_DEEPEST: Final = 200  # frames of one stack


def place_of(frame: FrameType) -> Place:
    """Describe a frame."""
    name: str = frame.f_globals.get("__name__", "") or ""
    library = name in _MODULES or name.startswith(_LIBRARIES)
    code = frame.f_code
    return code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name, not library


def task_places(task: asyncio.Task[Any]) -> list[Place]:
    """Return where a task waits, the outermost frame first."""
    return list(_coroutine_places(task.get_coro()))


def _coroutine_places(coroutine: Any) -> Iterator[Place]:
    for _ in range(_DEEPEST):
        frame = None
        for kind in ("cr", "gi", "ag"):  # coroutine, generator, asynchronous generator
            if hasattr(coroutine, f"{kind}_frame"):
                frame = getattr(coroutine, f"{kind}_frame")
                awaited = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        if frame is None:
            return
        yield place_of(frame)
        del frame
        coroutine = awaited


def frame_places(frame: FrameType | None) -> list[Place]:
    """Return where a thread is, given its innermost frame; the outermost one first."""
    found: list[Place] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append(place_of(frame))
        frame = frame.f_back
    return found[::-1]


def users_place(places: Iterable[Place]) -> Place | None:
    """Return the innermost place in user code; else the innermost one at all."""
    found = list(places)
    for place in reversed(found):
        if place[3]:
            return place
    return found[-1] if found else None


def as_line(place: Place | None) -> str:
    """Return a place as "file:line"."""
    return "" if place is None else f"{place[0]}:{place[1]}"


def as_text(places: Iterable[Place]) -> list[str]:
    """Return places as lines for people, with the source where it can be read."""
    lines = []
    for file, line, function, _ in places:
        source = linecache.getline(file, line).strip()
        lines.append(f"{file}:{line} in {function}" + (f": {source}" if source else ""))
    return lines


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> dict[int, asyncio.Task[Any]]:
    """Return the tasks of a loop that wait, by the id of the future that each awaits."""
    found = {}
    for task in asyncio.all_tasks(loop):
        future = getattr(task, "_fut_waiter", None)  # of asyncio's own tasks, in C and in Python
        if future is not None:
            found[id(future)] = task
    return found


def users_line(task: asyncio.Task[Any] | None) -> str:
    """Return the line of user code at which a task waits; "" for a task of the library's own."""
    place = None if task is None else users_place(task_places(task))
    return as_line(place) if place is not None and place[3] else ""


def all_stacks(loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
    """Return the stacks of all threads of this process and of all tasks of the loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[dict[str, Any]] = []
    for ident, frame in sys._current_frames().items():
        places = frame_places(frame)
        name = names.get(ident, str(ident))
        found.append({"kind": "thread", "name": name, "stack": as_text(places)})
    current = asyncio.current_task(loop)
    for task in asyncio.all_tasks(loop):
        if task is not current:
            places = task_places(task)
            found.append({"kind": "task", "name": task.get_name(), "stack": as_text(places)})
    return found
