"""Every limit has a named error and a counter: the limits that no other test here covers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import Overloaded, SerializationError
from aiograd.rpc.observe.metrics import NAMES, Limits
from aiograd.wire.framing import SMALL
from aiograd.wire.messages import CALL, LARGE
from tests.security import partner_functions as offer
from tests.security.rogue import Rogue, announce, frame, pack_header
from tests.support.agents import SECRET


@pytest.fixture
async def target(workers, caplog):
    """A worker that takes messages up to 1 MiB, and a rogue that is connected to it."""
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("restricted", "restricted", max_message=1 << 20) as (_, worker):
        rogue = await Rogue.connect(worker.agent.runtime.network.memory, "memory:1", SECRET)
        yield worker.agent, rogue
        await rogue.close()


async def test_a_frame_over_its_limit_ends_the_connection(target):
    agent, rogue = target
    rogue.send(pack_header(CALL, 0, SMALL + 1, 1, 5.0, 1))
    await rogue.ended
    assert agent.limits["protocol"] == 1
    assert agent.budget.used == 0


async def test_a_message_over_its_limit_ends_the_connection_before_memory_is_taken(target):
    agent, rogue = target
    rogue.send(frame(CALL, announce(1, 1, [1 << 40]), flags=LARGE, id=1))
    await rogue.ended
    assert agent.limits["protocol"] == 1
    assert agent.limits["inbound_budget"] == 0  # it was not even asked for


async def test_the_sender_of_a_message_over_the_limit_is_told_at_once(target):
    with pytest.raises(SerializationError, match="max_message is 1048576"):
        ag.rpc_async("worker1", offer.add, (np.zeros(1 << 20),))
    assert await ag.rpc_async("worker1", offer.add, (1,)) == 2


async def test_contexts_that_partners_open_are_bounded_and_counted(workers):
    async with workers("restricted", "restricted", partner_contexts=3) as (_, there):
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        opened = [ag.context() for _ in range(5)]
        outcomes = []
        for ctx in opened:
            with ctx.active():
                outcomes.append(ag.rpc_async("worker1", offer.project, (x,)))
        ends = await asyncio.gather(*outcomes, return_exceptions=True)
        assert [type(each) for each in ends] == [ag.Tensor] * 3 + [Overloaded] * 2
        assert {each.worker for each in ends[3:]} == {"worker1"}
        assert there.agent.limits["contexts"] == 2
        for ctx in opened:
            await ctx.release()


def test_every_counter_is_described_and_starts_at_nothing():
    text = Path(Limits.__init__.__globals__["__file__"]).read_text().split('"""')[1]
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("    ")]
    assert rows[: len(NAMES)] == list(NAMES)
    assert Limits().as_dict() == dict.fromkeys(NAMES, 0)
