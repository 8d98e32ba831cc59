"""Threads: few, but never too few."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.runtime.threads import ThreadPool
from tests.support.waiting import until


@pytest.fixture
async def pool():
    pool = ThreadPool(asyncio.get_running_loop(), Runtime(), 4, "test")
    yield pool
    pool.close()


async def test_one_thread_does_quick_work(pool, monkeypatch):
    monkeypatch.setattr(
        "aiograd.rpc.runtime.threads._STALLED", 60
    )  # on a busy machine nothing is quick
    names = {await pool.run(threading.get_ident) for _ in range(50)}
    assert len(names) == 1
    assert pool.size == 1


async def test_results_and_errors_come_back(pool):
    assert await pool.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 7, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(next, iter(()))
    assert not pool.busy


async def test_work_that_blocks_gets_more_threads_up_to_the_limit(pool):
    go = threading.Event()
    running = [pool.run(go.wait) for _ in range(10)]
    await until(lambda: pool.size >= 4)
    for _ in range(5):  # and it has looked again whether more would help
        look = pool._timer
        await until(lambda look=look: pool._timer is not look)
    assert pool.size == 4
    go.set()
    await asyncio.gather(*running)


async def test_threads_blocked_in_nested_calls_do_not_count(pool):
    go = threading.Event()

    def nested():
        with pool.blocked():
            go.wait()

    running = [pool.run(nested) for _ in range(20)]
    assert await pool.run(lambda: "not starved") == "not starved"
    go.set()
    await asyncio.gather(*running)


async def test_many_jobs_in_one_go(pool):
    assert await asyncio.gather(*(pool.run(abs, -i) for i in range(2000))) == list(range(2000))


async def test_a_closed_pool_has_no_threads(monkeypatch):
    monkeypatch.setattr("aiograd.rpc.runtime.threads._IDLE", 3600)  # they do not end by themselves
    pool = ThreadPool(asyncio.get_running_loop(), Runtime(), 4, "test")
    await pool.run(abs, 1)
    pool.close()
    await until(lambda: not pool.size)
    assert "aiograd-test" not in [thread.name for thread in threading.enumerate()]


async def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr("aiograd.rpc.runtime.threads._IDLE", 0.01)
    pool = ThreadPool(asyncio.get_running_loop(), Runtime(), 4, "test")
    await pool.run(abs, 1)
    await until(lambda: not pool.size)
    assert await pool.run(abs, -1) == 1
    pool.close()


async def test_a_job_is_not_forgotten_that_comes_as_the_last_idle_thread_ends(pool):
    await pool.run(abs, -1)
    pool._queue.put(None)
    await until(lambda: not pool.size)
    pool._threads.add(0)  # it has made up its mind, and nobody knows yet
    assert await pool.run(abs, -1) == 1
    pool._threads.discard(0)


async def test_help_comes_soon_for_a_job_behind_one_that_an_idle_thread_took(pool, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.runtime.threads._STALLED_IDLE", 60)
    await pool.run(abs, -1)
    go = threading.Event()
    first = pool.run(go.wait)
    async with asyncio.timeout(20):
        assert await pool.run(abs, -1) == 1
    go.set()
    await first


async def test_work_waits_while_no_thread_can_be_started(caplog):
    class Short(Runtime):
        failures = 2

        def start_thread(self, target, name):
            if self.failures:
                self.failures -= 1
                raise RuntimeError("can't start new thread")
            super().start_thread(target, name)

    pool = ThreadPool(asyncio.get_running_loop(), Short(), 4, "test")
    try:
        first, second = pool.run(divmod, 7, 2), pool.run(divmod, 9, 2)
        assert await first == (3, 1)
        assert await second == (4, 1)
        assert caplog.text.count("no thread can be started") == 1
    finally:
        pool.close()
