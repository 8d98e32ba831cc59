"""The ledger: what each partner occupies on this worker, by its proven name.

A partner (a restricted peer) can make tables of this worker grow: messages that arrive, values and
contexts that stay, passes, sessions. Each of these has a share per *name*, whatever number of links
and incarnations the partner comes with. So one partner at its limit is refused, and no other one.

    Accounts ── of("clinic") ──▶ Account ── hold() ──▶ Hold      of a context, a value, a pass
                                    │                    │ close, or the end of what holds it
                                    ◀────────────────────┘

Memory is a part of `inbound_budget`; everything else is counted by name, in `MEMORY` and the names
of `SHARES`. Trusted peers have no account: they may run any code here, so a limit would only cost
time. Nothing here is asked for them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakSet, WeakValueDictionary

from aiograd.errors import Overloaded
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.observe.log_rate import LogRate
from aiograd.rpc.observe.metrics import Limits
from aiograd.rpc.options import Options

MEMORY: Final = "partner_memory"
# What is counted besides memory, and how many of it one partner may have at a time.
SHARES: Final[dict[str, Callable[[Options], int]]] = {
    "contexts": lambda options: options.partner_contexts,  # autograd contexts that it brought here
    "passes": lambda options: 4 * options.partner_contexts,  # that it invited us to, undecided
    "aborts": lambda options: 16 * options.partner_contexts,  # marks of passes that it ended
    "edges": lambda options: options.partner_values,  # tensors on the tape here that it sent
    "references": lambda options: options.partner_values // 8,  # held here, to values of its own
    "gathers": lambda options: 64,  # values that wait here for those of others
}
# Names whose accounts are kept although nothing is in them: rates go on when a partner reconnects.
REMEMBERED: Final = 1000
# New sessions that one name may begin within `Options.lease`, for each of its `partner_links`. Each
# incarnation leaves an entry in the tables of lost peers, and leases that run.
SESSIONS_PER_LINK: Final = 4


class Calls(Protocol):
    """What the calls of one link are, as far as shares concern them."""

    running: dict[int, Any]
    abandoned: int


class Account(Budget):
    """The share of one partner: a part of the memory, and entries of tables."""

    name: str
    used: int

    def __init__(
        self,
        name: str,
        worker: str,
        whole: Budget,
        options: Options,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(options.partner_memory, limits)
        self.name, self._worker, self._whole, self._options = name, worker, whole, options
        self.counts: Counter[str] = Counter()
        # The calls of all links of the name, also of lost ones while something of theirs runs.
        self.calls: WeakSet[Calls] = WeakSet()
        self.log_rate: LogRate = LogRate(clock)  # of lines that the partner causes
        self._clock = clock
        self._sessions: deque[float] = deque()  # when the latest ones began
        # What ended in a finalizer, so in any thread: a deque, because its append is atomic.
        self._ended: deque[Counter[str]] = deque()

    def reserve(self, size: int) -> bool:
        """Take memory for `size` bytes, of the partner's part and of the whole."""
        if self.used + size > self._most:
            self.settle()
        if self.used + size > self._most:
            self._limits.reached(MEMORY)
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

    def no_memory(self, what: str, size: int) -> Overloaded:
        """What the partner is told if its share of the memory is used up."""
        return self.refusal(self._worker, what, size, "inbound_budget")

    def check(self, what: str, count: int = 1) -> None:
        """Raise Overloaded if the partner may not have `count` more of something."""
        most = SHARES[what](self._options)
        if self.counts[what] + count > most:
            self.settle()
        if self.counts[what] + count > most:
            self._limits.reached(what)
            raise Overloaded(self._worker, f"{self.name} has {self.counts[what]} {what} of {most}")

    def crowded(self, most: int) -> bool:
        """Whether the partner has `most` calls under way, or as many abandoned ones that run on."""
        running = abandoned = 0
        for calls in self.calls:
            running += len(calls.running)
            abandoned += calls.abandoned
        return running >= most or abandoned >= most

    def hold(self) -> Hold:
        """Return an empty hold, for something that is kept here for the partner."""
        return Hold(self)

    def settle(self) -> None:
        """Take back what ended in finalizers."""
        while self._ended:
            self.give_back(self._ended.popleft())

    def give_back(self, counts: Counter[str]) -> None:
        """Take back memory and entries."""
        for what, count in counts.items():
            if what == MEMORY:
                self.release(count)
            else:
                self.counts[what] -= count

    def ended(self, counts: Counter[str]) -> None:
        """Take back soon; from any thread."""
        self._ended.append(counts)

    def may_begin(self) -> bool:
        """Whether the partner may begin one more session now; counts it."""
        now, options, begun = self._clock(), self._options, self._sessions
        while begun and begun[0] <= now - options.lease:
            begun.popleft()
        if len(begun) >= SESSIONS_PER_LINK * options.partner_links:
            self._limits.reached("partner_sessions")
            return False
        begun.append(now)
        return True

    def as_dict(self) -> dict[str, int]:
        """Return what the partner occupies."""
        self.settle()
        return {MEMORY: self.used} | {what: self.counts[what] for what in SHARES}


class Hold:
    """What one kept object takes of a partner's share; it ends with the object at the latest."""

    __slots__ = ("__weakref__", "_account", "_counts")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._counts: Counter[str] = Counter()

    def take(self, what: str, count: int = 1) -> None:
        """Take `count` more of something; Overloaded if the partner's share is used up."""
        account = self._account
        if what == MEMORY:
            if not account.reserve(count):
                raise account.no_memory("what is kept for it", count)
            self._counts[MEMORY] += count
            return
        account.check(what, count)
        account.counts[what] += count
        self._counts[what] += count

    def check(self, what: str, count: int = 1) -> None:
        """Raise Overloaded if the partner may not have `count` more of something."""
        self._account.check(what, count)

    def give_back(self, what: str, count: int = 1) -> None:
        """Give a part back; nothing after `close`."""
        count = min(count, self._counts[what])
        self._counts[what] -= count
        self._account.give_back(Counter({what: count}))

    def close(self) -> None:
        """Give everything back, on the loop; a second time does nothing."""
        counts, self._counts = self._counts, Counter()
        self._account.give_back(counts)

    def __del__(self) -> None:
        # In whatever thread drops the object last.
        if self._counts:
            self._account.ended(self._counts)


class Accounts:
    """The accounts of one worker's partners, by proven name."""

    def __init__(
        self,
        worker: str,
        whole: Budget,
        options: Options,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._worker, self._whole, self._options, self._limits = worker, whole, options, limits
        self._clock = clock
        # Weak: links and holds keep the account of their partner, so a name never has two.
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._latest: OrderedDict[str, Account] = OrderedDict()
        whole.settle_accounts = self.settle

    def of(self, name: str) -> Account:
        """Return the account of a partner; all its links share one."""
        account = self._accounts.get(name)
        if account is None:
            parts = (self._whole, self._options, self._limits, self._clock)
            account = self._accounts[name] = Account(name, self._worker, *parts)
        self._latest[name] = account
        self._latest.move_to_end(name)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)
        return account

    def settle(self) -> None:
        """Take back what ended in finalizers, for all partners."""
        for account in list(self._accounts.values()):
            account.settle()

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return what each partner occupies, by its name."""
        return {name: account.as_dict() for name, account in self._accounts.items()}
