"""Frames out of bytes in any pieces, and large messages into their own memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiograd.errors import ProtocolError
from aiograd.wire.buffers import BufferPool
from aiograd.wire.framing import (
    CHUNK_SIZE,
    HEADER_SIZE,
    MAX_SEGMENTS,
    SMALL,
    FrameReader,
    Transfer,
    announce,
    pack_header,
)
from aiograd.wire.messages import CALL, CHUNK, LARGE, PING, REPLY, SHARED


def frame(kind, body=b"", flags=0, id=0, budget=0.0, target=0):
    return pack_header(kind, flags, len(body), id, budget, target) + body


def large(number, segments, kind=CALL, id=1, target=5):
    """The frames of a large message: announcement, then chunks."""
    head = frame(kind, announce(number, target, [len(s) for s in segments]), LARGE, id)
    data = b"".join(segments)
    pieces = [data[i : i + CHUNK_SIZE] for i in range(0, len(data), CHUNK_SIZE)]
    return head, [frame(CHUNK, piece, target=number) for piece in pieces]


def plain(frames):
    return [
        (each.kind, each.flags, each.id, each.budget, each.target, bytes(each.body))
        for each in frames
        if not isinstance(each.body, Transfer)
    ]


FRAMES = [
    frame(CALL, b"hello", id=1, budget=2.5, target=7),
    frame(PING),
    frame(REPLY, b"x" * 1000, id=1),
    frame(CALL, bytes(SMALL), id=2),
]
STREAM = b"".join(FRAMES)
EXPECTED = [
    (CALL, 0, 1, 2.5, 7, b"hello"),
    (PING, 0, 0, 0.0, 0, b""),
    (REPLY, 0, 1, 0.0, 0, b"x" * 1000),
    (CALL, 0, 2, 0.0, 0, bytes(SMALL)),
]


@pytest.mark.parametrize("piece", [1, 3, HEADER_SIZE, 1000, len(STREAM)])
def test_frames_survive_being_cut_anywhere(piece):
    reader = FrameReader()
    found = []
    for i in range(0, len(STREAM), piece):
        found += reader.feed(STREAM[i : i + piece])
    assert plain(found) == EXPECTED


def test_many_buffers_full_of_frames_come_out_whole():
    reader = FrameReader()
    bodies = [bytes([i % 251]) * (i * 37 % 3000) for i in range(500)]
    data = b"".join(frame(CALL, body, id=i) for i, body in enumerate(bodies))
    found = [f for i in range(0, len(data), 7777) for f in reader.feed(data[i : i + 7777])]
    assert [bytes(f.body) for f in found] == bodies
    assert [bytes(f.body) for f in FrameReader().feed(data)] == bodies


@pytest.mark.parametrize("piece", [100, 65536, 10**9])
def test_a_large_message_is_announced_and_then_complete(piece):
    first, second = b"a" * 10, bytes(range(256)) * 8192  # 2 MiB
    head, chunks = large(3, [first, b"", second])
    stream = head + chunks[0] + frame(PING) + b"".join(chunks[1:])
    reader, found = FrameReader(), []
    for i in range(0, len(stream), piece):
        found += reader.feed(stream[i : i + piece])
    announced, ping, complete = found
    assert announced.body is complete.body
    assert announced.target == 5
    assert ping.kind == PING
    transfer = complete.body
    assert transfer.complete
    assert [bytes(s) for s in transfer.segments] == [first, b"", second]
    assert all(s.flags.writeable for s in transfer.segments)


def test_large_messages_share_the_connection():
    one, two = [b"1" * (CHUNK_SIZE * 2)], [b"2" * (CHUNK_SIZE + 5)]
    head1, chunks1 = large(1, one, id=1)
    head2, chunks2 = large(2, two, id=2)
    stream = head1 + chunks1[0] + head2 + chunks2[0] + chunks1[1] + chunks2[1]
    found = FrameReader().feed(stream)
    assert [(f.id, f.body.size) for f in found] == [
        (1, 2 * CHUNK_SIZE),
        (2, CHUNK_SIZE + 5),
        (1, 2 * CHUNK_SIZE),
        (2, CHUNK_SIZE + 5),
    ]
    assert bytes(found[2].body.segments[0]) == one[0]
    assert bytes(found[3].body.segments[0]) == two[0]


def test_nothing_is_allocated_without_a_reservation():
    reader = FrameReader(reserve=lambda size: False)
    head, chunks = large(1, [b"x" * 100_000])
    (announced,) = reader.feed(head)
    assert announced.body.refused == "inbound_budget"
    assert announced.body.segments == []
    (complete,) = reader.feed(b"".join(chunks))
    assert complete.body.complete


class Scarce(BufferPool):
    """A system that gives only so many bytes at once."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def take(self, size):
        if size > self.most:
            raise MemoryError(size)
        return super().take(size)


