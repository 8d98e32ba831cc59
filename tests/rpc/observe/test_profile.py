"""Recordings of calls, and of what they did elsewhere."""

from __future__ import annotations

import asyncio
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import DeadlineExceeded, RpcError
from aiograd.rpc.api import expose, inline, rpc_async, rpc_stream, rpc_sync
from aiograd.rpc.observe.profile import (
    Profile,
    Span,
    chrome_trace,
    key,
    lanes,
    profile,
    span,
    start_profile,
    stop_profile,
    table,
)
from aiograd.rpc.options import Options


def add(x, y=0):
    return x + y


async def add_later(x, y=0):
    with span("thinking"):
        await asyncio.sleep(0)
    return x + y


@inline
def add_inline(x, y=0):
    return x + y


def promise(x):
    return add_later(x)


async def hop(x):
    return await rpc_async("worker2", add_later, (x, 1))


def hop_sync(x):
    return rpc_sync("worker2", add, (x, 1))


def boom():
    with span("before"):
        pass
    raise ValueError("boom")


async def forever():
    await asyncio.Event().wait()


async def count(n):
    for i in range(n):
        with span(f"item {i}"):
            yield i


@expose
def exposed(x):
    return x + 1


def find(prof, name):
    return [each for each in prof if each.name == name]


def only(prof, full):
    (found,) = [each for each in prof if each.key == full]
    return found


@pytest.mark.parametrize("func", [add, add_later, add_inline, promise], ids=lambda f: f.__name__)
async def test_a_call_is_noted_at_both_ends(agents, func):
    async with agents(2):
        with profile() as prof:
            assert await rpc_async("worker1", func, (3,)) == 3
        name = key("call", func.__name__, "worker0", "worker1")
        call, run = only(prof, name), only(prof, f"{name}/{func.__name__}")
        assert (call.worker, call.kind, call.parent) == ("worker0", "call", 0)
        assert (run.worker, run.kind, run.parent) == ("worker1", "run", call.id)
        assert call.start <= run.start <= run.end <= call.end


async def test_functions_that_go_inside_their_call_are_recorded_too(agents):
    big = np.ones(100_000)
    async with agents(2):
        with profile() as prof:
            assert await rpc_async("worker1", lambda: float(big.sum())) == 100_000
            assert await rpc_async("worker1", [1, 2, 3].count, (2,)) == 1
        assert [each.kind for each in prof] == ["call", "run"] * 2
        assert prof.events[3].name == "list.count"


async def test_large_results_bring_their_spans(agents):
    async with agents(2):
        with profile() as prof:
            found = await rpc_async("worker1", np.ones, (1_000_000,))
        assert found.sum() == 1_000_000
        assert [each.worker for each in prof] == ["worker0", "worker1"]


async def test_a_blocking_call_is_noted_when_it_returns(agents):
    async with agents(3):
        with profile() as prof:
            assert await rpc_async("worker1", hop_sync, (1,)) == 2
        first = key("call", "hop_sync", "worker0", "worker1")
        assert only(prof, f"{first}/{key('call', 'add', 'worker1', 'worker2')}/add")


async def test_parallel_calls_do_not_mix(agents):
    async with agents(3):
        with profile() as prof:
            await asyncio.gather(
                *(rpc_async(f"worker{1 + i % 2}", add_later, (i,)) for i in range(20))
            )
        assert len(prof) == 60
        calls = [each for each in prof if each.kind == "call"]
        for call in calls:
            (run,) = prof.children(call)
            (scope,) = prof.children(run)
            assert run.key == f"{call.key}/add_later"
            assert scope.key == f"{call.key}/thinking"
            assert call.key.endswith(f"-> {run.worker})")
        assert len({each.id for each in prof}) == 60


async def test_failures_are_noted_and_raised(agents):
    async with agents(2):
        with profile() as prof, pytest.raises(ValueError, match="boom"):
            await rpc_async("worker1", boom)
        assert [(each.kind, each.error) for each in prof] == [
            ("call", "ValueError"),
            ("run", "ValueError"),
            ("scope", ""),
        ]


