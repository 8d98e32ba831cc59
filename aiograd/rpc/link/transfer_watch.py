"""The least rate of a partner's large messages: memory is reserved for all of one when it begins.

Two rules, both for what is under way at a time on one link:

    rate        in every window of `PATIENCE` seconds, `Options.partner_rate` bytes per second come
    deadline    a message is complete when all that was under way as it began could have come at
                that rate, and `PATIENCE` seconds more

The first one ends messages of a peer that sends nothing, the second one a message that is starved
by others of the same peer. Pure: the link asks once per heartbeat, and refuses what is overdue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PATIENCE: Final = 30.0  # seconds; a stopped process or a slow network may need some


class TransferWatch:
    """The large messages under way on one link, as of the last heartbeat."""

    def __init__(self, rate: int) -> None:
        self._rate = rate  # bytes per second
        self._deadlines: dict[int, float] = {}  # by the number of a message
        self._window: tuple[float, int] | None = None  # when it began, and bytes received by then
        self._in_window: set[int] = set()  # messages that were under way when it began

    def overdue(self, now: float, received: int, under_way: Mapping[int, int]) -> list[int]:
        """Return the messages to refuse; `under_way` has the bytes still to come of each."""
        if not under_way:
            self._deadlines.clear()
            self._window = None
            return []
        total = sum(under_way.values())
        known = self._deadlines
        self._deadlines = {
            number: known.get(number, now + PATIENCE + total / self._rate) for number in under_way
        }
        late = {number for number, deadline in self._deadlines.items() if deadline <= now}
        if self._window is None:
            self._open_window(now, received, under_way)
        else:
            began, before = self._window
            if now - began >= PATIENCE:
                if received - before < self._rate * (now - began):
                    late |= self._in_window & under_way.keys()
                self._open_window(now, received, under_way)
        return sorted(late)

    def _open_window(self, now: float, received: int, under_way: Mapping[int, int]) -> None:
        self._window, self._in_window = (now, received), set(under_way)
