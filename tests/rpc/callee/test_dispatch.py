"""Calls that have come and do not run yet: their caller reads no answers, or an argument waits."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiograd.rpc.api import inline, rpc_async
from aiograd.rpc.options import Options
from tests.support.waiting import until

RAN: list[Any] = []


def add(x, y=0):
    return x + y


def note(x):
    RAN.append(x)
    return x


async def note_later(x):
    RAN.append(x)


async def test_a_call_cancelled_while_the_caller_reads_no_answers_never_runs(agents):
    RAN.clear()
    async with agents(2, options=Options(outbound_buffer=1 << 20)) as (_, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = b.link("worker0")
        link.outbox.pause()
        answers = [rpc_async("worker1", bytes, (400_000,)) for _ in range(6)]
        await until(lambda: link.outbox.over(1 << 20))
        held = link.callee.held
        before = len(held)
        call, other = (rpc_async("worker1", note_later, (i,)) for i in range(2))
        await until(lambda: len(held) == before + 2)
        call.cancel()
        last = rpc_async("worker1", add, (1, 2))
        await until(lambda: len(held) == before + 3)
        link.outbox.resume()
        await asyncio.gather(*answers, other, last)
        assert RAN == [1]


async def test_large_results_wait_for_a_slow_reader(agents, tmp_path):
    options = Options(outbound_buffer=1 << 20)
    async with agents(2, options=options, address=f"unix:{tmp_path}/{{}}".format) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        a.link("worker1").connection.transport.pause_reading()
        calls = [rpc_async("worker1", make_large, (i,)) for i in range(3)]
        await until(lambda: len(MADE) == 3)
        calls += [rpc_async("worker1", make_large, (i,)) for i in range(3, 20)]
        await until(lambda: len(MADE) + b.limits["outbound_buffer"] >= 20)  # all have come
        assert len(MADE) == 3  # the rest is held back while results wait
        a.link("worker1").connection.transport.resume_reading()
        for result in await asyncio.gather(*calls):
            assert result.size == 1 << 20
        assert len(MADE) == 20
        MADE.clear()


MADE: list[int] = []


async def make_large(i):
    MADE.append(i)
    return np.zeros(1 << 20)


async def test_functions_wait_for_what_their_arguments_wait_for(agents):
    class Later:
        pass

    class Traveller:
        tag = "later"

        def depart(self, value, departure):
            return None

        def arrive(self, data, arrival):
            gate = asyncio.get_running_loop().create_future()
            arrival.waits.append(gate)
            gates.append(gate)
            return "arrived"

    gates: list[Any] = []
    async with agents(2) as (a, b):
        for agent in (a, b):
            agent.travellers.add(Later, Traveller())
        RAN.clear()
        call = rpc_async("worker1", note, (Later(),))
        await until(lambda: gates)
        assert RAN == []
        gates[0].set_result(None)
        assert await call == "arrived"
        call = rpc_async("worker1", note, (Later(),))
        await until(lambda: len(gates) == 2)
        gates[1].set_exception(ValueError("lost on the way"))
        with pytest.raises(ValueError, match="lost on the way"):
            await call
        assert len(RAN) == 1


@inline
def out_of_memory(x):
    raise MemoryError(f"no memory for {x}")


async def test_a_memory_error_of_a_function_arrives_as_itself_from_a_batch_too(agents):
    async with agents(2):
        for count in (1, 3):
            calls = [rpc_async("worker1", out_of_memory, (x,)) for x in range(count)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(each) for each in outcomes] == [MemoryError] * count
            assert str(outcomes[-1]) == f"no memory for {count - 1}"


async def test_memory_that_is_missing_for_one_call_of_a_batch_fails_only_that_one(
    agents, monkeypatch
):
    async with agents(2) as (_, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        execution = b.link("worker0").callee.execution
        start, started = execution.start, []

        def scarce(invocation):
            started.append(invocation.id)
            if len(started) == 2:
                raise MemoryError("the system has none")
            start(invocation)

        monkeypatch.setattr(execution, "start", scarce)
        calls = [rpc_async("worker1", add, (x,)) for x in range(4)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [each for each in outcomes if isinstance(each, int)] == [0, 2, 3]
        assert isinstance(outcomes[1], MemoryError)
        assert b.limits["allocation"] == 1
