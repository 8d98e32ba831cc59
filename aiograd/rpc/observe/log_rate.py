"""A bound on log lines that others cause: a flood of bad messages must not become a flood of lines.

if self._rate.allows():
    _log.warning("… %r …", name)        # %r: a name from the wire may have newlines in it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PER_SECOND: Final = 10


class LogRate:
    """Lets through some lines in every second; counts the others."""

    def __init__(self, clock: Callable[[], float], per_second: int = PER_SECOND) -> None:
        self._clock, self._most = clock, per_second
        self._since = -1.0  # when the present second began
        self._lines = 0
        self.dropped: int = 0

    def allows(self) -> bool:
        """Whether one more line may be written now."""
        now = self._clock()
        if now - self._since >= 1.0:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines > self._most:
            self.dropped += 1
            return False
        return True
