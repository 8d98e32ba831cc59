"""Shares of threads: a partner whose functions block waits for itself only."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.runtime.thread_shares import ThreadShares
from aiograd.rpc.runtime.threads import ThreadPool
from tests.support.waiting import until


@pytest.fixture
async def shares():
    loop = asyncio.get_running_loop()
    pool = ThreadPool(loop, Runtime(), 8, "test")
    yield ThreadShares(loop, pool, 3, 8)
    pool.close()


async def test_a_partner_that_blocks_has_its_share_and_no_more(shares):
    go = threading.Event()
    clinic, lab = shares.of("clinic"), shares.of("lab")
    stuck = [clinic.run(go.wait) for _ in range(50)]
    assert clinic.running == 3
    assert len(clinic.jobs) == 47
    async with asyncio.timeout(10):
        assert await lab.run(lambda: "lab") == "lab"
        assert await shares.pool.run(lambda: "trusted") == "trusted"
    go.set()
    await asyncio.gather(*stuck)
    assert (clinic.running, len(clinic.jobs)) == (0, 0)


async def test_all_partners_leave_a_part_of_the_pool_and_each_has_a_thread(shares):
    go = threading.Event()
    stuck = [shares.of(name).run(go.wait) for name in "abc" for _ in range(9)]
    assert [shares.of(name).running for name in "abc"] == [3, 3, 1]  # six are for partners
    async with asyncio.timeout(10):
        assert await shares.pool.run(lambda: "trusted") == "trusted"
    go.set()
    await asyncio.gather(*stuck)


async def test_partners_that_wait_take_turns():
    class Jobs(list):
        submit = list.append

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def finished(self) -> None:
            order.append(self.name)

    order: list[str] = []
    started = Jobs()
    shares = ThreadShares(asyncio.get_running_loop(), started, 4, 4)  # three for all, two for each
    kept = [shares.of(name) for name in "ab"]
    for name in "aaaaaabbbb":
        shares.of(name).submit(Named(name))
    assert len(started) == 3
    while started:
        started.pop(0).finished()
    assert "".join(order) == "aababababa"
    assert [share.running for share in kept] == [0, 0]


async def test_a_job_that_blocks_in_a_nested_call_does_not_count(shares):
    go = threading.Event()
    clinic = shares.of("clinic")

    def nested():
        with shares.pool.blocked():
            go.wait()

    stuck = [clinic.run(nested) for _ in range(20)]
    async with asyncio.timeout(10):
        assert await clinic.run(lambda: "not starved") == "not starved"
    go.set()
    await asyncio.gather(*stuck)
    await until(lambda: clinic.running == 0)


async def test_an_error_gives_the_place_back(shares):
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            await shares.of("clinic").run(divmod, 1, 0)
    assert shares.of("clinic").running == 0
