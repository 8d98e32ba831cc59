"""Objects whose calls run one at a time: the classes marked with `@ag.serial`.

    SubjectTraveller.arrive ─▶ Turn.join ─▶ queue of the object ─▶ Turn.wait ─▶ … ─▶ Turn.finish

A call takes its place when it arrives, or, if the object is still being created then, at the moment
at which it is there. So calls run in order of arrival, whatever else their arguments wait for. The
queue belongs to the object, not to one reference: two references may name one object. It exists
while there are calls in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from aiograd.rref.refcount.records import OwnerRecord

C = TypeVar("C", bound=type)

_MARK: Final = "__aiograd_serial__"
# The serial object in one of whose methods this code runs.
INSIDE: Final[ContextVar[Any]] = ContextVar("aiograd_inside", default=None)


def serial(cls: C) -> C:
    """Let calls of one instance through its RRef run one at a time, in order of arrival.

    Plain methods, `async def` methods and `@ag.inline` ones alike: a coroutine that waits lets no
    other call in. Without it, plain methods of one object may run at the same time in threads, and
    `async def` methods take turns at every `await`. Subclasses are serial, too. Functions that get
    the object by `rref.local_value()` are not held back.

        >>> @ag.serial
        ... class Counter:
        ...     def __init__(self):
        ...         self.value = 0
        ...     def add(self, amount):
        ...         self.value += amount  # never at the same time as another call
        ...         return self.value
        >>> counter = ag.remote("worker1", Counter)
        >>> added = await asyncio.gather(*[counter.rpc_async().add(1) for _ in range(100)])
        >>> added == list(range(1, 101))
        True
    """
    if not isinstance(cls, type):
        raise TypeError(f"@ag.serial marks a class, not {cls!r:.80}")
    setattr(cls, _MARK, True)
    return cls


def is_serial(value: Any) -> bool:
    """Return whether the calls of an object run one at a time."""
    return getattr(type(value), _MARK, False) is True


class Turns:
    """The queues of one worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[int, _Queue] = {}  # by id of the object, which its queue keeps alive

    def take(self, record: OwnerRecord) -> Turn:
        """Return the turn of a call that has arrived; it joins when the value is there."""
        return Turn(record, self)

    def queue(self, value: Any) -> _Queue:
        """Return the queue of an object."""
        found = self._queues.get(id(value))
        if found is None:
            found = self._queues[id(value)] = _Queue(value, self._loop)
        return found

    def forget(self, value: Any) -> None:
        """Drop the queue of an object that nobody calls any more."""
        del self._queues[id(value)]

    def __len__(self) -> int:
        return len(self._queues)


class _Queue:
    """The calls of one object, the running one first."""

    value: Any
    loop: asyncio.AbstractEventLoop

    def __init__(self, value: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.value, self.loop = value, loop
        self.places: deque[_Place] = deque()


class _Place:
    """A call in a queue."""

    __slots__ = ("come", "over")

    def __init__(self) -> None:
        self.come: asyncio.Future[None] | None = None  # made if the call has to wait
        self.over = False


class Turn:
    """A call, as the subject that its method gets; a `callee.functions.Turn`."""

    __slots__ = ("_place", "_queue", "_turns", "record")

    record: OwnerRecord

    def __init__(self, record: OwnerRecord, turns: Turns) -> None:
        self.record, self._turns = record, turns
        self._queue: _Queue | None = None
        self._place: _Place | None = None

    def join(self, record: OwnerRecord) -> None:
        """Take the last place in the queue of the value, if its class is serial."""
        if is_serial(record.value):
            self._place, self._queue = _Place(), self._turns.queue(record.value)
            self._queue.places.append(self._place)

    @property
    def queued(self) -> bool:
        """Whether the call has a place in a queue."""
        return self._place is not None

    @property
    def queue(self) -> object | None:
        """The queue in which the call has a place, to tell it from others; None: in none."""
        return None if self._place is None else self._queue

    @property
    def first(self) -> bool:
        """Whether it is the turn of the call."""
        return self._queue is not None and self._queue.places[0] is self._place

    def wait(self) -> asyncio.Future[None] | None:
        """Return what ends when the call may run; None if it may at once."""
        queue, place = self._queue, self._place
        if queue is None or place is None or queue.places[0] is place:
            return None
        place.come = queue.loop.create_future()
        return place.come

    def finish(self) -> None:
        """Let the next call run: this one has ended, or never will begin."""
        place, self._place = self._place, None
        if place is not None:
            assert self._queue is not None
            _leave(self._turns, self._queue, place)

    def __del__(self) -> None:
        # A call that was refused after it had its place, because its other arguments could not be
        # read, say. That may be noticed in any thread, and after the loop has ended.
        if self._place is not None and self._queue is not None:
            with contextlib.suppress(RuntimeError):
                self._queue.loop.call_soon_threadsafe(_leave, self._turns, self._queue, self._place)


def _leave(turns: Turns, queue: _Queue, place: _Place) -> None:
    place.over = True
    places = queue.places
    if places[0] is not place:
        return  # it never came to its turn; the call before it skips it
    while places and places[0].over:
        places.popleft()
    if not places:
        turns.forget(queue.value)
    elif (come := places[0].come) is not None and not come.done():
        come.set_result(None)
