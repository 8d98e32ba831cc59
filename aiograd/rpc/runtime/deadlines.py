"""Deadlines: one loop timer for all deadlines of a worker.

    now ──┬──┬──┬──┬── … ──┬───────────────┬───────────────┬──▶
          └──┴─ buckets of one `STEP`      └─ `_WIDE` steps, from `_FAR` seconds on

A loop timer per call costs more than the call, so deadlines are collected in buckets. When a bucket
is reached, everything still in it expires: up to one step late, never early. Deadlines far away
share wider buckets. Most calls end long before, so buckets found empty are dropped again soon.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from typing import Protocol

STEP = 0.02  # seconds; how late a near deadline may expire
_RATE = 1 / STEP
_WIDE = 8  # steps, a power of two: how late a far one may be; within what callers are promised
_FAR = 2.0  # seconds from now


class Expiring(Protocol):
    """What can be put into a bucket."""

    def expire(self) -> None:
        """End: the deadline is reached. Called on the loop, once."""


Bucket = dict[Expiring, None]  # a dict for its order: first come, first expired


class Deadlines:
    """`bucket(deadline)[thing] = None` to expire then, `del bucket[thing]` when it is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = loop.time
        self._buckets: dict[int, Bucket] = {}  # by the step at whose end they are reached
        self._order: list[int] = []  # a heap of those steps, some of dropped buckets
        self._recent: deque[int] = deque(maxlen=8)  # the steps of buckets made last
        self._timer: asyncio.TimerHandle | None = None
        self._armed = math.inf  # the step that the timer is set for
        # A cache: the far bucket that was asked for last, and the deadlines that belong there.
        # Calls of one worker mostly have one timeout, so for 0.16 s they all find it here.
        self._far: Bucket = {}
        self._far_after = self._far_until = math.inf

    def bucket(self, deadline: float, seconds: float | None = None) -> Bucket:
        """Return the bucket of a finite deadline (loop time), which is `seconds` from now.

        Put something into it before the next call: empty buckets are dropped.
        """
        if seconds is None:
            seconds = deadline - self._time()
        far = seconds > _FAR
        if far and self._far_after < deadline < self._far_until:
            return self._far
        number = int(deadline * _RATE) + 1
        if far:
            # Rounds up to the last step of a group of `_WIDE`, so still never early.
            number |= _WIDE - 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._make(number)
        if far:
            self._far, self._far_until = bucket, number * STEP
            self._far_after = self._far_until - _WIDE * STEP
        return bucket

    def close(self) -> None:
        """Stop the timer and forget all deadlines; nothing expires any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._buckets.clear()
        self._far_after = math.inf
        self._order.clear()

    def _make(self, number: int) -> Bucket:
        # The cached far bucket may be one of the empty ones dropped here. What was put into it
        # later would never expire, so the cache must forget it.
        self._far_after = math.inf
        # Only the last few: one made earlier and empty now is dropped when it is reached. A look at
        # all of them would make every new bucket as expensive as there are buckets.
        for other in self._recent:
            if self._buckets.get(other) == {}:
                del self._buckets[other]
        bucket = self._buckets[number] = {}
        self._recent.append(number)
        heapq.heappush(self._order, number)
        if number < self._armed:
            self._arm(number)
        return bucket

    def _arm(self, number: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = number
        self._timer = self._loop.call_at(number * STEP, self._reached)

    def _reached(self) -> None:
        # Forget the cache for the same reason as in `_make`.
        self._timer, self._armed, self._far_after = None, math.inf, math.inf
        # Loops call timers up to their resolution early; without the margin the bucket that the
        # timer was set for would count as not reached, and be armed again for the past.
        now = int(self._time() / STEP + 1e-6)
        while self._order and (self._order[0] <= now or not self._buckets.get(self._order[0])):
            bucket = self._buckets.pop(heapq.heappop(self._order), {})
            for thing in list(bucket):
                # One that expires may end others of the same bucket, which must not expire, too.
                if bucket.pop(thing, self) is None:
                    thing.expire()
        if self._order and self._order[0] < self._armed:
            self._arm(self._order[0])
