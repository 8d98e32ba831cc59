"""Orders of events that are rare in life; the simulator found each of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded


async def never(started: list[int]) -> None:
    started.append(1)
    await asyncio.sleep(60)


async def test_a_call_cancelled_before_its_first_step_is_forgotten(agents):
    async with agents(2) as (first, second):
        await first.call("worker1", max, (1, 2))
        future = first.call("worker1", never, ([],))
        future.cancel()  # leaves in the same write as the call
        await first.call("worker1", max, (1, 2))
        assert second.links.counters()["running_calls"] == 0


def identity(value):
    return value


async def test_a_large_message_may_arrive_all_at_once(agents, monkeypatch):
    """Its announcement and its last byte can be in one read."""
    array = np.arange(20_000.0)  # larger than a frame, smaller than the buffer
    async with agents(2) as (first, _):
        await first.call("worker1", max, (1, 2))
        link = first.link("worker1")
        transport = link.connection.transport
        writes: list[bytes] = []
        write = transport.write
        monkeypatch.setattr(transport, "write", lambda data: writes.append(bytes(data)))
        future = first.call("worker1", identity, (array,))
        while len(b"".join(writes)) < array.nbytes:
            await asyncio.sleep(0)
        write(b"".join(writes))
        monkeypatch.undo()
        assert np.array_equal(await future, array)


class Slow:
    """Something that may be used only when somebody else has agreed."""


class SlowTraveller:
    tag = "slow"

    def depart(self, value, departure):
        return None

    def arrive(self, data, arrival):
        arrival.waits.append(asyncio.get_running_loop().create_future())
        return Slow()


async def test_a_result_that_waits_for_somebody_still_has_its_deadline(agents):
    async with agents(2) as (first, second):
        for agent in (first, second):
            agent.travellers.add(Slow, SlowTraveller())
        with pytest.raises(DeadlineExceeded) as caught:
            await first.call("worker1", Slow, timeout=0.1)
        assert caught.value.worker == "worker1"
        assert not first.links.counters()["pending_calls"]