@pytest.mark.parametrize("piece", [1000, 1 << 20])
def test_what_cannot_be_allocated_is_refused_and_skipped_and_the_rest_goes_on(piece):
    missing = []
    reader = FrameReader(memory=Scarce(100_000), unavailable=missing.append)
    one, ones = large(1, [b"a" * 90_000, b"b" * 3 * CHUNK_SIZE])
    two, twos = large(2, [b"c" * 90_000], id=2)
    small = frame(CALL, b"small", id=3)
    data = one + two + ones[0] + small + b"".join(ones[1:]) + b"".join(twos)
    frames = []
    for at in range(0, len(data), piece):
        frames += reader.feed(data[at : at + piece])
    assert [each.id for each in frames] == [1, 2, 3, 1, 2]
    refused, other = frames[3].body, frames[4].body
    assert refused.refused == "allocation"
    assert refused.segments == []
    assert refused.complete
    assert missing == [refused.size]
    assert not other.refused
    assert bytes(other.segments[0]) == b"c" * 90_000
    given_back = []
    reader.abandon(given_back.append)
    assert given_back == []


@pytest.mark.parametrize("piece", [1, 7, 1000, 70_000])
def test_readers_that_share_a_buffer_do_not_disturb_each_other(piece):
    """Each has the beginning of a frame when the other one reads."""
    memory = BufferPool()
    bodies = [bytes([i]) * (i * 997) for i in range(1, 60)]
    head, chunks = large(1, [b"l" * (CHUNK_SIZE + 11)])
    readers = [FrameReader(memory=memory) for _ in range(3)]
    streams = [
        b"".join(frame(CALL, body) for body in bodies),
        b"".join(frame(REPLY, body) for body in reversed(bodies)),
        frame(PING) + head + b"".join(chunks) + frame(CALL, b"last"),
    ]
    found = [[], [], []]
    for at in range(0, max(map(len, streams)), piece):
        for reader, stream, frames in zip(readers, streams, found, strict=True):
            reader.get_buffer()  # nothing came: asked again in vain
            frames += reader.feed(stream[at : at + piece])
    assert [bytes(each.body) for each in found[0]] == bodies
    assert [bytes(each.body) for each in found[1]] == bodies[::-1]
    assert [each.kind for each in found[2]] == [PING, CALL, CALL, CALL]
    assert bytes(found[2][2].body.segments[0]) == b"l" * (CHUNK_SIZE + 11)
    assert len({id(reader._buffer) for reader in readers}) == 1


def test_what_was_reserved_is_given_back_when_the_connection_ends():
    given_back = []
    reader = FrameReader()
    head, chunks = large(1, [b"x" * 100_000])
    reader.feed(head + chunks[0][:50])
    reader.abandon(given_back.append)
    assert given_back == [100_000]


OPEN = frame(CALL, announce(1, 0, [5]), LARGE)  # an announcement whose bytes are still to come


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "expected a frame"),
        (frame(99), "expected a frame, got 0xa9 0x63"),
        (frame(PING).replace(b"\xa9", b"\xaa", 1), "expected a frame, got 0xaa"),
        (pack_header(CALL, 0, SMALL + 1, 0, 0.0, 0), "a frame of 65537 bytes"),
        (frame(CHUNK, b"x", target=9), "a chunk of 1 bytes for transfer 9"),
        (OPEN + frame(CHUNK, b"", target=1), "a chunk of 0 bytes"),
        (OPEN + frame(CHUNK, b"123456", target=1), "a chunk of 6 bytes"),
        (frame(CALL, announce(1, 0, [CHUNK_SIZE + 1]), LARGE)
         + pack_header(CHUNK, 0, CHUNK_SIZE + 1, 0, 0.0, 1), f"a chunk of {CHUNK_SIZE + 1} bytes"),
        (frame(CALL, announce(1, 0, [2 << 30]), LARGE), "over the limit"),
        (frame(CALL, announce(1, 0, [0]), LARGE), "transfer 1 announced wrongly"),
        (OPEN + OPEN, "transfer 1 announced wrongly"),
        (frame(CALL, b"1234567", LARGE), "an announcement of 7 bytes"),
        (frame(CALL, announce(1, 0, []), LARGE), "an announcement of 16 bytes"),
        (frame(CALL, announce(1, 0, [1] * (MAX_SEGMENTS + 1)), LARGE), "an announcement of 64024"),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_a_protocol_error(data, why):
    with pytest.raises(ProtocolError, match=why):
        FrameReader(max_message=1 << 30).feed(data)


def test_a_message_may_have_as_many_segments_as_an_announcement_can_list():
    head, chunks = large(1, [b"1"] * MAX_SEGMENTS)
    reserved = []
    reader = FrameReader(reserve=lambda size: not reserved.append(size))
    whole = reader.feed(head + b"".join(chunks))[-1].body
    assert len(whole.segments) == MAX_SEGMENTS
    assert reserved == [whole.size] == [MAX_SEGMENTS + 160 * (MAX_SEGMENTS - 1)]


def test_large_messages_under_way_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr("aiograd.wire.framing.TRANSFERS", 2)
    reader = FrameReader()
    reader.feed(large(1, [b"x"])[0] + large(2, [b"x"])[0])
    with pytest.raises(ProtocolError, match="2 large messages are under way already"):
        reader.feed(large(3, [b"x"])[0])


