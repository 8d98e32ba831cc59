"""F18: no memory for a message. F19: another version. F20: another loop, a forked child."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ForkedProcessError, Overloaded, ProtocolError, WrongLoopError
from aiograd.rpc.agent import Agent
from aiograd.wire.handshake import VERSION, Identity
from tests.failures import work
from tests.failures.work import echo, now, outcome
from tests.support.forks import in_forked_child

MIB = 1 << 20


async def test_f18_a_worker_without_memory_refuses_and_lives(cluster, figure):
    async with cluster(2, inbound_budget=8 * MIB) as c:
        process = c.pid("worker0")
        assert await ag.rpc_async("worker0", echo, (1,)) == 1
        began = now()
        error, when = await outcome(ag.rpc_async("worker0", len, (np.zeros(16 * MIB, np.uint8),)))
        assert isinstance(error, Overloaded)
        assert error.worker == "worker0"
        figure("F18", "a message beyond the memory budget: `Overloaded`", 0.5, when - began)
        assert await ag.rpc_async("worker0", len, (np.zeros(4 * MIB, np.uint8),)) == 4 * MIB
        assert c.pid("worker0") == process
        assert c.state("worker0") == "running"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_f18_a_worker_that_cannot_allocate_a_message_refuses_it_alone(
    cluster, figure, transport
):
    async with cluster(1, transport=transport) as c:
        process, kept = c.pid("worker0"), ag.remote("worker0", list, ((1, 2, 3),))
        assert await kept == [1, 2, 3]
        big = np.zeros(256 * MIB, np.uint8)
        await ag.rpc_async("worker0", work.leave_memory, (64 * MIB,))
        began = now()
        large = ag.rpc_async("worker0", work.length, (big,))
        small = ag.rpc_async("worker0", echo, (1,))  # while the large one is skipped
        error, when = await outcome(large)
        assert isinstance(error, Overloaded)
        assert error.worker == "worker0"
        assert "allocation" in str(error)
        figure("F18", "256 MiB that cannot be allocated: `Overloaded`", 0.5, when - began)
        assert await small == 1
        error, _ = await outcome(ag.rpc_async("worker0", work.fetch, (256 * MIB,)))
        assert isinstance(error, Overloaded)  # of a result
        assert error.worker == "worker0"
        assert await ag.rpc_async("worker0", work.limit_reached, ("allocation",)) == 2
        assert await ag.rpc_async("worker0", work.length, (big[:MIB],)) == MIB
        assert await kept == [1, 2, 3]
        assert (c.pid("worker0"), c.state("worker0")) == (process, "running")
        ended = c._started["worker0"].ended
    assert await ended == 0


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1], ids=["older", "newer"])
async def test_f19_another_version_is_named_in_the_handshake(cluster, figure, version, monkeypatch):
    async with cluster(1) as c:
        (address,) = c.driver.agent.directory.get("worker0").addresses
        monkeypatch.setattr("aiograd.rpc.agent.Identity", partial(Identity, version=version))
        another = Agent("another", 9, secret=c.driver.invitation().secret)
        try:
            began = now()
            error, when = await outcome(another.connect(address))
        finally:
            await another.close()
        assert isinstance(error, ProtocolError)
        assert error.worker == ""  # it says no name to one of another version
        assert str(error) == f"peer speaks {VERSION}, we speak {version}"
        figure("F19", "another version: `ProtocolError`", 0.5, when - began)
        assert await ag.rpc_async("worker0", echo, (1,)) == 1


async def test_f20_use_on_a_second_loop_or_in_a_forked_child_raises_at_once(cluster, figure):
    async with cluster(1):
        assert await ag.rpc_async("worker0", echo, (1,)) == 1

        def elsewhere() -> tuple[BaseException, float]:
            async def use() -> None:
                await ag.rpc_async("worker0", echo, (1,))

            began = now()
            with pytest.raises(WrongLoopError) as caught:
                asyncio.run(use())
            return caught.value, now() - began

        error, took = await asyncio.to_thread(elsewhere)
        assert error.worker == "driver"
        figure("F20", "used on a second loop: `WrongLoopError`", 0.1, took)
        began = now()
        said = in_forked_child(lambda: ag.rpc_sync("worker0", echo, (1,)))
        figure("F20", "used in a forked child: `ForkedProcessError`", 0.1, now() - began)
        assert said.startswith(ForkedProcessError.__name__)
        assert await ag.rpc_async("worker0", echo, (2,)) == 2
