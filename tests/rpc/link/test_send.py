"""What waits to be written to one peer."""

import asyncio

import pytest

from aiograd.rpc.link.send import EARLY, LAZY, NORMAL, NOW, OpenCall, Outbox
from aiograd.wire.fastcodec import decode_batch
from aiograd.wire.framing import SMALL, Frame, FrameReader
from aiograd.wire.messages import (
    BATCH,
    CALL,
    FAST,
    KEEP,
    OP,
    PIGGYBACK,
    PING,
    POST,
    REPLY,
)
from aiograd.wire.session import Session


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
        outbox.put(Frame(CALL, 0, id, 1.0, 0, b"body"))
    assert wire.writes == []
    await turn()
    assert len(wire.writes) == 1
    assert [frame.id for frame in wire.frames()] == [0, 1, 2, 3, 4]


async def test_what_somebody_waits_for_leaves_at_once_and_what_follows_together(outbox, wire):
    for id in range(4):
        outbox.put(Frame(POST, 0, id, 1.0, 0, b"body"), NOW)
        assert len(wire.writes) == 1
    await turn()
    assert len(wire.writes) == 2
    outbox.put(Frame(POST, 0, 4, 1.0, 0, b"body"), NOW)
    assert len(wire.writes) == 3
    assert [frame.id for frame in wire.frames()] == [0, 1, 2, 3, 4]


async def test_what_somebody_waits_for_leaves_with_the_rest_of_the_batch_that_caused_it(
    outbox, wire
):
    outbox.corked = True
    outbox.put(Frame(POST, 0, 0, 1.0, 0, b"body"), NOW)
    outbox.put(Frame(REPLY, 0, 1, 1.0, 0, b"body"))
    assert wire.writes == []
    outbox.uncork()
    assert len(wire.writes) == 1


async def test_the_first_of_many_messages_leave_while_the_last_are_made(outbox, wire):
    for id in range(EARLY + 3):
        outbox.put(Frame(CALL, 0, id, 1.0, 0, b"body"))
    assert wire.writes, "nothing left before the end of the tick"
    await turn()
    assert [frame.id for frame in wire.frames()] == list(range(EARLY + 3))