def test_the_number_of_a_message_can_be_used_again_when_it_is_complete():
    reader = FrameReader()
    for _ in range(2):
        head, chunks = large(1, [b"abc", b"", b"de"], kind=REPLY)
        announced, done = reader.feed(head + b"".join(chunks))
        assert announced.body is done.body
        assert done.body.kind == REPLY
        assert done.body.reserved
        assert [bytes(segment) for segment in done.body.segments] == [b"abc", b"", b"de"]


def test_a_message_is_not_complete_before_its_last_byte():
    reader = FrameReader()
    head, chunks = large(1, [b"abc"])
    (announced,) = reader.feed(head)
    assert not announced.body.complete
    assert reader.feed(chunks[0][:-1]) == []
    assert not announced.body.complete
    assert reader.feed(chunks[0][-1:]) == [announced]
    assert announced.body.complete


def test_while_a_large_message_comes_little_else_is_read_at_once():
    reader = FrameReader()
    assert len(reader.get_buffer()) == 4 * SMALL
    reader.feed(large(1, [b"abc"])[0])
    assert len(reader.get_buffer()) == 2048
    reader.feed(large(1, [b"abc"])[1][0])
    assert len(reader.get_buffer()) == 4 * SMALL


def test_only_what_was_reserved_is_given_back():
    room = iter([True, False, True])
    reader = FrameReader(reserve=lambda size: next(room))
    for number, size in enumerate((1000, 2000, 3000)):
        reader.feed(large(number, [bytes(size)])[0])
    given_back = []
    reader.abandon(given_back.append)
    assert given_back == [1000, 3000]
    reader.abandon(given_back.append)
    assert given_back == [1000, 3000]


@st.composite
def spoiled_frames(draw):
    """Good frames, one byte of which is another one."""
    pool = [*FRAMES[:3], frame(CALL, announce(1, 0, [5]), LARGE), frame(CHUNK, b"123", target=1)]
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(pool), min_size=1, max_size=6))))
    data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400) | spoiled_frames(), st.integers(1, 50))
def test_any_bytes_give_frames_or_a_protocol_error_however_they_are_cut(data, piece):
    assert outcome_of(data, piece) == outcome_of(data, max(1, len(data)))


def outcome_of(data, piece):
    reader, found = FrameReader(max_message=1 << 20), []
    try:
        for i in range(0, len(data), piece):
            found += reader.feed(data[i : i + piece])
    except ProtocolError as error:
        return str(error)
    return plain(found), [each.body.complete for each in found if isinstance(each.body, Transfer)]


def test_the_memory_of_a_segment_is_numpys():
    head, chunks = large(1, [b"x" * 70_000])
    *_, done = FrameReader().feed(head + b"".join(chunks))
    assert isinstance(done.body.segments[0], np.ndarray)


def test_a_message_over_the_limit_is_refused_before_there_is_memory_for_it():
    asked = []
    reader = FrameReader(max_message=100, reserve=lambda size: not asked.append(size))
    head, chunks = large(1, [bytes(60), bytes(40)])
    whole = reader.feed(head + b"".join(chunks))[-1].body
    assert whole.complete
    asked.clear()
    with pytest.raises(ProtocolError, match="101 bytes is over the limit"):
        reader.feed(large(2, [bytes(60), bytes(41)])[0])
    assert asked == []


def test_chunks_in_shared_memory_are_copied_to_their_place():
    lent = {b"1": [b"abcd"], b"2": [b"ef"], b"3": [b"g", b"h"]}

    def find(kind, body):
        assert kind == CHUNK
        return Transfer.whole(kind, [np.frombuffer(part, np.uint8) for part in lent[bytes(body)]])

    def chunk(place):
        return frame(CHUNK, place, SHARED, target=1)

    reader = FrameReader(shared=find)
    (announced,) = reader.feed(large(1, [b"12345", b"6"])[0])
    assert reader.feed(chunk(b"1")) == []
    assert reader.feed(chunk(b"2")) == [announced]
    assert [bytes(segment) for segment in announced.body.segments] == [b"abcde", b"f"]
    assert bytes(lent[b"1"][0]) == b"abcd"
    reader.feed(large(1, [b"12"])[0])
    with pytest.raises(ProtocolError, match="a chunk of 2 segments"):
        reader.feed(chunk(b"3"))


def test_a_message_in_memory_of_its_sender_reserves_none_here():
    whole = Transfer.whole(CALL, [np.zeros(3, np.uint8), np.zeros(4, np.uint8)])
    assert (whole.kind, whole.size, whole.complete) == (CALL, 7, True)
    assert not whole.refused
    assert not whole.reserved


def test_a_message_in_shared_memory_is_found_by_who_shares_it():
    def find(kind, body):
        return Transfer.whole(kind, [np.frombuffer(bytes(body), np.uint8)])

    lent = frame(CALL, b"where", LARGE | SHARED, id=3)
    (only,) = FrameReader(shared=find).feed(lent)
    kind, id, whole = only.kind, only.id, only.body
    assert (kind, id, whole.complete) == (CALL, 3, True)
    assert bytes(whole.segments[0]) == b"where"
    with pytest.raises(ProtocolError, match="without any"):
        FrameReader().feed(lent)
