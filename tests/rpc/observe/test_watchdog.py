"""Who holds the event loop is told."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from aiograd.rpc.observe.watchdog import BLOCKED, PAUSE, Watchdog


def hold_the_loop(until: threading.Event) -> None:
    until.wait(20.0)


class Heard(logging.Handler):
    """Lets a thread wait for what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()
        self.times: list[float] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.times.append(time.monotonic())
        self.lines.append(record.getMessage())
        self.told.set()


@pytest.fixture
def heard():
    handler = Heard()
    logging.getLogger("aiograd").addHandler(handler)
    yield handler
    logging.getLogger("aiograd").removeHandler(handler)


async def test_a_blocked_loop_is_logged_with_the_guilty_stack_and_its_end(agents, heard):
    async with agents(1) as (agent,):
        watchdog = Watchdog(agent)
        watchdog.start()
        began = time.monotonic()
        hold_the_loop(heard.told)  # until it is told of
        while len(heard.lines) < 2:
            await asyncio.sleep(0.01)
        watchdog.close()
    blocked, freed = heard.lines
    assert blocked.startswith("worker0: the event loop has been blocked for 1.")
    assert "in hold_the_loop" in blocked
    assert "test_watchdog.py" in blocked
    assert freed.startswith("worker0: the event loop goes on after 1.")
    assert BLOCKED <= heard.times[0] - began <= 4 * 1.5


async def test_a_loop_that_is_late_but_turns_is_not_told_of(agents, heard):
    async with agents(1) as (agent,):
        watchdog = Watchdog(agent)
        watchdog.start()
        for _ in range(4):
            time.sleep(BLOCKED / 4)  # noqa: ASYNC251 - four steps that are each too long
            await asyncio.sleep(0)
        watchdog.close()
    assert heard.lines == []


async def test_it_ends_with_its_worker_at_once(agents):
    async with agents(1) as (agent,):
        before = set(threading.enumerate())
        watchdog = Watchdog(agent)
        watchdog.start()
        (thread,) = set(threading.enumerate()) - before
        await asyncio.sleep(0)
        watchdog.close()
        began = time.monotonic()
        thread.join()
        assert time.monotonic() - began < 4 * PAUSE


async def test_of_workers_that_share_a_loop_one_watches_it(cluster):
    def watching() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("aiograd-watchdog")]

    async with cluster(3):
        assert watching() == ["aiograd-watchdog-driver"]
    async with cluster(1, processes=True) as c:
        assert await c["worker0"].call(watching) == ["aiograd-watchdog-worker0"]