async def test_calls_that_get_no_answer_are_noted(agents):
    async with agents(2):
        with profile() as prof:
            future = rpc_async("worker1", forever)
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            with pytest.raises(DeadlineExceeded):
                await rpc_async("worker1", forever, timeout=0.02)
            with pytest.raises(TypeError):  # known before sending: there was no call
                rpc_async("worker1", add, (threading.Lock(),))
        assert [each.error for each in prof] == ["CancelledError", "DeadlineExceeded"]


async def test_streams_are_noted_from_first_to_last(agents):
    async with agents(2):
        with profile() as prof:
            assert [i async for i in rpc_stream("worker1", count, (3,))] == [0, 1, 2]
        stream = only(prof, key("stream", "count", "worker0", "worker1"))
        (run,) = prof.children(stream)
        items = prof.children(run)
        assert [each.name for each in items] == ["item 0", "item 1", "item 2"]
        assert all(run.start <= each.start <= each.end <= run.end for each in items)


async def test_a_stream_left_early_is_noted(agents):
    async with agents(2):
        with profile() as prof:
            async with rpc_stream("worker1", count, (1000,)) as stream:
                assert await anext(stream) == 0
        assert [(each.kind, each.error) for each in prof] == [("stream", "CancelledError")]


async def test_nothing_is_recorded_outside(agents):
    async with agents(2):
        with profile() as prof:
            pass
        await rpc_async("worker1", add, (1,))
        with span("nobody looks"):
            pass
        assert len(prof) == 0


async def test_a_call_begun_inside_is_noted_when_it_ends(agents):
    async with agents(2):
        with profile() as prof:
            future = rpc_async("worker1", add, (1,))
        assert len(prof) == 0
        await future
        assert [each.kind for each in prof] == ["call", "run"]


async def test_recordings_nest(agents):
    async with agents(2):
        with profile() as outer:
            await rpc_async("worker1", add, (1,))
            with span("part"), profile() as inner:
                await rpc_async("worker1", add_inline, (1,))
        assert [each.name for each in inner if each.kind == "run"] == ["add_inline"]
        assert [each.name for each in outer if each.kind == "run"] == ["add", "add_inline"]
        (part,) = find(outer, "part")
        assert [each.kind for each in outer.children(part)] == ["call"]
        assert len({each.id for each in outer}) == len(outer) == 5


async def test_tasks_record_for_those_who_started_them(agents):
    async def work(n):
        with profile() as prof:
            await asyncio.gather(*(rpc_async("worker1", add, (i,)) for i in range(n)))
        return len(prof)

    async with agents(2):
        assert await asyncio.gather(work(1), work(3)) == [2, 6]


async def test_details_tell_shapes_and_sizes(agents):
    async with agents(2):
        with profile(details=True) as prof:
            await rpc_async("worker1", np.add, (np.ones((2, 3)), np.ones(3)))
        (run,) = [each for each in prof if each.kind == "run"]
        assert run.detail == {"inputs": [(2, 3), (3,)], "bytes": 48}


async def test_partners_are_neither_asked_nor_told(agents):
    async with agents(2, options=Options(mode="restricted")):
        with profile() as prof:
            assert await rpc_async("worker1", exposed, (1,)) == 2
        assert [each.key for each in prof] == [key("call", "exposed", "worker0", "worker1")]


async def test_a_restricted_worker_ignores_being_asked(agents):
    async with agents(2, options=Options(mode="registered")):
        with profile() as prof:
            assert await rpc_async("worker1", exposed, (1,)) == 2
        assert [each.kind for each in prof] == ["call", "run"]  # registered: no code, but trusted


async def test_a_worker_records_all_that_is_called_there(agents):
    async with agents(3):
        await rpc_async("worker1", start_profile)
        await rpc_async("worker1", add, (1,))
        await rpc_async("worker1", add_inline, (1,))
        await rpc_async("worker1", hop, (1,))
        with pytest.raises(ValueError, match="boom"):
            await rpc_async("worker1", boom)
        prof = await rpc_async("worker1", stop_profile)
        await rpc_async("worker1", add, (1,))
        runs = [each for each in prof if each.worker == "worker1" and each.kind == "run"]
        assert [each.name for each in runs] == ["add", "add_inline", "hop", "boom"]
        (nested,) = prof.children(runs[2])
        assert nested.key == key("call", "add_later", "worker1", "worker2")
        with pytest.raises(RpcError, match="no profile was started on worker1"):
            await rpc_async("worker1", stop_profile)


