"""One timer for many deadlines."""

from __future__ import annotations

import asyncio

from aiograd.rpc.runtime.deadlines import STEP, Deadlines


class Thing:
    def __init__(self, loop):
        self.loop, self.at = loop, None
        self.reached = loop.create_future()

    def expire(self):
        self.at = self.loop.time()
        self.reached.set_result(None)


async def test_deadlines_are_reached_in_order_and_never_early():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    now = loop.time()
    delays = [0.2, 0.01, 0.1, 0.05]
    things = [Thing(loop) for _ in delays]
    for delay, thing in zip(delays, things, strict=True):
        deadlines.bucket(now + delay)[thing] = None
    await asyncio.gather(*(thing.reached for thing in things))
    for delay, thing in zip(delays, things, strict=True):
        assert now + delay <= thing.at + 0.002
        assert thing.at <= now + delay + 5 * STEP
    assert not deadlines._buckets
    deadlines.close()


async def test_what_is_taken_out_is_not_told():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    one, two = Thing(loop), Thing(loop)
    bucket = deadlines.bucket(loop.time() + 0.01)
    bucket[one] = None
    del bucket[one]
    deadlines.bucket(loop.time() + 0.05)[two] = None
    await two.reached
    assert one.at is None
    deadlines.close()


async def test_nothing_is_armed_without_deadlines():
    deadlines = Deadlines(asyncio.get_running_loop())
    assert deadlines._timer is None
    deadlines.close()


async def test_calls_that_end_soon_leave_no_buckets():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    for i in range(2000):  # a minute of calls, each over at once
        bucket = deadlines.bucket(loop.time() + 60 + i * 0.03)
        thing = Thing(loop)
        bucket[thing] = None
        del bucket[thing]
    assert len(deadlines._buckets) <= 2
    assert len(deadlines._order) < 500
    kept = Thing(loop)
    deadlines.bucket(loop.time() + 0.05)[kept] = None
    await kept.reached
    deadlines.close()


async def test_far_deadlines_are_still_told_in_time():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    for seconds in (0.5, 2.5, 59.0):
        at = loop.time() + seconds
        thing = Thing(loop)
        deadlines.bucket(at)[thing] = None
        (number,) = [n for n, b in deadlines._buckets.items() if thing in b]
        assert 0 <= number * STEP - at < 0.2
    deadlines.close()


async def test_far_deadlines_share_buckets_and_are_never_early():
    """Also the one that was asked for last, which is found without looking for it."""
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    now = loop.time()
    for i in range(500):
        deadline = now + 3 + i * 0.003
        bucket = deadlines.bucket(deadline, 3.0)
        bucket[Thing(loop)] = None
        (number,) = [n for n, other in deadlines._buckets.items() if other is bucket]
        assert deadline <= number * STEP <= deadline + 9 * STEP
    assert len(deadlines._buckets) < 15
    deadlines.close()


async def test_a_bucket_that_was_dropped_is_not_used_again():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    far = loop.time() + 60
    deadlines.bucket(far, 60.0)
    deadlines.bucket(loop.time() + 0.01)[Thing(loop)] = None  # drops those that are empty
    bucket = deadlines.bucket(far, 60.0)
    assert any(other is bucket for other in deadlines._buckets.values())
    deadlines.close()
    assert deadlines.bucket(far, 60.0) is not bucket
    deadlines.close()
