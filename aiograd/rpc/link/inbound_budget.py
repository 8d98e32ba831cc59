"""The memory of a worker for messages that came in and are not dealt with yet.

All peers share it: large messages that are still arriving, small ones that wait behind them, and
calls of peers that do not read their answers. A message for which there is no memory left is
refused: its bytes are dropped, its sender gets `Overloaded`, and the link and everything else on it
go on. The same holds where the system has no memory although the budget has.

A partner has an `Account` within the budget, one for all links of its name: at most
`Options.partner_memory` bytes of messages that arrive, and of decoded arguments of calls that have
not ended. So one partner at its limit refuses nothing of another one.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from aiograd.errors import Overloaded
from aiograd.rpc.observe.metrics import Limits


class Budget:
    """Bytes that one worker has reserved for what comes in, at most `Options.inbound_budget`."""

    def __init__(self, most: int, limits: Limits) -> None:
        self._most, self._limits = most, limits
        self.used: int = 0

    def reserve(self, size: int) -> bool:
        """Take memory for a message of `size` bytes; False if there is not enough."""
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


class Account(Budget):
    """The part of a budget that one partner may use."""

    used: int

    def __init__(self, whole: Budget, most: int, limits: Limits) -> None:
        super().__init__(most, limits)
        self._whole = whole

    def reserve(self, size: int) -> bool:
        """Take memory for `size` bytes, of the partner's part and of the whole."""
        if self.used + size > self._most:
            self._limits.reached("partner_memory")
            return False
        if not self._whole.reserve(size):
            return False
        self.used += size
        return True

    def unavailable(self, size: int = 0) -> None:
        """The system did not give memory, of which so many bytes were reserved."""
        self.used -= size
        self._whole.unavailable(size)

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        self.used -= size
        self._whole.release(size)


class Accounts:
    """The accounts of one worker's partners, by proven name."""

    def __init__(self, whole: Budget, most: int, limits: Limits) -> None:
        self._whole, self._most, self._limits = whole, most, limits
        # Weak: an account lives as long as a link of its partner, or a call of it that still runs.
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()

    def of(self, name: str) -> Account:
        """Return the account of a partner; all its links share one."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(self._whole, self._most, self._limits)
        return account
