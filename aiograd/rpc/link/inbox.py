"""The order in which a peer's messages take effect, and that each does so once. Pure.

Large messages arrive in pieces between others, so a small one may be complete before a large one
that was sent earlier. Calls and replies may overtake each other; a request or post of the library
waits for everything sent before it, and calls wait for those. Messages of one stream (a lane) stay
in order.

    sent:       call (large)   call   post   call
    complete:                  call   post   call   call (large)
    effect:                    call                 call (large)   post   call
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from aiograd.errors import ProtocolError
from aiograd.wire.messages import ANSWERS, CALL, NUMBERED, ORDERED


class Once:
    """Takes each call, request and post of a peer once, in constant memory.

    A sender numbers these messages in the order in which it announces them (see `Caller.last_id`),
    and the bytes of a session arrive once and in order. So numbers strictly rise on a link: one
    that repeats the latest is a copy of it, made by fault injection, and a smaller one is no honest
    peer's. Numbers may be left out, for messages that were dropped on purpose or never left.

    A number is taken when its message is *announced*. A large message is complete long after
    thousands of later ones, so a rule about complete messages would need a memory of every gap.
    """

    def __init__(self) -> None:
        self._last = 0  # the number taken last; they begin with 1

    def fresh(self, number: int) -> bool:
        """Take this number; False if its message is a copy of the latest one."""
        if number > self._last:
            self._last = number
            return True
        if number == self._last and number:
            return False
        raise self._misnumbered(number)

    def take_batch(self, first: int, count: int) -> None:
        """Take the numbers of a batch. Batches are never copied: fault injection ends them."""
        if first <= self._last:
            raise self._misnumbered(first)
        self._last = first + count - 1

    def _misnumbered(self, number: int) -> ProtocolError:
        return ProtocolError(f"message {number} was announced after message {self._last}")


class _Entry:
    __slots__ = ("action", "kind", "lane", "ready")

    def __init__(self, kind: int, lane: int, action: Callable[[], None], ready: bool) -> None:
        self.kind, self.lane, self.action, self.ready = kind, lane, action, ready


class Inbox:
    """Messages that wait for a large one sent before them. Empty almost always."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []  # always the same list
        self._large: dict[Any, _Entry] = {}
        # What waits, counted: a peer may send thousands of small messages behind a large one, and
        # to look through all of them for each would take the loop seconds.
        self._ordered = 0  # messages of the library
        self._answers: Counter[int] = Counter()  # by lane
        self._calls: Counter[int] = Counter()  # calls, requests and posts, by number

    def __contains__(self, key: Any) -> bool:
        """Whether a large message was announced and is not complete."""
        return key in self._large

    def has_call(self, lane: int) -> bool:
        """Whether a call, request or post of this number waits here."""
        return lane in self._calls

    def announce(self, key: Any, kind: int, lane: int, action: Callable[[], None]) -> None:
        """Enter a large message that begins; `action` runs when it is complete and its turn."""
        entry = self._large[key] = _Entry(kind, lane, action, ready=False)
        self._enter(entry)

    def complete(self, key: Any) -> None:
        """Note that the last byte of a large message is here."""
        self._large.pop(key).ready = True
        self._settle()

    def put(self, kind: int, lane: int, action: Callable[[], None]) -> None:
        """Enter a small message; `action` runs now if it may overtake what is still coming."""
        if kind in ORDERED:
            blocked = bool(self.entries)
        elif kind == CALL:
            blocked = self._ordered > 0
        else:
            blocked = lane in self._answers
        if blocked:
            self._enter(_Entry(kind, lane, action, ready=True))
        else:
            action()

    def _enter(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self._ordered += entry.kind in ORDERED
        if entry.kind in ANSWERS:
            self._answers[entry.lane] += 1
        if entry.kind in NUMBERED:
            self._calls[entry.lane] += 1

    def _settle(self) -> None:
        ready: list[_Entry] = []
        waiting: list[_Entry] = []
        ordered = False  # one of the library's messages waits further ahead
        lanes: set[int] = set()
        for entry in self.entries:
            if entry.kind in ORDERED:
                blocked = bool(waiting)
            elif entry.kind == CALL:
                blocked = ordered
            else:
                blocked = entry.lane in lanes
            if entry.ready and not blocked:
                ready.append(entry)
                continue
            waiting.append(entry)
            ordered = ordered or entry.kind in ORDERED
            if entry.kind in ANSWERS:
                lanes.add(entry.lane)
        self.entries.clear()
        self._ordered = 0
        self._answers.clear()
        self._calls.clear()
        for entry in waiting:
            self._enter(entry)
        for entry in ready:
            entry.action()
