"""The kinds of messages, their flags, and which flags go together."""

from __future__ import annotations

import struct

import pytest

from aiograd.errors import ProtocolError
from aiograd.wire import messages
from aiograd.wire.framing import Frame, FrameReader, announce, pack_header
from aiograd.wire.messages import (
    BATCH,
    CALL,
    CHUNK,
    DEFINE,
    EXPOSED,
    FAST,
    FORMS,
    KEEP,
    KINDS,
    LARGE,
    LEGAL,
    PIGGYBACK,
    PING,
    REPLY,
    SERVICE,
    SHARED,
    TRAVELLED,
    describe_flags,
)

FLAGS = "LARGE TRAVELLED METADATA OP STREAM EMPTY FAST BAGGAGE SHARED NESTED KEEP PIGGYBACK".split()
FLAGS += ["LAZY", "BATCH"]
OF_DEFINE = ["BY_VALUE", "EXPOSED", "SERVICE"]


def test_every_flag_is_a_bit_of_its_own():
    values = [getattr(messages, name) for name in FLAGS] + [EXPOSED, SERVICE]
    assert all(value.bit_count() == 1 and value < 1 << 16 for value in values)
    assert len(set(values)) == len(values)


def test_every_kind_has_a_number_of_its_own_and_a_name():
    kinds = [
        value
        for name, value in vars(messages).items()
        if name.isupper()
        and not name.startswith("_")
        and isinstance(value, int)
        and name not in FLAGS + OF_DEFINE
    ]
    assert sorted(kinds) == sorted(messages.KINDS)
    assert len(set(messages.KINDS.values())) == len(messages.KINDS)


def test_every_kind_has_a_legal_form():
    assert {kind for kind, *_ in FORMS} == KINDS.keys()


def test_shared_memory_is_for_large_messages_and_copies_are_of_what_stays():
    for each in LEGAL:
        kind, flags = each >> 16, each & 0xFFFF
        if kind not in (DEFINE, CHUNK):
            assert not flags & SHARED or flags & LARGE
            assert not flags & PIGGYBACK or flags & KEEP
        if flags & BATCH and kind != DEFINE:
            assert flags & FAST
            assert not flags & (LARGE | TRAVELLED)


def golden(kind: int, flags: int) -> bytes:
    """A frame as it has been on the wire since version 6, packed by hand."""
    body = b"" if kind in (PING,) else b"body"
    if flags & LARGE and not flags & SHARED:
        body = announce(1, 5, [3])
    header = struct.pack("<BBHIQfI", 0xA9, kind, flags, len(body), 7, 1.5, 5)
    return header + body


@pytest.mark.parametrize("each", sorted(LEGAL), ids=lambda each: f"{each >> 16}-{each & 0xFFFF:#x}")
def test_a_frame_of_every_legal_form_is_read_as_it_was_packed(each):
    kind, flags = each >> 16, each & 0xFFFF
    if kind == CHUNK:
        return  # pieces of large messages: see test_framing
    data = golden(kind, flags)
    length = len(data) - 24
    assert data[:24] == pack_header(kind, flags, length, 7, 1.5, 5)
    (frame,) = FrameReader(shared=lambda kind, body: bytes(body)).feed(data)
    assert isinstance(frame, Frame)
    assert frame == Frame(kind, flags, 7, 1.5, 5, frame.body)


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        (REPLY, FAST | TRAVELLED, "reply frame with TRAVELLED | FAST"),
        (CALL, PIGGYBACK, "call frame with PIGGYBACK"),
        (CALL, SHARED, "call frame with SHARED"),
        (CALL, BATCH, "call frame with BATCH"),
        (PING, FAST, "ping frame with FAST"),
    ],
)
def test_flags_that_do_not_go_together_are_a_protocol_error(kind, flags, words):
    with pytest.raises(ProtocolError) as caught:
        FrameReader().feed(pack_header(kind, flags, 0, 1, 1.0, 0))
    assert words in str(caught.value)


def test_flags_are_described_by_name():
    assert describe_flags(FAST | KEEP) == "FAST | KEEP"
    assert describe_flags(0) == "no flags"
