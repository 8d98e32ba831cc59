"""Calls as users make them: rpc_async, rpc_sync, run_sync and groups."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import logging
import math
import threading
import time
import weakref
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from aiograd.errors import (
    DeadlineExceeded,
    Overloaded,
    RemoteError,
    SerializationError,
    UnknownWorker,
    WorkerClosed,
)
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import Group, inline, rpc_async, rpc_sync, run_sync
from aiograd.rpc.callee.functions import Target
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.future import CallInfo, Future
from aiograd.rpc.options import Options
from aiograd.wire.messages import CALL
from tests.support.waiting import until

NOTES: dict[str, Any] = {}  # where functions of these tests, all in one process, leave things


@pytest.fixture(autouse=True)
def no_notes():
    NOTES.clear()
    yield
    NOTES.clear()


def add(x, y=0):
    return x + y


async def add_later(x, y=0):
    await asyncio.sleep(0)
    return x + y


def nothing():
    return None


class Counter:
    def __init__(self, start=0):
        self.count = start

    def more(self, by=1):
        self.count += by
        return self.count

    async def more_later(self, by=1):
        return self.more(by)

    @classmethod
    def make(cls, start):
        return cls(start)

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    async def make_later(cls, start):
        return cls(start).count

    @staticmethod
    async def double_later(x):
        return 2 * x

    def __call__(self, x):
        return self.count + x


async def test_every_kind_of_callable_can_be_called(agents):
    async with agents(2):
        assert await rpc_async("worker1", min, (3, 1, 2)) == 1
        assert await rpc_async("worker1", add, (1,), {"y": 5}) == 6
        counter = await rpc_async("worker1", Counter, (7,))
        assert counter.count == 7
        assert await rpc_async("worker1", counter.more, (3,)) == 10
        assert counter.count == 7  # it was a copy
        assert (await rpc_async("worker1", Counter.make, (4,))).count == 4
        assert await rpc_async("worker1", Counter.double, (4,)) == 8
        assert await rpc_async("worker1", Counter(5), (4,)) == 9
        assert await rpc_async("worker1", functools.partial(add, y=9), (1,)) == 10
        first, second = (rpc_async("worker1", add, (i, 1)) for i in (1, 2))
        assert (await second, await first) == (3, 2)
        assert await rpc_async("worker1", nothing) is None


async def test_async_methods_and_callables_can_be_called(agents):
    async with agents(2):
        assert await rpc_async("worker1", Counter.double_later, (4,)) == 8
        assert await rpc_async("worker1", Counter.make_later, (4,)) == 4
        assert await rpc_async("worker1", Counter(1).more_later, (4,)) == 5
        assert await rpc_async("worker1", functools.partial(add_later, y=2), (1,)) == 3


async def test_a_call_to_oneself_copies_arguments(agents):
    async with agents(1) as (a,):
        array = np.zeros(3)

        def fill(x):
            x[:] = 1
            return x

        assert (await rpc_async(a, fill, (array,))).tolist() == [1, 1, 1]
        assert array.tolist() == [0, 0, 0]
        big = np.zeros(100_000)
        assert (await rpc_async("worker0", fill, (big,))).sum() == 100_000
        assert not big.any()


async def test_arrays_of_many_sizes_arrive(agents):
    async with agents(2):
        sizes = range(100)
        calls = [rpc_async("worker1", add, (np.ones((n, n)), 1)) for n in sizes]
        for n, result in zip(sizes, await asyncio.gather(*calls), strict=True):
            assert result.shape == (n, n)
            assert (result == 2).all()


async def test_noncontiguous_arrays_arrive_equal(agents):
    async with agents(2):
        array = np.arange(20_000.0).reshape(100, 200)[::2, ::3]
        assert (await rpc_async("worker1", add, (array, 1)) == array + 1).all()


Pair = namedtuple("Pair", "a b")


async def test_arrays_shared_inside_containers_stay_shared(agents):
    async with agents(2):
        array = np.arange(4)
        value = {"list": [array, array], "pair": Pair(array, 1), 3: {"x": (array,)}}
        back = await rpc_async("worker1", add_nothing, (value,))
        assert back["list"][0] is back["list"][1] is back["pair"].a
        assert isinstance(back["pair"], Pair)


def add_nothing(x):
    return x


async def test_arguments_are_taken_when_the_call_is_made(agents):
    async with agents(2):
        values = [1, 2]
        future = rpc_async("worker1", sum, (values,))
        values.append(100)
        assert await future == 3


async def test_calls_nest_across_workers(agents):
    async with agents(2):
        assert await rpc_async("worker1", call_back_sync, ("worker0", 5)) == 6
        assert await rpc_async("worker1", call_back_async, ("worker0", 5)) == 6


def call_back_sync(to, x):
    assert current_agent().name == "worker1"
    return rpc_sync(to, add, (x, 1))


async def call_back_async(to, x):
    return await rpc_async(to, add_later, (x, 1))


async def test_nested_blocking_calls_never_starve(agents):
    async with agents(2, options=Options(threads=1)):
        assert await rpc_async("worker1", ping_pong, (40,)) == 40


def ping_pong(depth):
    me = current_agent().rank
    return 0 if depth == 0 else 1 + rpc_sync(1 - me, ping_pong, (depth - 1,))


async def test_coroutines_chain_and_fan_out_over_workers(agents):
    async with agents(3):
        assert await rpc_async("worker1", chain, (20, 5)) == 25
        assert await rpc_async("worker1", fan_out, (20,)) == sum(range(20)) + 20


async def chain(steps, x):
    for i in range(steps):
        x = await rpc_async(f"worker{i % 3}", add_later, (x, 1))
    return x


async def fan_out(count):
    return sum(
        await asyncio.gather(*(rpc_async("worker2", add_later, (i, 1)) for i in range(count)))
    )


async def test_a_thousand_calls_return_their_own_results(agents):
    async with agents(3):
        calls = [rpc_async(f"worker{i % 3}", add, (i, 1)) for i in range(1000)]
        assert await asyncio.gather(*calls) == [i + 1 for i in range(1000)]


async def test_a_service_knows_the_sender_of_a_request(agents):
    async with agents(3) as (_, b, c):
        b.services["who"] = c.services["who"] = lambda sender: (sender.name, sender.rank)
        assert await b.request("worker2", "who") == ("worker1", 1)
        assert await c.request("worker1", "who") == ("worker2", 2)


async def test_worker_info_survives_a_call(agents):
    async with agents(2):
        info = WorkerInfo("worker1", 1)
        assert await rpc_async(info, add_nothing, (info,)) == info


async def test_where_code_runs(agents):
    async with agents(2) as (a, _):

        def thread():
            return threading.get_ident()

        async def thread_of_task():
            return threading.get_ident()

        inlined = inline(lambda: threading.get_ident())
        assert await rpc_async("worker1", thread) != a.thread
        assert await rpc_async("worker1", thread_of_task) == a.thread
        assert await rpc_async("worker1", inlined) == a.thread


async def test_inside_a_function_the_callee_is_current(agents):
    async with agents(2):
        names = [await rpc_async("worker1", f) for f in (name_now, name_later, inline(name_now))]
        assert names == ["worker1"] * 3
        del name_now.__aiograd_inline__


def name_now():
    return current_agent().name


async def name_later():
    await asyncio.sleep(0)
    return current_agent().name


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


async def test_a_function_does_not_see_the_callers_variables(agents):
    async with agents(2):
        VARIABLE.set("mine")
        assert await rpc_async("worker1", variable_now) == "none"
        assert await rpc_async("worker1", variable_inline) == "none"


def variable_now():
    return VARIABLE.get()


@inline
def variable_inline():
    return VARIABLE.get()


async def test_a_call_without_a_worker_is_refused():
    with pytest.raises(WorkerClosed):
        rpc_async("worker1", add)


async def test_what_is_known_before_sending_is_raised_by_the_call(agents):
    async with agents(2):
        with pytest.raises(UnknownWorker):
            rpc_async("nobody", add)
        with pytest.raises(TypeError):
            rpc_async(3.5j, add)
        with pytest.raises(TypeError):
            rpc_async("worker1", "not a function")
        with pytest.raises(SerializationError) as caught:
            rpc_async("worker1", add, ({"x": threading.Lock()},))
        assert caught.value.path == "args[0]['x']"
        with pytest.raises(TypeError, match="args"):
            rpc_async("worker1", add, 5)
        for timeout, error in ((0, ValueError), (-1, ValueError), ("1", TypeError)):
            with pytest.raises(error, match="timeout"):
                rpc_async("worker1", add, timeout=timeout)


async def test_results_that_cannot_travel_are_named(agents):
    async with agents(2):
        with pytest.raises(SerializationError) as caught:
            await rpc_async("worker1", lambda: [1, threading.Lock()])
        assert (caught.value.path, caught.value.worker) == ("result[1]", "worker1")
        assert await rpc_async("worker1", add, (1, 2)) == 3


# ── time ────────────────────────────────────────────────────────────────────────────────────────


async def wait_forever():
    NOTES["started"].set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        NOTES["cancelled"].set()
        raise


@pytest.fixture
def events():
    NOTES.update(started=asyncio.Event(), cancelled=asyncio.Event())
    return NOTES


async def test_a_call_may_have_its_own_timeout(agents, events):
    async with agents(2, options=Options(timeout=0.05)):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            await rpc_async("worker1", wait_forever, timeout=0.1)
        assert 0.1 <= time.monotonic() - start < 0.35
        assert caught.value.worker == "worker1"
        assert caught.value.function == "wait_forever"
        assert await rpc_async("worker1", asyncio.sleep, (0.2, "late"), timeout=5) == "late"
        assert await rpc_async("worker1", asyncio.sleep, (0.2, "late"), timeout=math.inf) == "late"
        await events["cancelled"].wait()


async def test_a_call_without_a_timeout_has_that_of_the_options(agents, events):
    async with agents(2, options=Options(timeout=0.001)):
        slow = [rpc_async("worker1", asyncio.sleep, (5,)) for _ in range(10)]
        for each in await asyncio.gather(*slow, return_exceptions=True):
            assert isinstance(each, DeadlineExceeded)


async def test_a_nested_call_inherits_what_is_left(agents):
    async with agents(3, options=Options(timeout=30)):
        left = await rpc_async("worker1", budget_of_nested, ("worker2",), timeout=2.0)
        assert 1.0 < left <= 2.0
        longer = await rpc_async("worker1", budget_of_nested, ("worker2", 50.0), timeout=2.0)
        assert 1.0 < longer <= 2.0
        shorter = await rpc_async("worker1", budget_of_nested, ("worker2", 0.5), timeout=2.0)
        assert 0.1 < shorter <= 0.5


def budget_of_nested(to, timeout=None):
    return rpc_sync(to, budget, timeout=timeout)


async def budget():
    from aiograd.rpc.scope import inherited_deadline

    return inherited_deadline() - asyncio.get_running_loop().time()


async def test_a_spent_budget_cancels_the_coroutine_recursively(agents, events):
    async with agents(4):
        with pytest.raises(DeadlineExceeded):
            await rpc_async("worker1", relay, (["worker2", "worker3"],), timeout=0.2)
        async with asyncio.timeout(0.5):
            await events["cancelled"].wait()


async def relay(names):
    if not names:
        return await wait_forever()
    return await rpc_async(names[0], relay, (names[1:],))


async def test_a_call_that_arrives_without_budget_is_not_run(agents):
    async with agents(2) as (a, b):
        b.loop.call_soon(time.sleep, 0.1)
        from aiograd.rpc.callee.functions import Shipment
        from aiograd.wire.codec import Payload
        from aiograd.wire.fastcodec import encode_call
        from aiograd.wire.framing import Frame
        from aiograd.wire.messages import CALL, FAST

        link = a.link("worker1")
        future = Future(loop=a.loop)
        future.info = CallInfo()
        shipment: Shipment = a.shipper.of(mark_run, link.peer)
        data = encode_call((), None)
        assert data is not None
        link.caller.pending[99] = future
        future.info.caller = link.caller
        link.send(Frame(CALL, FAST, 99, -0.5, link.number(shipment), Payload(data)), "call")
        with pytest.raises(DeadlineExceeded):
            await future
        assert "ran" not in NOTES


def mark_run():
    NOTES["ran"] = True


# ── cancellation ────────────────────────────────────────────────────────────────────────────────


async def test_a_cancel_is_seen_at_depth_four(agents, events):
    async with agents(5) as everyone:
        future = rpc_async("worker1", relay, (["worker2", "worker3", "worker4"],))
        await events["started"].wait()
        start = time.monotonic()
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        await events["cancelled"].wait()
        assert time.monotonic() - start < 0.5
        await until(lambda: not any(any(a.links.counters().values()) for a in everyone))
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_cancelling_the_awaiting_task_cancels_the_call(agents, events):
    async with agents(2):

        async def wait():
            await rpc_async("worker1", wait_forever)

        task = asyncio.create_task(wait())
        await events["started"].wait()
        task.cancel()
        await events["cancelled"].wait()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_thread_that_was_given_up_counts_until_it_returns(agents):
    async with agents(2) as (_, b):
        NOTES.update(go=threading.Event(), running=threading.Event())
        future = rpc_async("worker1", blocked)
        await asyncio.to_thread(NOTES["running"].wait)
        future.cancel()
        await until(lambda: b.links.counters()["abandoned_calls"])
        assert b.links.counters()["running_calls"] == 0
        NOTES["go"].set()
        await until(lambda: not b.links.counters()["abandoned_calls"])


def blocked():
    NOTES["running"].set()
    NOTES["go"].wait()


async def test_futures_work_with_asyncio(agents, events):
    async with agents(2):
        done, pending = await asyncio.wait({rpc_async("worker1", add, (1, 2))})
        assert {f.result() for f in done} == {3}
        assert not pending
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await rpc_async("worker1", wait_forever)
        await events["cancelled"].wait()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_await(rpc_async("worker1", add, (2, 2))))
        assert task.result() == 4


async def _await(future):
    return await future


# ── futures ─────────────────────────────────────────────────────────────────────────────────────


def boom(text="boom"):
    raise ValueError(text)


async def test_a_future_can_be_awaited_twice(agents):
    async with agents(2):
        good, bad = rpc_async("worker1", add, (1, 2)), rpc_async("worker1", boom)
        assert [await good, await good] == [3, 3]
        for _ in range(2):
            with pytest.raises(ValueError, match="boom"):
                await bad
        for future in [rpc_async("worker1", boom) for _ in range(20)]:
            with pytest.raises(ValueError, match="boom"):
                await future


async def test_callbacks_of_a_future_run_in_order(agents):
    async with agents(2):
        called: list[Any] = []
        future = rpc_async("worker1", add, (1, 2))
        future.add_done_callback(lambda f: called.append(("first", f.result())))
        future.add_done_callback(lambda f: called.append(("second", f.result())))
        await future
        await asyncio.sleep(0)
        assert called == [("first", 3), ("second", 3)]


async def test_a_future_knows_whether_it_is_done(agents):
    async with agents(2):
        good, bad = rpc_async("worker1", add, (1, 2)), rpc_async("worker1", boom)
        assert not good.done()
        await asyncio.wait([good, bad])
        assert good.done()
        assert bad.done()
        assert isinstance(bad.exception(), ValueError)


async def test_a_future_cannot_be_set_twice(agents):
    async with agents(2):
        future = rpc_async("worker1", add, (1, 2))
        await future
        with pytest.raises(asyncio.InvalidStateError):
            future.set_result(4)


async def test_a_future_cannot_be_pickled(agents):
    async with agents(2):
        future = rpc_async("worker1", add, (1, 2))
        with pytest.raises(SerializationError) as caught:
            rpc_async("worker1", add, ([future],))
        assert caught.value.path == "args[0][0]"
        await future


async def test_a_failure_nobody_awaited_is_logged_with_its_line(agents, caplog):
    async with agents(2):
        future = rpc_async("worker1", boom)
        line = boom.__code__  # the line above is what must be named
        assert line is not None
        await asyncio.wait([future])
        with caplog.at_level(logging.ERROR, "aiograd"):
            del future
            gc.collect()
        (record,) = [r for r in caplog.records if "nobody awaited" in r.getMessage()]
        assert "test_api.py:" in record.getMessage()
        assert "boom" in record.getMessage()
        # The callee shows it nowhere.
        assert "raised by boom() on worker1:\nTraceback" in record.getMessage()


async def test_a_call_that_a_shutdown_ends_is_not_said_to_have_failed(agents, caplog):
    async with agents(2):
        future = rpc_async("worker1", wait_forever)
    with caplog.at_level(logging.ERROR, "aiograd"):
        await asyncio.wait([future])
        del future
        gc.collect()
    (record,) = [r for r in caplog.records if "wait_forever" in r.getMessage()]
    assert "was not awaited (called at " in record.getMessage()
    assert record.getMessage().endswith("and has ended: worker0 was shut down")


async def test_a_future_of_ones_own_can_be_cancelled_and_can_fail(caplog):
    future: Future[int] = Future()
    assert future.cancel()
    assert future.cancelled()
    future = Future()
    future.set_exception(ValueError("mine"))
    with caplog.at_level(logging.ERROR, "aiograd"):
        del future
        gc.collect()
    (record,) = [r for r in caplog.records if "nobody awaited" in r.getMessage()]
    assert "mine" in record.getMessage()


async def test_gather_ends_with_the_first_failure(agents, events):
    async with agents(2):
        calls = [rpc_async("worker1", f) for f in (wait_forever, boom, boom)]
        with pytest.raises(ValueError, match="boom"):
            await asyncio.gather(*calls)
        calls[0].cancel()
        await asyncio.wait(calls)
        assert isinstance(calls[2].exception(), ValueError)
        await events["cancelled"].wait()


# ── threads ─────────────────────────────────────────────────────────────────────────────────────


async def test_blocking_calls_are_refused_on_a_loop(agents):
    async with agents(2):
        with pytest.raises(RuntimeError, match=r"await ag\.rpc_async"):
            rpc_sync("worker1", add, (1, 2))
        with pytest.raises(RuntimeError, match="await"):
            run_sync(add_later(1, 2))


async def test_other_threads_can_call(agents):
    async with agents(2):

        def work():
            future = rpc_async("worker1", add, (1, 2))
            return (
                rpc_sync("worker1", add, (3, 4)),
                run_sync(future),
                run_sync(add_later(5, 6)),
                rpc_sync("worker1", add, (np.ones(50_000), 1)).sum(),
            )

        assert await asyncio.to_thread(work) == (7, 3, 11, 100_000)


async def test_errors_reach_the_thread_that_waits(agents):
    async with agents(2):

        def work():
            with pytest.raises(ValueError, match="boom"):
                rpc_sync("worker1", boom)
            with pytest.raises(DeadlineExceeded):
                rpc_sync("worker1", asyncio.sleep, (9,), timeout=0.05)
            with pytest.raises(UnknownWorker):
                rpc_sync("nobody", add)
            with pytest.raises(ZeroDivisionError):
                run_sync(divide())

        await asyncio.to_thread(work)


async def divide():
    return 1 / 0


async def test_run_sync_runs_in_the_callers_context(agents):
    async with agents(2):

        async def look():
            return VARIABLE.get()

        def work():
            VARIABLE.set("in thread")
            return run_sync(look())

        assert await asyncio.to_thread(work) == "in thread"


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_the_first_call_of_all_may_come_from_a_thread(agents, to):
    async with agents(2):
        asyncio.get_running_loop().set_debug(True)  # complains of timers made in other threads
        calls = [asyncio.to_thread(rpc_sync, to, abs, (-i,)) for i in range(8)]
        assert await asyncio.gather(*calls) == list(range(8))


async def test_a_thread_that_waits_is_told_of_the_end(agents, events):
    async with agents(2) as (a, _):
        waiting = asyncio.create_task(asyncio.to_thread(rpc_sync, "worker1", wait_forever))
        await events["started"].wait()
        await a.close()
        with pytest.raises(WorkerClosed):
            await waiting


# ── limits ──────────────────────────────────────────────────────────────────────────────────────


async def test_calls_beyond_the_limit_wait_their_turn(agents):
    async with agents(2, options=Options(max_inflight=3)) as (a, b):
        NOTES.update(go=asyncio.Event(), most=0, now=0)
        calls = [rpc_async("worker1", count_running) for _ in range(10)]
        while NOTES["now"] < 3:
            await asyncio.sleep(0)
        assert b.links.counters()["running_calls"] == 3
        assert a.links.counters()["pending_calls"] == 10
        NOTES["go"].set()
        await asyncio.gather(*calls)
        assert NOTES["most"] == 3


async def count_running():
    NOTES["now"] += 1
    NOTES["most"] = max(NOTES["most"], NOTES["now"])
    await NOTES["go"].wait()
    NOTES["now"] -= 1


async def test_a_call_that_never_got_its_turn_is_overloaded(agents, events):
    async with agents(2, options=Options(max_inflight=1)):
        first = rpc_async("worker1", wait_forever)
        with pytest.raises(Overloaded):
            await rpc_async("worker1", add, (1, 2), timeout=0.05)
        first.cancel()
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_a_message_over_the_limit_is_refused_here(agents):
    async with agents(2, options=Options(max_message=1 << 20)):
        with pytest.raises(SerializationError, match="max_message"):
            rpc_async("worker1", add, (np.zeros(1 << 18),))
        with pytest.raises(SerializationError, match="max_message"):
            await rpc_async("worker1", lambda: np.zeros(1 << 18))
        assert await rpc_async("worker1", add, (1, 2)) == 3


LARGE = 2_000_000  # of whatever, where a million bytes are the limit


def make_text():
    return "x" * LARGE


async def make_text_later():
    return "x" * LARGE


def raise_text():
    raise ValueError("x" * LARGE)


@pytest.mark.parametrize("args", [(b"x" * LARGE, b""), ("x" * LARGE, ""), (("x" * LARGE,), ())])
async def test_plain_arguments_over_the_limit_are_refused_here(agents, args):
    async with agents(2, options=Options(max_message=1 << 20)):
        for known in (False, True):
            with pytest.raises(SerializationError, match="max_message"):
                rpc_async("worker1", add, args)
            with pytest.raises(SerializationError, match="max_message"):
                rpc_async("worker1", add, args[1:], {"y": args[0]})
            assert await rpc_async("worker1", add, (1, 2)) == 3, known


@pytest.mark.parametrize("function", [make_text, make_text_later, inline(lambda: "x" * LARGE)])
async def test_plain_results_over_the_limit_are_refused_there(agents, function):
    async with agents(2, options=Options(max_message=1 << 20)):
        with pytest.raises(SerializationError, match="max_message") as caught:
            await rpc_async("worker1", function)
        assert caught.value.worker == "worker1"
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_an_error_over_the_limit_arrives_without_its_text(agents):
    async with agents(2, options=Options(max_message=1 << 20)):
        with pytest.raises(RemoteError, match="max_message") as caught:
            await rpc_async("worker1", raise_text)
        assert caught.value.type_name == "ValueError"
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_a_request_over_the_limit_is_refused_here(agents):
    async with agents(2, options=Options(max_message=1 << 20)) as (a, b):
        b.services["take"] = lambda sender, value: len(value)
        for value in ("x" * LARGE, ["x" * LARGE]):
            with pytest.raises(SerializationError, match="max_message"):
                a.request("worker1", "take", value)
            with pytest.raises(SerializationError, match="max_message"):
                a.post("worker1", "take", value)
        assert await a.request("worker1", "take", "x") == 1


@pytest.mark.parametrize("size", [1_000, 5_000, 8_191])
async def test_arrays_below_64_kib_are_taken_as_they_are_when_the_call_is_made(agents, size):
    async with agents(2):
        await rpc_async("worker1", add, (1, 2))
        x = np.zeros(size)
        answer = rpc_async("worker1", add, (x,))
        x[:] = 1
        assert not (await answer).any()


async def test_a_call_cancelled_by_the_thread_that_has_just_made_it_does_not_run(agents, events):
    async with agents(2) as (a, b):
        rpc_async("worker1", wait_forever).cancel()  # its function is known there now
        await rpc_async("worker1", add, (1, 2))

        def make_and_cancel():
            for _ in range(20):
                assert rpc_async("worker1", wait_forever).cancel()

        await asyncio.to_thread(make_and_cancel)
        await rpc_async("worker1", add, (1, 2))
        await until(lambda: not any(each.links.counters()["running_calls"] for each in (a, b)))
        assert not a.links.counters()["pending_calls"]


async def test_a_message_over_the_memory_budget_is_overloaded(agents):
    async with agents(2) as (a, b):
        b.budget.reserve(b.options.inbound_budget - 1000)
        with pytest.raises(Overloaded):
            await rpc_async("worker1", add, (np.zeros(1 << 18), 1))
        b.budget.release(b.options.inbound_budget - 1000)
        assert (await rpc_async("worker1", add, (np.zeros(1 << 18), 1))).sum() == 1 << 18
        a.budget.reserve(a.options.inbound_budget - 1000)
        with pytest.raises(Overloaded):
            await rpc_async("worker1", np.zeros, (1 << 18,))
        a.budget.release(a.options.inbound_budget - 1000)


# ── groups ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_group_calls_everyone_and_maps_in_order(agents):
    async with agents(3):
        group = Group(["worker0", 1, "worker2"])
        assert await group.call(name_now) == ["worker0", "worker1", "worker2"]
        assert await group.map(add, range(10)) == list(range(10))
        assert await group.map(add, []) == []


async def test_a_group_raises_the_first_error_and_cancels_the_rest(agents, events):
    async with agents(3) as everyone:
        with pytest.raises(ValueError, match="boom"):
            await Group(["worker1", "worker2"]).map(boom_or_wait, [True, False])
        await until(lambda: not any(a.links.counters()["pending_calls"] for a in everyone))


async def boom_or_wait(fail):
    if fail:
        await NOTES["started"].wait()
        raise ValueError("boom")
    await wait_forever()


async def test_a_group_can_return_errors(agents):
    async with agents(3):
        one, two = await Group([1, 2]).within(return_exceptions=True).call(boom)
        assert isinstance(one, ValueError)
        assert isinstance(two, ValueError)
        with pytest.raises(UnknownWorker):
            Group([1, "nobody"]).call(add, 1)
        with pytest.raises(TypeError, match="several names"):
            Group("worker1")


async def test_a_group_within_seconds_limits_every_call_and_leaves_the_group_alone(agents, events):
    async with agents(3) as everyone:
        group = Group([1, 2])
        with pytest.raises(DeadlineExceeded):
            await group.within(0.05).call(wait_forever)
        late = await group.within(0.05).within(return_exceptions=True).call(wait_forever)
        assert [type(error) for error in late] == [DeadlineExceeded] * len(late)
        late = await group.within(0.05, return_exceptions=True).map(boom_or_wait, [False, False])
        assert [type(error) for error in late] == [DeadlineExceeded] * 2
        assert await group.call(name_now) == ["worker1", "worker2"]
        with pytest.raises(ValueError, match="timeout"):
            group.within(0)
        await until(lambda: not any(a.links.counters()["pending_calls"] for a in everyone))


def keywords(**given):
    return given


async def test_every_keyword_of_a_group_call_belongs_to_the_function(agents):
    async with agents(2):
        given = {"timeout": 3, "return_exceptions": True, "func": 1}
        assert await Group([1]).call(keywords, **given) == [given]


class Argument:
    """Something whose end can be seen."""


async def take(argument):
    raise AssertionError("it was cancelled before its first step")


async def test_a_call_cancelled_before_its_first_step_lets_go_of_its_arguments(agents):
    async with agents(2) as (_, b):
        callee = b.link("worker0").callee
        target = Target(take, "take")
        invocation = Invocation(CALL, 0, 1, 10.0, target, None)
        invocation.args, invocation.context = (Argument(),), contextvars.Context()
        seen = weakref.ref(invocation.args[0])
        callee.execution.start(invocation)
        task = invocation.task
        del invocation
        callee.cancel(1)
        await asyncio.wait([task])
        assert seen() is None
        assert task.cancelled()