async def test_a_large_message_whose_announcement_left_early_follows(outbox, wire):
    for id in range(EARLY // 2):
        outbox.put(Frame(CALL, 0, id, 1.0, 0, b"body"))
    outbox.put_large(Frame(CALL, 0, EARLY, 1.0, 0), (b"x", bytes(2 * SMALL)))
    await turn()
    *_, last = wire.frames()
    assert last.body.complete
    assert outbox.empty


async def test_an_early_flush_takes_along_what_waits(outbox, wire):
    outbox.put(Frame(CALL, 0, 1, 1.0, 0, b"body"))
    outbox.put(Frame(CALL, 0, 2, 1.0, 0, b"where it lies"))
    outbox.flush_early()
    assert [frame.id for frame in wire.frames()] == [1, 2]
    await turn()
    assert len(wire.writes) == 1


async def test_a_call_that_is_alone_under_way_leaves_at_once(outbox, wire):
    outbox.put(Frame(CALL, 0, 1, 1.0, 0, b"body"), NOW)
    assert len(wire.writes) == 1
    assert not outbox.scheduled, "nothing is expected to follow it"


async def test_a_lazy_message_leaves_in_front_of_the_next_one(outbox, wire):
    outbox.put(Frame(REPLY, 0, 1, 0.0, 0, b""), LAZY)
    await turn()
    assert wire.writes == []
    assert outbox.size == 0, "it does not wait for the peer"
    outbox.put(Frame(CALL, 0, 2, 1.0, 0, b"body"))
    assert outbox.size > 0
    await turn()
    assert len(wire.writes) == 1
    assert [frame.id for frame in wire.frames()] == [1, 2]


async def test_a_lazy_message_leaves_alone_after_a_while(outbox, wire):
    outbox.put(Frame(REPLY, 0, 1, 0.0, 0, b"body"), LAZY)
    async with asyncio.timeout(5):
        while not wire.writes:
            await turn()
    assert [frame.id for frame in wire.frames()] == [1]


async def test_lazy_answers_do_not_leave_with_the_end_of_what_was_read(outbox, wire):
    outbox.corked = True
    outbox.put(Frame(REPLY, 0, 1, 0.0, 0, b""), LAZY)
    outbox.uncork()
    assert wire.writes == []
    outbox.corked = True
    outbox.put(Frame(REPLY, 0, 2, 0.0, 0, b""))
    outbox.uncork()
    assert [frame.id for frame in wire.frames()] == [1, 2]


async def test_a_paused_transport_gets_nothing_until_it_resumes(outbox, wire):
    outbox.pause()
    for id in range(2 * EARLY):
        outbox.put(Frame(CALL, 0, id, 1.0, 0, b"body"))
    await turn()
    assert wire.writes == []
    outbox.resume()
    assert [frame.id for frame in wire.frames()] == list(range(2 * EARLY))


# ── rows ────────────────────────────────────────────────────────────────────────────────────────


def rows(wire):
    """(kind, first id, entries) of what left, or the body of what left alone."""
    return [
        (each.kind, each.id, decode_batch(each.body) if each.flags & BATCH else bytes(each.body))
        for each in wire.frames()
    ]


async def test_the_bytes_that_wait_are_right_after_every_message_and_write(outbox, wire):
    outbox.pause()
    for id in range(20):
        outbox.put(Frame(CALL, 0, id, body=bytes(id)), LAZY if id % 3 else NORMAL)
        assert outbox.size == len(b"".join(outbox._queue))
    outbox.resume()
    assert outbox.size == 0
    outbox.pause()
    outbox.put(Frame(CALL, 0, 99, body=b"x" * 50))
    assert outbox.size == len(b"".join(outbox._queue))


async def test_calls_that_are_alike_share_a_frame(outbox, wire):
    for id in (5, 6, 7):
        outbox.put_batched((CALL, FAST, 1.0, 3), id, (id,))
    assert not outbox.empty
    await turn()
    assert rows(wire) == [(CALL, 5, [(5,), (6,), (7,)])]
    (frame,) = wire.frames()
    flags, budget, target = frame.flags, frame.budget, frame.target
    assert (flags, budget, target) == (FAST | BATCH, 1.0, 3)
    assert outbox.empty


@pytest.mark.parametrize(
    "other",
    [
        (REPLY, FAST, 2, 1.0, 3),
        (CALL, FAST | OP, 2, 1.0, 3),
        (CALL, FAST, 3, 1.0, 3),
        (CALL, FAST, 2, 2.0, 3),
        (CALL, FAST, 2, 1.0, 4),
    ],
    ids=["kind", "flags", "id", "budget", "target"],
)
async def test_what_differs_begins_another_row(outbox, wire, other):
    outbox.put_batched((CALL, FAST, 1.0, 3), 1, "a")
    kind, flags, id, budget, target = other
    outbox.put_batched((kind, flags, budget, target), id, "b")
    await turn()
    assert rows(wire) == [(CALL, 1, ["a"]), (other[0], other[2], ["b"])]


@pytest.mark.parametrize("put", ["normal", "lazy", "acknowledge", "large"])
async def test_nothing_overtakes_a_row(outbox, wire, put):
    outbox.put_batched((CALL, FAST, 1.0, 3), 1, "a")
    if put == "acknowledge":
        outbox.acknowledge()
    elif put == "large":
        outbox.put_large(Frame(POST, 0, 2, 1.0, 3), [b"x" * 100])
    else:
        outbox.put(Frame(POST, 0, 2, 1.0, 3, b""), LAZY if put == "lazy" else NORMAL)
    outbox.put_batched((CALL, FAST, 1.0, 3), 2, "b")
    await turn()
    kinds = [frame.kind for frame in wire.frames()]
    between = {"acknowledge": PING}.get(put, POST)
    assert kinds[:3] == [CALL, between, CALL]


async def test_a_row_that_is_long_enough_leaves_before_the_end_of_the_tick(outbox, wire):
    for id in range(1, 100):
        outbox.put_batched((CALL, FAST, 1.0, 3), id, id)
    early = sum(len(entries) for _, _, entries in rows(wire))
    assert 0 < early < 99
    await turn()
    assert [entry for _, _, entries in rows(wire) for entry in entries] == list(range(1, 100))


async def test_a_row_too_large_for_a_frame_is_cut(outbox, wire):
    entries = [bytes([id]) * 20_000 for id in range(1, 11)]
    for id, entry in enumerate(entries, 1):
        outbox.put_batched((CALL, FAST, 1.0, 3), id, entry)
    await turn()
    found = rows(wire)
    assert len(found) > 1
    assert [entry for _, _, row in found for entry in row] == entries
    assert [first for _, first, _ in found] == [
        1 + sum(len(row) for _, _, row in found[:at]) for at in range(len(found))
    ]


async def test_each_call_of_a_row_that_has_not_left_is_known(outbox):
    outbox.detach()
    outbox.put(Frame(REPLY, 0, 9, 1.0, 0, b"body"))
    for id in (1, 2):
        outbox.put_batched((CALL, FAST, 1.0, 3), id, id)
    assert outbox.unsent() == {(REPLY, 9), (CALL, 1), (CALL, 2)}


async def test_a_row_that_waits_for_a_slow_peer_is_counted(outbox):
    outbox.pause()
    before = outbox.size
    for id in range(1, 1000):
        outbox.put_batched((CALL, FAST, 1.0, 3), id, f"{id:0100}")
    assert outbox.size - before > 90_000
    outbox.close()
    assert outbox.empty


async def test_a_row_made_while_a_batch_is_read_leaves_at_its_end(outbox, wire):
    outbox.corked = True
    outbox.put_batched((REPLY, FAST, 0.0, 0), 1, "a")
    await turn()
    assert wire.writes == []
    outbox.uncork()
    assert rows(wire) == [(REPLY, 1, ["a"])]


async def test_a_large_message_that_waited_for_another_is_announced_before_its_chunks(wire):
    waiting = [b"b" * 100, b"c" * 100]

    def sent():
        if waiting:
            box.put_large(Frame(CALL, 0, 2, 1.0, 0), [waiting.pop(0)])

    box = Outbox(asyncio.get_running_loop(), Session(), sent)
    box.open(wire)
    box.put_large(Frame(CALL, 0, 1, 1.0, 0), [b"a" * 100])
    for _ in range(5):
        await turn()
    whole = [frame.body for frame in wire.frames()][1::2]
    assert [bytes(each.segments[0][:1]) for each in whole] == [b"a", b"b", b"c"]


# ── open calls ──────────────────────────────────────────────────────────────────────────────────

KEPT = FAST | OP | KEEP


def kept(id, flags=KEPT, body=None):
    return OpenCall((CALL, flags, 1.0, 3), id, (b"token", (id,)) if body is None else body)


async def test_an_open_call_can_be_asked_for_a_copy_until_the_tick_ends(outbox, wire):
    calls = [kept(id) for id in (1, 2, 3)]
    for call in calls:
        outbox.put_open(call)
    assert outbox.piggyback(calls[1])
    assert not outbox.empty
    await turn()
    assert not outbox.piggyback(calls[0])
    found = [(frame.flags & PIGGYBACK, frame.id) for frame in wire.frames()]
    assert found == [(0, 1), (PIGGYBACK, 2), (0, 3)]


async def test_open_calls_that_are_alike_share_a_frame(outbox, wire):
    for id in range(1, 41):
        outbox.put_open(kept(id, KEPT | PIGGYBACK))
    await turn()
    assert len(wire.writes) == 1
    assert [frame.flags for frame in wire.frames()] == [KEPT | PIGGYBACK | BATCH] * 2
    assert sum(len(decode_batch(frame.body)) for frame in wire.frames()) == 40


@pytest.mark.parametrize("other", ["call", "batched", "function"])
async def test_what_could_change_a_value_ends_the_time_to_ask_for_a_copy(outbox, wire, other):
    call = kept(1)
    outbox.put_open(call)
    if other == "call":
        outbox.put(Frame(CALL, 0, 2, 1.0, 4, b"body"))
    elif other == "batched":
        outbox.put_batched((CALL, FAST, 1.0, 4), 2, (1,))
    else:
        outbox.put_open(kept(2, flags=FAST | KEEP))
    assert not outbox.piggyback(call)
    await turn()
    assert [frame.id for frame in wire.frames()] == [1, 2]


async def test_an_open_call_with_a_body_of_its_own_travels_alone(outbox, wire):
    outbox.put_open(kept(1))
    outbox.put_open(kept(2, body=b"its own"))
    outbox.put_open(kept(3))
    await turn()
    assert [(frame.id, bool(frame.flags & BATCH)) for frame in wire.frames()] == [
        (1, True),
        (2, False),
        (3, True),
    ]


async def test_open_calls_that_have_not_left_are_known(outbox):
    outbox.detach()
    outbox.put_open(kept(1))
    outbox.put_open(kept(2, body=b"its own"))
    assert outbox.unsent() == {(CALL, 1), (CALL, 2)}


async def test_a_full_batch_of_calls_that_were_asked_leaves_before_the_tick_ends(outbox, wire):
    calls = [kept(id) for id in range(1, 41)]
    for call in calls:
        outbox.put_open(call)
    assert all(outbox.piggyback(call) for call in calls[:32])
    assert sum(len(decode_batch(frame.body)) for frame in wire.frames()) == 32
    assert not outbox.piggyback(calls[0])
    assert outbox.piggyback(calls[32])
    await turn()
    assert [frame.flags & PIGGYBACK for frame in wire.frames()] == [PIGGYBACK, PIGGYBACK, 0]
    assert [frame.id for frame in wire.frames()] == [1, 33, 34]
