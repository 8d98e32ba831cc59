"""One timer for all deadlines of a worker.

A loop timer per call costs more than the call, so deadlines are collected in buckets, and a bucket
that is reached tells everything still in it: up to one step late, never early. Deadlines far away
share wider buckets. Most calls end long before, so buckets found empty are dropped again soon.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from typing import Protocol

STEP = 0.02  # seconds; how late a near deadline may be told
_RATE = 1 / STEP
_WIDE = 8  # steps, a power of two: how late a far one may be; within what callers are promised
_FAR = 2.0  # seconds from now


class Expiring(Protocol):
    def expire(self) -> None: ...


Bucket = dict[Expiring, None]


class Deadlines:
    """`bucket(deadline)[thing] = None` to be told, `del bucket[thing]` when it is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = loop.time
        self._buckets: dict[int, Bucket] = {}  # by the step at whose end they are reached
        self._order: list[int] = []  # a heap of those steps, some of dropped buckets
        self._recent: deque[int] = deque(maxlen=8)
        self._timer: asyncio.TimerHandle | None = None
        self._armed = math.inf
        # The bucket of far deadlines that was asked for last, and which of them belong there.
        self._far: Bucket = {}
        self._far_after = self._far_until = math.inf

    def bucket(self, deadline: float, seconds: float | None = None) -> Bucket:
        """The bucket of a finite deadline (loop time), which is so many seconds from now."""
        if seconds is None:
            seconds = deadline - self._time()
        far = seconds > _FAR
        if far and self._far_after < deadline < self._far_until:
            return self._far
        number = int(deadline * _RATE) + 1
        if far:
            number |= _WIDE - 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._make(number)
        if far:
            self._far, self._far_until = bucket, number * STEP
            self._far_after = self._far_until - _WIDE * STEP
        return bucket

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._buckets.clear()
        self._far_after = math.inf
        self._order.clear()

    def _make(self, number: int) -> Bucket:
        self._far_after = math.inf  # it may be one of those that are dropped
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
        self._timer, self._armed, self._far_after = None, math.inf, math.inf
        now = int(self._time() / STEP + 1e-6)
        while self._order and (self._order[0] <= now or not self._buckets.get(self._order[0])):
            bucket = self._buckets.pop(heapq.heappop(self._order), {})
            for thing in list(bucket):
                if bucket.pop(thing, self) is None:
                    thing.expire()
        if self._order and self._order[0] < self._armed:
            self._arm(self._order[0])
