"""What waits to be written to one peer."""

import asyncio

import pytest

from aiograd.rpc.outbox import EARLY, Outbox
from aiograd.wire.frames import SMALL, FrameReader
from aiograd.wire.messages import CALL, REPLY
from aiograd.wire.resume import Session


class Wire:
    """A transport that takes everything, until told not to."""

    def __init__(self):
        self.writes = []

    def get_write_buffer_size(self):
        return 0

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.writes.append(bytes(data))

    def frames(self):
        return FrameReader().feed(b"".join(self.writes))


@pytest.fixture
async def wire():
    return Wire()


@pytest.fixture
async def outbox(wire):
    box = Outbox(asyncio.get_running_loop(), Session(), lambda: None)
    box.open(wire)
    return box


async def turn():
    await asyncio.sleep(0)


async def test_the_small_messages_of_a_tick_leave_in_one_write(outbox, wire):
    for id in range(5):
        outbox.put(CALL, 0, id, 1.0, 0, b"body")
    assert wire.writes == []
    await turn()
    assert len(wire.writes) == 1
    assert [frame[2] for frame in wire.frames()] == [0, 1, 2, 3, 4]


async def test_the_first_of_many_messages_leave_while_the_last_are_made(outbox, wire):
    for id in range(EARLY + 3):
        outbox.put(CALL, 0, id, 1.0, 0, b"body")
    assert wire.writes, "nothing left before the end of the tick"
    await turn()
    assert [frame[2] for frame in wire.frames()] == list(range(EARLY + 3))


async def test_a_large_message_whose_announcement_left_early_follows(outbox, wire):
    for id in range(EARLY // 2):
        outbox.put(CALL, 0, id, 1.0, 0, b"body")
    outbox.put_large(CALL, 0, EARLY, 1.0, 0, (b"x", bytes(2 * SMALL)))
    await turn()
    *_, last = wire.frames()
    assert last[5].complete
    assert outbox.empty


async def test_a_message_at_leisure_leaves_with_the_next_one_in_front_of_it(outbox, wire):
    outbox.put_at_leisure(REPLY, 0, 1, 0.0, 0, b"")
    await turn()
    assert wire.writes == []
    assert outbox.size == 0, "it does not wait for the peer"
    outbox.put(CALL, 0, 2, 1.0, 0, b"body")
    assert outbox.size == len(b"".join(outbox.small))
    await turn()
    assert len(wire.writes) == 1
    assert [frame[2] for frame in wire.frames()] == [1, 2]


async def test_a_message_at_leisure_leaves_alone_when_no_other_comes(outbox, wire):
    outbox.put_at_leisure(REPLY, 0, 1, 0.0, 0, b"body")
    async with asyncio.timeout(5):
        while not wire.writes:
            await turn()
    assert [frame[2] for frame in wire.frames()] == [1]


async def test_what_a_batch_causes_at_leisure_does_not_leave_at_its_end(outbox, wire):
    outbox.corked = True
    outbox.put_at_leisure(REPLY, 0, 1, 0.0, 0, b"")
    outbox.uncork()
    assert wire.writes == []
    outbox.corked = True
    outbox.put(REPLY, 0, 2, 0.0, 0, b"")
    outbox.uncork()
    assert [frame[2] for frame in wire.frames()] == [1, 2]


async def test_a_paused_transport_gets_nothing_until_it_resumes(outbox, wire):
    outbox.pause()
    for id in range(2 * EARLY):
        outbox.put(CALL, 0, id, 1.0, 0, b"body")
    await turn()
    assert wire.writes == []
    outbox.resume()
    assert [frame[2] for frame in wire.frames()] == list(range(2 * EARLY))
