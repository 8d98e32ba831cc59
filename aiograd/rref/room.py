"""Room: how many entries of a table one partner may still add, counted only when that is used up.

The tables of references need not know of partners, and trusted workers pay nothing. A partner that
has used up its last count is counted anew, but not all the time: one at its limit could make us
count all day.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiograd.rpc.directory import LOST_PEERS

PAUSE: Final = 0.1  # seconds between two counts of one partner, at least
_SHARE: Final = 20  # a count that took t seconds is not repeated for 20 t: a twentieth of the loop


class Room:
    """What each partner may still add to one table, by its name."""

    most: Callable[[], int]

    def __init__(
        self, count: Callable[[str], int], most: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._count, self.most, self._clock = count, most, clock
        self._left: dict[str, int] = {}
        self._next: dict[str, float] = {}  # when a partner may be counted again

    def take(self, name: str, more: int) -> bool:
        """Let a partner add `more` entries; False if it may not."""
        left = self._left.get(name, 0)
        if left < more and (began := self._clock()) >= self._next.get(name, began):
            if len(self._next) >= LOST_PEERS:  # names of partners that are long gone
                self._next.clear()
                self._left.clear()
            left = self._left[name] = self.most() - self._count(name)
            took = self._clock() - began
            self._next[name] = began + max(PAUSE, _SHARE * took)
        if left < more:
            return False
        self._left[name] = left - more
        return True