async def test_a_callee_may_record_within_the_recording_of_its_caller(agents):
    async def record_itself(x):
        with profile() as own:
            await rpc_async("worker2", add, (x,))
        return own

    async with agents(3):
        await rpc_async("worker1", start_profile)
        with profile() as prof:
            own = await rpc_async("worker1", record_itself, (1,))
        whole = await rpc_async("worker1", stop_profile)
        hop = key("call", "add", "worker1", "worker2")
        assert [each.key for each in own] == [hop, f"{hop}/add"]
        call, run, *rest = prof.events
        assert [each.key for each in rest] == [f"{call.key}/{each.key}" for each in own]
        assert [each.key for each in whole] == [hop, f"{hop}/add", run.name]


def test_what_is_too_much_is_counted():
    outer = Profile(limit=3)
    inner = Profile(within=outer, limit=1)
    for i in range(5):
        inner.add(Span("x", "scope", "w", i, i, inner.number()))
    assert (len(inner), inner.dropped, len(outer), outer.dropped) == (1, 4, 3, 2)
    assert "4 dropped" in repr(inner)


def test_a_recording_can_travel():
    prof = Profile()
    prof.add(Span("x", "scope", "w", 1.0, 2.0, 1, 0, "", {"bytes": 3}))
    copy = pickle.loads(pickle.dumps(prof))
    assert copy.events == prof.events
    assert isinstance(copy.events[0], Span)
    assert copy.events[0].seconds == 1.0


# ── tables and traces ────────────────────────────────────────────────────────────────────────────


def at(start, end, worker="a", key="f"):
    return Span(key, "run", worker, start, end)


def test_the_table_sums_up_by_key_and_worker():
    text = table([at(0, 1), at(1, 4), at(0, 2, "b"), at(0, 9, "b", "rpc_call#g(b -> a)")])
    head, _, *lines = text.splitlines()
    assert head.split() == ["key", "worker", "count", "total", "ms", "mean", "ms", "max", "ms"]
    assert [line.split()[-5:] for line in lines] == [
        ["b", "1", "9000.000", "9000.000", "9000.000"],
        ["a", "2", "4000.000", "2000.000", "3000.000"],
        ["b", "1", "2000.000", "2000.000", "2000.000"],
    ]
    assert lines[0].startswith("rpc_call#g(b -> a)")


def test_an_empty_recording_is_an_empty_table():
    assert len(table([]).splitlines()) == 2
    assert chrome_trace([])["traceEvents"] == []


def test_chrome_gets_one_process_per_worker_and_microseconds_from_the_start():
    spans = [at(5.0, 6.0, "b"), at(5.5, 5.75)._replace(error="ValueError", detail={"bytes": 8})]
    *names, first, second = chrome_trace(spans)["traceEvents"]
    assert {each["args"]["name"]: each["pid"] for each in names} == {"a": 0, "b": 1}
    assert (first["pid"], first["ts"], first["dur"]) == (1, 0.0, 1e6)
    assert (second["pid"], second["ts"], second["dur"]) == (0, 0.5e6, 0.25e6)
    assert second["args"] == {"bytes": 8, "error": "ValueError"}


def test_what_overlaps_without_nesting_gets_a_lane_of_its_own():
    spans = [at(0, 10), at(1, 5), at(4, 8), at(5, 6), at(11, 12)]
    assert [lane for _, lane in lanes(spans)] == [0, 0, 1, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10))))
def test_in_a_lane_spans_nest_or_follow_each_other(times):
    placed = lanes([at(start, start + length) for start, length in times])
    assert len(placed) == len(times)
    for i, (one, lane) in enumerate(placed):
        for other, same in placed[i + 1 :]:
            if lane == same:
                assert other.start >= one.end or other.end <= one.end
