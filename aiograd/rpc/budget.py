"""How much memory of a worker may be taken by messages that come in and are not dealt with yet.

All peers share it: large messages that are still arriving, small ones that wait behind them, and
calls of peers that read no answers. A message for which there is none left is refused.
"""

from __future__ import annotations

from aiograd.rpc.limits import Limits


class Budget:
    """Bytes that one worker has reserved for what comes in, at most `Options.inbound_budget`."""

    def __init__(self, most: int, limits: Limits) -> None:
        self._most, self._limits = most, limits
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Take memory for a message of `size` bytes; False if there is not enough."""
        if self.used + size > self._most:
            self._limits.reached("inbound_budget")
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        self.used -= size
