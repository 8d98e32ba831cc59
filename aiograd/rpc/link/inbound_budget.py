"""The memory of a worker for messages that came in and are not dealt with yet.

All peers share it: large messages that are still arriving, small ones that wait behind them, and
calls of peers that do not read their answers. A message for which there is no memory left is
refused: its bytes are dropped, its sender gets `Overloaded`, and the link and everything else on it
go on. The same holds where the system has no memory although the budget has.

A partner has an `Account` within the budget, one for all links of its name (see `ledger`).
"""

from __future__ import annotations

from collections.abc import Callable

from aiograd.errors import Overloaded
from aiograd.rpc.observe.metrics import Limits


class Budget:
    """Bytes that one worker has reserved for what comes in, at most `Options.inbound_budget`."""

    def __init__(self, most: int, limits: Limits) -> None:
        self._most, self._limits = most, limits
        self.used: int = 0
        # Takes back what partners had and finalizers gave back, where memory is short.
        self.settle_accounts: Callable[[], None] = lambda: None

    def reserve(self, size: int) -> bool:
        """Take memory for a message of `size` bytes; False if there is not enough."""
        if self.used + size > self._most:
            self.settle_accounts()
        if self.used + size > self._most:
            self._limits.reached("inbound_budget")
            return False
        self.used += size
        return True

    def unavailable(self, size: int = 0) -> None:
        """The system did not give memory, of which so many bytes were reserved."""
        self._limits.reached("allocation")
        self.used -= size

    def refusal(self, worker: str, what: str, size: int, limit: str) -> Overloaded:
        """What the sender of a message is told for which this worker has no memory."""
        most = f"inbound_budget: {self.used} of {self._most} are taken"
        if limit == "partner_rate":
            return Overloaded(worker, f"{what}, {size} bytes, came too slowly (partner_rate)")
        why = most if limit == "inbound_budget" else "allocation: the system has none left"
        return Overloaded(worker, f"no memory for {what}, {size} bytes ({why})")

    def undecodable(self, worker: str, what: str, error: Exception) -> Exception:
        """The same where memory was missing to decode a message; any other error as it is."""
        if not isinstance(error, MemoryError):
            return error
        self.unavailable()
        return Overloaded(worker, f"no memory to decode {what} (allocation: {error})")

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        self.used -= size
