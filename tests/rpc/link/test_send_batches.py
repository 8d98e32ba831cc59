"""Many calls of one function at once, whose messages share frames."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded, Overloaded, WorkerLost
from aiograd.rpc.api import inline
from aiograd.rpc.options import Options


def plain(x, y):
    return x + y


async def later(x, y):
    await asyncio.sleep(0)
    return x + y


@inline
def at_once(x, y):
    return x + y


@inline
def picky(x):
    if x % 3 == 0:
        raise ValueError(x)
    if x % 3 == 1:
        return [x]  # too much for a row
    return x


async def sized(x):
    return x.nbytes


async def large(size):
    return np.zeros(size, np.uint8)


async def for_ever(x):
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("func", [plain, later, at_once])
async def test_every_call_gets_its_own_answer(agents, func):
    async with agents(2) as (a, _):
        await a.call("worker1", func, (0, 0))  # from now on it is known over there
        futures = [a.call("worker1", func, (i, 1)) for i in range(300)]
        assert await asyncio.gather(*futures) == [i + 1 for i in range(300)]


async def test_one_that_fails_does_not_concern_its_neighbours(agents):
    async with agents(2) as (a, _):
        await a.call("worker1", picky, (2,))
        futures = [a.call("worker1", picky, (i,)) for i in range(30)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        for i, outcome in enumerate(outcomes):
            if i % 3 == 0:
                assert isinstance(outcome, ValueError)
                assert outcome.args == (i,)
            else:
                assert outcome == ([i] if i % 3 == 1 else i)


async def test_arguments_are_those_of_the_moment_of_the_call(agents):
    async with agents(2) as (a, _):
        await a.call("worker1", at_once, (0, 0))
        array, futures = np.zeros(2), []
        for _ in range(5):
            futures.append(a.call("worker1", at_once, (array, 0)))
            array += 1
        assert [each.tolist() for each in await asyncio.gather(*futures)] == [
            [i, i] for i in range(5)
        ]


async def test_rows_and_large_messages_go_side_by_side(agents):
    """What comes between the pieces of a large message takes effect all the same, and once."""
    async with agents(2) as (a, _):
        for func in (at_once, later):
            await a.call("worker1", func, (0, 0))
        futures = []
        for i in range(3):
            futures.append(a.call("worker1", sized, (np.zeros(3 << 20, np.uint8),)))
            futures += [a.call("worker1", at_once, (n, i)) for n in range(50)]
            futures.append(a.call("worker1", large, (3 << 20,)))
            futures += [a.call("worker1", later, (n, i)) for n in range(50)]
        found = await asyncio.gather(*futures)
        for i in range(3):
            first, *one, second = found[i * 102 : i * 102 + 52]
            assert first == second.nbytes == 3 << 20
            assert one == [n + i for n in range(50)]
            assert found[i * 102 + 52 : (i + 1) * 102] == [n + i for n in range(50)]


async def test_each_has_its_deadline(agents):
    async with agents(2) as (a, _):
        await a.call("worker1", at_once, (0, 0))
        a.call("worker1", for_ever, (0,)).cancel()
        await a.call("worker1", at_once, (0, 0))
        futures = [a.call("worker1", for_ever, (i,), timeout=0.05) for i in range(20)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(each, DeadlineExceeded) for each in outcomes)


async def test_each_can_be_cancelled(agents):
    async with agents(2) as (a, b):
        a.call("worker1", for_ever, (0,)).cancel()
        await a.call("worker1", later, (0, 0))
        futures = [a.call("worker1", for_ever, (i,)) for i in range(20)]
        await a.call("worker1", later, (0, 0))
        callee = b.link("worker0").callee
        assert len(callee.execution.running) == 20
        for future in futures[::2]:
            future.cancel()
        while len(callee.execution.running) > 10:
            await a.call("worker1", later, (0, 0))
        for future in futures:
            future.cancel()


async def test_no_more_than_agreed_run_at_once(agents):
    async with agents(2, options=Options(max_inflight=8)) as (a, b):
        await a.call("worker1", later, (0, 0))
        seen = []
        callee = b.link("worker0").callee

        async def watch():
            while True:
                seen.append(len(callee.execution.running))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        futures = [a.call("worker1", later, (i, 1)) for i in range(100)]
        assert await asyncio.gather(*futures) == [i + 1 for i in range(100)]
        watching.cancel()
        assert 7 <= max(seen) <= 8, "the first may have ended when the others come"


async def test_a_peer_that_ignores_the_limit_is_told_so(agents):
    async with agents(2, options=Options(max_inflight=8)) as (a, _):
        a.call("worker1", for_ever, (0,)).cancel()
        await a.call("worker1", later, (0, 0))
        a.link("worker1").caller._limit = 100
        futures = [a.call("worker1", for_ever, (i,)) for i in range(10)]
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(each.exception(), Overloaded) for each in done)
        for future in futures:
            future.cancel()


async def test_calls_that_never_left_say_so(agents):
    async with agents(2) as (a, _):
        await a.call("worker1", at_once, (0, 0))
        link = a.link("worker1")
        link.outbox.pause()
        futures = [a.call("worker1", at_once, (i, 0)) for i in range(100)]
        link.lose(WorkerLost("worker1", why="for a test"))
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [each.executed for each in outcomes] == ["no"] * 100
