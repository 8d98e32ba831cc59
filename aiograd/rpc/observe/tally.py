"""Counts of calls and passes by outcome, with histograms of how long they took: for monitoring.

    Tally.calls     by function: calls that were made here, from their arguments to their answer
    Tally.passes    backward passes that were begun here

It counts while somebody collects (`Counting.renew`), as Prometheus does once its collector is
registered: each scrape keeps it going for `LEASE` seconds more. Otherwise no call does anything for
it: calls that are observed in any way leave the fast paths, by the same test as recorded ones
(`Agent.profiles`). Totals are kept when it pauses, since counters must not fall.
"""

from __future__ import annotations

import asyncio
import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, Protocol

OK, FAILED, CANCELLED = "ok", "error", "cancelled"
OUTCOMES: Final = (OK, FAILED, CANCELLED)
# Upper bounds in seconds, as Prometheus has them: a call within one host takes 0.1 ms, a long one
# minutes. Eleven, because each is a time series per function and worker.
BOUNDS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 10.0, 60.0)
FUNCTIONS: Final = 100  # that have a row of their own; a program may call ever new lambdas
OTHERS: Final = "(others)"
# Seconds without a scrape after which counting pauses: several of the longest usual intervals.
LEASE: Final = 300.0


class Histogram:
    """How often something ended in which way, and how long it took."""

    __slots__ = ("counts", "outcomes", "total")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)  # the last one: longer than all bounds
        self.total: float = 0.0  # seconds

    def add(self, seconds: float, error: BaseException | None) -> None:
        """Count one that has ended."""
        # A bound includes itself ("le").
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds
        self.outcomes[_outcome(error)] += 1


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return OK
    return CANCELLED if isinstance(error, asyncio.CancelledError) else FAILED


class Tally:
    """The counts of one worker. On the loop only."""

    def __init__(self) -> None:
        self.calls: dict[str, Histogram] = {}
        self.passes: Histogram = Histogram()

    def call_ended(self, function: str, seconds: float, error: BaseException | None) -> None:
        """Count a call that was made here."""
        found = self.calls.get(function)
        if found is None:
            name = function if len(self.calls) < FUNCTIONS else OTHERS
            found = self.calls.setdefault(name, Histogram())
        found.add(seconds, error)


class CountingWorker(Protocol):
    """What counting needs of a worker."""

    loop: asyncio.AbstractEventLoop
    tally: Tally | None
    profiles: Any

    @property
    def parts(self) -> dict[type, Any]:
        """What layers have put there."""


class Counting:
    """Lets a worker count for as long as it is asked to."""

    def __init__(self, worker: CountingWorker) -> None:
        self._worker = worker
        self._tally = Tally()
        self._pause: asyncio.TimerHandle | None = None

    def renew(self) -> Tally:
        """Count for `LEASE` seconds from now; return what there is so far."""
        worker = self._worker
        if worker.tally is None:
            worker.tally = self._tally
            worker.profiles = worker.profiles or []
        if self._pause is not None:
            self._pause.cancel()
        # By a weak reference: a closed worker is not told to stop its parts, and must not be kept
        # alive for as long as the lease.
        self._pause = worker.loop.call_later(LEASE, _pause, weakref.ref(self))
        return self._tally

    def pause(self) -> None:
        """Count no more until `renew`; the totals stay."""
        worker = self._worker
        worker.tally, worker.profiles = None, worker.profiles or None
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None


def _pause(counting: weakref.ref[Counting]) -> None:
    found = counting()
    if found is not None:
        found.pause()


def counting(worker: CountingWorker) -> Counting:
    """Return what counts for a worker, made on first use."""
    found: Counting | None = worker.parts.get(Counting)
    if found is None:
        found = worker.parts[Counting] = Counting(worker)
    return found


class CountedCall:
    """A call being served that is counted, and recorded by `visit` if that is not None."""

    __slots__ = ("_began", "_clock", "_function", "_tally", "_visit")

    def __init__(self, tally: Tally, function: str, clock: Callable[[], float], visit: Any) -> None:
        self._tally, self._function, self._clock, self._visit = tally, function, clock, visit
        self._began = clock()

    def end(self, value: Any, error: BaseException | None) -> list[tuple[Any, ...]]:
        """Count the call; return the spans for its caller."""
        self._tally.call_ended(self._function, self._clock() - self._began, error)
        return [] if self._visit is None else list(self._visit.end(value, error))
