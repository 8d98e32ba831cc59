"""Fault injection: make chosen messages of a worker fail, vanish, arrive late or arrive twice.

    worker.faults = Faults()                                   # control messages fail 3 times
    worker.faults = Faults(fail={}, delay={"call": 1.5})       # calls leave 1.5 s late
    worker.faults = Faults(fail={}, drop={"rref.release": 2})  # the first two are lost

Kinds are those of the agent: "call", "op", "remote", "reply", or the name of a service. Counts hold
per kind and receiver, so that a fault for one peer does not use up that of another. `Faults` only
decides; the agent carries it out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aiograd.rpc.extension import DROP, DUPLICATE, FAIL, SEND, FaultAction

__all__ = ["CALLS", "CONTROL", "Faults"]

# The library's own idempotent messages, which it repeats until they are answered: requests for a
# fork, accepted children, released users, released contexts.
CONTROL = ("rref.fork", "rref.accept", "rref.release", "context.release")
CALLS = ("call", "op")  # user functions and registered ops

FAILURES = 3  # fewer than the library's retries, and more than a single retry would survive
DELAY = 1.5  # seconds; longer than the timeouts that tests use

Counts = Mapping[str, float] | Iterable[str]


@dataclass
class Faults:
    """Which messages that a worker sends go wrong, and how. Set it on the sender: `worker.faults`.

    `worker` is `ag.current_worker()`, what `init_rpc` returned, or inside a called function the
    callee. Keys are kinds of messages: "call", "op", "remote", "reply", or a service of the library
    such as "rref.release" or "context.release". `fail`, `drop` and `duplicate` say how many of the
    first messages of a kind are hit, per recipient; a plain list of kinds means every one. `delay`
    gives seconds, for every message of the kind. Without arguments the library's own idempotent
    messages (`CONTROL`) fail three times each: it must survive that, and so must your program.

        >>> worker = ag.current_worker()
        >>> worker.faults = ag.testing.Faults(fail={"call": 1})
        >>> await ag.rpc_async("worker1", abs, args=(-1,))
        Traceback (most recent call last):
            ...
        aiograd.errors.WorkerLost: ...
        >>> await ag.rpc_async("worker1", abs, args=(-1,))  # only the first one failed
        1
        >>> worker.faults.hit
        Counter({('fail', 'call'): 1})
        >>> worker.faults = None
    """

    fail: Counts = field(default_factory=lambda: dict.fromkeys(CONTROL, FAILURES))
    drop: Counts = ()
    duplicate: Counts = ()
    delay: Mapping[str, float] = field(default_factory=dict)
    hit: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)
    """How often each (action, kind) was chosen, for tests to look at."""

    def __post_init__(self) -> None:
        # In the order in which they apply to one message: an earlier one uses up its count first,
        # so `Faults(fail={"x": 1}, drop={"x": 1})` fails the first message and drops the second.
        self._counted = (
            ("fail", FAIL, _counts("fail", self.fail)),
            ("drop", DROP, _counts("drop", self.drop)),
            ("duplicate", DUPLICATE, _counts("duplicate", self.duplicate)),
        )
        for kind, seconds in self.delay.items():
            if not seconds >= 0:
                raise ValueError(f"delay[{kind!r}] should be 0 seconds or more, not {seconds!r}")
        self._seen: Counter[tuple[str, str, str]] = Counter()  # (action, kind, to): so far

    @classmethod
    def delays(cls, kinds: Iterable[str] = CALLS, seconds: float = DELAY) -> Faults:
        """Make faults that only delay: calls and ops by 1.5 s, unless said otherwise."""
        return cls(fail={}, delay=dict.fromkeys(kinds, seconds))

    def on_send(self, kind: str, to: str) -> FaultAction:
        """Decide about one message, as the agent's `FaultInjector`."""
        for name, action, limits in self._counted:
            limit = limits.get(kind, 0)
            if self._seen[name, kind, to] < limit:
                self._seen[name, kind, to] += 1
                self.hit[name, kind] += 1
                return action
        if kind in self.delay:
            self.hit["delay", kind] += 1
            return FaultAction("delay", self.delay[kind])
        return SEND


def _counts(name: str, counts: Counts) -> dict[str, float]:
    # A string is an iterable of kinds, too: of single letters, which would match nothing.
    if isinstance(counts, str):
        raise TypeError(f"{name} should be kinds with their counts, not the string {counts!r}")
    if not isinstance(counts, Mapping):
        return dict.fromkeys(counts, math.inf)
    for kind, count in counts.items():
        if not count >= 0:
            raise ValueError(f"{name}[{kind!r}] should be a number of messages, not {count!r}")
    return dict(counts)
