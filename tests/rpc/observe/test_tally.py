"""Counts of calls and passes: made while somebody collects them, and free otherwise."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiograd.errors import DeadlineExceeded
from aiograd.rpc.api import inline, rpc_async, rpc_stream
from aiograd.rpc.observe import tally
from aiograd.rpc.observe.profile import profile, start_profile, stop_profile
from aiograd.rpc.observe.tally import BOUNDS, FUNCTIONS, OTHERS, Histogram, Tally, counting
from tests.support.waiting import until

GATE = threading.Event()


def fail():
    raise KeyError("k")


def blocked():
    GATE.wait(10.0)


@inline
def quick(x):
    return x + 1


async def numbers():
    for i in range(3):
        yield i


def test_a_bound_includes_itself_and_longer_ones_are_counted_last():
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1], BOUNDS[-1] + 1):
        histogram.add(seconds, None)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    assert sum(histogram.counts) == histogram.outcomes["ok"] == 5


def test_errors_are_told_from_cancellations():
    histogram = Histogram()
    for error in (None, KeyError(), asyncio.CancelledError(), TimeoutError()):
        histogram.add(0.0, error)
    assert histogram.outcomes == {"ok": 1, "error": 2, "cancelled": 1}


def test_a_program_that_calls_ever_new_functions_has_a_bounded_number_of_rows():
    counts = Tally()
    for i in range(2 * FUNCTIONS):
        counts.call_ended(f"f{i}", 0.1, None)
    assert len(counts.calls) == FUNCTIONS + 1
    assert sum(counts.calls[OTHERS].counts) == FUNCTIONS


def outcomes(agent):
    calls = counting(agent).renew().calls
    return {
        name: {way: count for way, count in each.outcomes.items() if count}
        for name, each in calls.items()
    }


async def test_every_kind_of_call_is_counted_once(agents):
    async with agents(2) as (_, b):
        assert outcomes(b) == {}
        await asyncio.gather(*(rpc_async("worker1", quick, (i,)) for i in range(50)))
        await rpc_async("worker1", asyncio.sleep, (0,))
        await rpc_async("worker1", divmod, (7, 2))
        with pytest.raises(KeyError):
            await rpc_async("worker1", fail)
        assert [i async for i in rpc_stream("worker1", numbers)] == [0, 1, 2]
        found = outcomes(b)
        assert found.pop("quick") == {"ok": 50}
        assert found == {
            "sleep": {"ok": 1},
            "divmod": {"ok": 1},
            "fail": {"error": 1},
            "numbers": {"ok": 1},
        }


async def test_calls_that_nobody_waits_for_any_more_are_counted_when_they_end(agents):
    async with agents(2) as (_, b):
        counting(b).renew()
        GATE.clear()
        with pytest.raises(DeadlineExceeded):
            await rpc_async("worker1", blocked, timeout=0.05)
        future = rpc_async("worker1", asyncio.sleep, (60,))
        await until(lambda: any(link.callee.execution.running for link in b.links.all()))
        future.cancel()
        GATE.set()
        wanted = {"blocked": {"cancelled": 1}, "sleep": {"cancelled": 1}}
        await until(lambda: outcomes(b) == wanted)


async def test_without_a_collector_calls_take_the_fast_path_and_the_totals_stay(
    agents, monkeypatch
):
    async with agents(2) as (_, b):
        counts = counting(b)
        monkeypatch.setattr(tally, "LEASE", 0.05)
        counts.renew()
        await rpc_async("worker1", quick, (1,))
        assert b.profiles is not None
        await until(lambda: b.tally is None)  # nobody has collected since
        assert b.profiles is None
        await rpc_async("worker1", quick, (1,))
        assert outcomes(b) == {"quick": {"ok": 1}}


async def test_recordings_and_counts_do_not_disturb_each_other(agents):
    async with agents(2) as (_, b):
        await rpc_async("worker1", start_profile)
        counts = counting(b)
        counts.renew()
        with profile() as mine:
            await rpc_async("worker1", quick, (1,))
        assert [span.name for span in mine] == ["rpc_call#quick(worker0 -> worker1)", "quick"]
        whole = await rpc_async("worker1", stop_profile)
        assert [span.name for span in whole] == ["quick"]
        assert b.profiles == []  # it counts on
        await rpc_async("worker1", quick, (1,))
        assert outcomes(b) == {"quick": {"ok": 2}}
        await rpc_async("worker1", start_profile)
        counts.pause()
        assert len(b.profiles) == 1  # the recording goes on
        await rpc_async("worker1", stop_profile)
        assert b.profiles is None
