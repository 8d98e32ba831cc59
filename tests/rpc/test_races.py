"""Orders of events that are rare in life; the simulator found each of them."""

from __future__ import annotations

import asyncio

import numpy as np


async def never(started: list[int]) -> None:
    started.append(1)
    await asyncio.sleep(60)


async def test_a_call_cancelled_before_its_first_step_is_forgotten(agents):
    async with agents(2) as (first, second):
        await first.call("worker1", max, (1, 2))
        future = first.call("worker1", never, ([],))
        future.cancel()  # leaves in the same write as the call
        await first.call("worker1", max, (1, 2))
        assert second.counters()["running_calls"] == 0


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
