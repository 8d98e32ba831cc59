"""Bars of called functions are shown at the caller; results come as they are ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiograd._progress import DISPLAY
from aiograd.errors import ProtocolError
from aiograd.rpc.api import rpc_async, rpc_stream, rpc_sync
from aiograd.rpc.progress import LONGEST, MOST, Reports, as_completed, attach, progress
from tests.support.waiting import until

GATE = threading.Event()


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    GATE.clear()
    yield
    GATE.set()
    assert DISPLAY.line() == ""


@pytest.fixture
def workers(agents: Any) -> Any:
    @asynccontextmanager
    async def made(count: int) -> AsyncIterator[Any]:
        async with agents(count) as everyone:
            parts = [attach(agent) for agent in everyone]
            try:
                yield everyone
            finally:
                for part in parts:
                    part.close()

    return made


def load(n: int, title: str = "loading") -> int:
    for i in progress(range(n), title):
        if i == n - 1:
            GATE.wait(20)
    return n


async def load_async(n: int) -> int:
    for i in progress(range(n), "loading"):
        while i == n - 1 and not GATE.is_set():
            await asyncio.sleep(0.01)
    return n


async def pass_on(n: int) -> int:
    return await rpc_async("worker2", load, args=(n,))


def pass_on_sync(n: int) -> Any:
    return rpc_sync("worker2", load, args=(n,))


@pytest.mark.parametrize("function", [load, load_async, pass_on, pass_on_sync])
async def test_the_bar_of_a_called_function_is_shown_at_the_first_caller(workers, function):
    async with workers(3) as (a, b, c):
        call = rpc_async("worker1", function, args=(5,))
        await until(lambda: "4/5" in DISPLAY.line())
        assert DISPLAY.line().startswith("loading ")
        assert DISPLAY.line().count("loading") == 1
        GATE.set()
        assert await call == 5
        await until(lambda: DISPLAY.line() == "")
        for agent in (a, b, c):
            part = Reports.of(agent)
            assert part is not None
            await until(lambda part=part: part.counters() == {"progress_bars": 0})


async def test_several_workers_with_one_title_have_one_bar(workers):
    async with workers(3):
        calls = [rpc_async(f"worker{i}", load, args=(4,)) for i in (1, 2)]
        await until(lambda: "6/8" in DISPLAY.line())
        assert DISPLAY.line().count("loading") == 1
        GATE.set()
        await asyncio.gather(*calls)


async def test_short_work_sends_nothing(workers):
    async with workers(2) as (a, b):
        GATE.set()
        sent = []
        b.services["progress"] = a.services["progress"] = lambda *message: sent.append(message)
        for _ in range(5):
            await rpc_async("worker1", load, args=(100,))
        assert sent == []


async def numbers(n: int) -> AsyncIterator[int]:
    for i in progress(range(n), "streaming"):
        yield i


async def test_a_stream_has_a_bar_until_it_is_left(workers):
    async with workers(2):
        stream = rpc_stream("worker1", numbers, args=(1000,))
        assert await anext(stream) == 0
        await until(lambda: "/1000" in DISPLAY.line())
        await stream.aclose()
        await until(lambda: DISPLAY.line() == "")


async def test_a_cancelled_call_and_a_lost_worker_take_their_bars_along(workers):
    async with workers(3) as (_, _b, c):
        call = rpc_async("worker1", load, args=(3,))
        other = rpc_async("worker2", load, args=(3, "other"))
        stream = rpc_stream("worker2", numbers, args=(1000,))
        await anext(stream)
        await until(lambda: all(title in DISPLAY.line() for title in ("load", "other", "stream")))
        call.cancel()
        await until(lambda: "loading" not in DISPLAY.line())
        GATE.set()
        await c.close()
        await until(lambda: DISPLAY.line() == "")
        with pytest.raises(ConnectionError):
            await other


async def test_titles_of_others_cannot_move_the_cursor(workers):
    async with workers(2):
        call = rpc_async("worker1", load, args=(3, "\x1b[2J\rred" + "x" * 200))
        await until(lambda: "2/3" in DISPLAY.line())
        title = DISPLAY.line().split()[0]
        assert title.startswith("[2Jred")
        assert len(title) <= LONGEST
        GATE.set()
        await call


@pytest.mark.parametrize(
    "entries",
    [5, [5], [(1, 2, 3)], [(1, 1, 5, 1, 1)], [(1, 1, "t", "1", 1)], [(1, 1, "t", 1 << 70, 1)]],
)
async def test_malformed_messages_are_refused(workers, entries):
    async with workers(2) as (a, b):
        with pytest.raises(ProtocolError, match="malformed"):
            Reports.of(a).received(b.info, entries)


async def test_bars_of_calls_that_are_not_ours_and_too_many_bars_are_not_shown(workers):
    async with workers(2) as (a, b):
        call = rpc_async("worker1", asyncio.sleep, args=(60,))
        await until(lambda: b.links.counters()["running_calls"] == 1)
        number = call.info.id
        Reports.of(a).received(b.info, [(number + 1, 1, "none", 1, 2)])
        assert DISPLAY.line() == ""
        Reports.of(a).received(b.info, [(number, i, "many", 1, 2) for i in range(MOST + 9)])
        assert f"{MOST}/{2 * MOST}" in DISPLAY.line()
        call.cancel()
        await until(lambda: DISPLAY.line() == "")


async def test_a_peer_that_shows_and_ends_bars_on_and_on_occupies_nothing(workers, monkeypatch):
    async with workers(2) as (a, b):
        call = rpc_async("worker1", asyncio.sleep, args=(60,))
        await until(lambda: b.links.counters()["running_calls"] == 1)
        added = []
        real = type(call).add_done_callback

        def counted(*args: Any, **other: Any) -> Any:
            added.append(args)
            return real(*args, **other)

        monkeypatch.setattr(type(call), "add_done_callback", counted)
        number = call.info.id
        Reports.of(a).received(b.info, [(number, 1, "x", 1, 2), (number, 1, "", -1, None)] * 500)
        assert len(added) <= 1
        assert Reports.of(a).counters() == {"progress_bars": 0}
        Reports.of(a).received(b.info, [(number, 1, "y", 1, 2)])
        assert "y" in DISPLAY.line()
        call.cancel()
        await until(lambda: DISPLAY.line() == "")
        assert not Reports.of(a)._shown


async def test_the_title_of_a_bar_that_passes_through_is_kept_short(workers):
    async with workers(2) as (a, b):
        call = rpc_async("worker1", asyncio.sleep, args=(60,))
        await until(lambda: b.links.counters()["running_calls"] == 1)
        reports, kept = Reports.of(a), []
        reports._show = lambda key, parent, state: kept.append(state)  # type: ignore[method-assign]
        reports.received(b.info, [(call.info.id, 1, "x" * 1_000_000, 1, 2)])
        assert kept == [("x" * LONGEST, 1, 2)]
        call.cancel()


def test_outside_of_calls_the_bar_is_shown_here():
    lines = [DISPLAY.line() for _ in progress([1, 2], "here")]
    assert [line.split()[-1] for line in lines] == ["0/2", "1/2"]
    assert list(progress(iter("abc"), total=3)) == ["a", "b", "c"]


async def test_asynchronous_iterables_are_read_too(workers):
    async with workers(2):
        bar = progress(rpc_stream("worker1", numbers, args=(3,)), "reading")
        assert [item async for item in bar] == [0, 1, 2]


async def after(seconds: float, value: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


async def test_results_come_in_the_order_in_which_they_are_ready(workers):
    async with workers(2):
        calls = [rpc_async("worker1", after, args=(0.05 * n, n)) for n in (3, 1, 2)]
        found = []
        async for value in as_completed(calls, progress="waiting"):
            found.append(value)
            assert ("waiting" in DISPLAY.line()) == (len(found) < 3)
        assert found == [1, 2, 3]
        assert [await each for each in as_completed([after(0, 1), after(0.02, 2)])] == [1, 2]
        assert [value async for value in as_completed([])] == []


async def test_a_failed_call_raises_at_its_turn_and_the_others_go_on(workers):
    async with workers(2):
        work = [(0.0, 1), (0.03, ValueError("two")), (0.06, 3)]
        results = as_completed([rpc_async("worker1", after, args=each) for each in work])
        assert await anext(results) == 1
        with pytest.raises(ValueError, match="two"):
            await anext(results)
        assert await anext(results) == 3
        with pytest.raises(StopAsyncIteration):
            await anext(results)
