"""The order in which a peer's messages take effect, and that each does so once.

Large messages arrive in pieces between others, so a small one may be complete before a large one
that was sent earlier. Calls and replies may overtake each other; a request or post of the library
waits for everything sent before it, and calls wait for those. What belongs to one stream (a lane)
stays in order.

    sent:       call (large)   call   post   call
    complete:                  call   post   call   call (large)
    effect:                    call                 call (large)   post   call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiograd.wire.messages import ANSWERS, CALL, NUMBERED, ORDERED

_AHEAD = 4096  # numbers remembered beyond a gap; older ones count as seen


class Once:
    """Sequence numbers that came already; they come nearly in order."""

    def __init__(self) -> None:
        self._low = 0  # everything up to here was seen
        self._ahead: set[int] = set()

    def fresh(self, number: int) -> bool:
        """Whether this number comes for the first time."""
        if number == self._low + 1 and not self._ahead:
            self._low = number
            return True
        if number <= self._low or number in self._ahead:
            return False
        self._ahead.add(number)
        if len(self._ahead) > _AHEAD:  # a message was lost for good
            self._low = min(self._ahead) - 1
        while self._low + 1 in self._ahead:
            self._low += 1
            self._ahead.discard(self._low)
        return True

    def fresh_row(self, first: int, count: int) -> bool:
        """Whether so many numbers come for the first time, and right after all earlier ones."""
        if first != self._low + 1 or self._ahead:
            return False
        self._low += count
        return True


class _Entry:
    __slots__ = ("action", "kind", "lane", "ready")

    def __init__(self, kind: int, lane: int, action: Callable[[], None], ready: bool) -> None:
        self.kind, self.lane, self.action, self.ready = kind, lane, action, ready


class Inbox:
    """Messages that wait for a large one sent before them. Empty almost always."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []  # always the same list
        self._large: dict[Any, _Entry] = {}

    def __contains__(self, key: Any) -> bool:
        """Whether a large message was announced and is not complete."""
        return key in self._large

    def has_call(self, lane: int) -> bool:
        """Whether a call, request or post of this number waits here."""
        return any(entry.lane == lane and entry.kind in NUMBERED for entry in self.entries)

    def announce(self, key: Any, kind: int, lane: int, action: Callable[[], None]) -> None:
        """A large message begins; `action` runs when it is complete and its turn."""
        entry = self._large[key] = _Entry(kind, lane, action, ready=False)
        self.entries.append(entry)

    def complete(self, key: Any) -> None:
        self._large.pop(key).ready = True
        self._settle()

    def put(self, kind: int, lane: int, action: Callable[[], None]) -> None:
        """A small message; `action` runs now if it may overtake what is still coming."""
        self.entries.append(_Entry(kind, lane, action, ready=True))
        self._settle()

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
        self.entries[:] = waiting
        for entry in ready:
            entry.action()
