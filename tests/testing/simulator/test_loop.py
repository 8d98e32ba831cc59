"""Virtual time: what the loop runs when, notices and refuses."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from aiograd.testing.simulator.loop import Deadlock, SimLoop, SimulationError


@pytest.fixture
def loop():
    loop = SimLoop(random.Random(1))
    yield loop
    loop.close()


def test_an_hour_of_virtual_time_takes_less_than_a_second(loop):
    begin = time.perf_counter()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == 3600
    assert time.perf_counter() - begin < 1


def test_a_timeout_expires_at_its_exact_virtual_time(loop):
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(10)
        return loop.time()

    assert loop.run_until_complete(wait()) == 2.5


def test_a_deadlock_is_noticed_at_once(loop):
    async def wait() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(wait())
    with pytest.raises(Deadlock):
        loop.run_until_complete(task)
    task._log_destroy_pending = False
    task.get_coro().close()


def test_a_livelock_is_noticed(loop):
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    task = loop.create_task(spin())
    with pytest.raises(SimulationError, match="without time passing"):
        loop.run_until_complete(task)
    task._log_destroy_pending = False
    task.get_coro().close()


@pytest.mark.parametrize(
    "leave",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: asyncio.to_thread(print),
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 1),
        lambda loop: asyncio.open_unix_connection("nowhere"),
        lambda loop: asyncio.create_subprocess_exec("true"),
    ],
)
def test_executors_sockets_and_subprocesses_are_refused(loop, leave):
    async def go() -> None:
        await leave(loop)

    with pytest.raises(SimulationError):
        loop.run_until_complete(go())
