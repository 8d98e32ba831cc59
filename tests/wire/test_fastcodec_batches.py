"""Calls and replies that share a frame."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from aiograd.errors import ProtocolError
from aiograd.wire.fastcodec import (
    NOT_BATCHABLE,
    decode_batch,
    decode_call_entry,
    decode_value_entry,
    encode_batch,
    encode_call_entry,
    encode_value_entry,
)


class Boxed:
    def __init__(self, array, note):
        self.array, self.note = array, note


class Opener:
    def open(self, value, departure):
        return None if value.note < 0 else (value.array, value.note)

    def close(self, array, note, arrival):
        return Boxed(array, note)


BOXES = (Boxed, Opener(), None, None)
SMALL = [
    0,
    -(1 << 63),
    1.5,
    "ä" * 1000,
    b"x" * 1000,
    True,
    None,
    2j,
]


def sent(*calls):
    """What arrives of calls with these arguments, in a row."""
    entries = [encode_call_entry(args, BOXES) for args in calls]
    assert NOT_BATCHABLE not in entries
    return [decode_call_entry(entry, BOXES) for entry in decode_batch(encode_batch(entries))]


@pytest.mark.parametrize("value", SMALL, ids=lambda value: type(value).__name__)
def test_a_small_value_comes_as_it_is(value):
    ((arrived,),) = sent((value,))
    assert arrived == value
    assert type(arrived) is type(value)
    entry = encode_value_entry(value, BOXES)
    assert decode_value_entry(entry, BOXES) == value


def test_arguments_of_each_call_are_its_own():
    assert sent((), (1, "a"), (None,)) == [(), (1, "a"), (None,)]


def test_an_array_is_a_snapshot_that_its_receiver_may_write_to():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    entry = encode_call_entry((array, 2), BOXES)
    array[:] = 0
    arrived, two = decode_call_entry(decode_batch(encode_batch([entry]))[0], BOXES)
    assert (arrived == np.arange(6).reshape(2, 3)).all()
    assert arrived.dtype == np.float32
    assert two == 2
    arrived += 1


def test_arrays_of_two_calls_share_nothing():
    array = np.zeros(3)
    (one,), (two,) = sent((array,), (array,))
    one += 1
    assert (two == 0).all()


def test_a_box_given_twice_stays_one_object():
    box = Boxed(np.ones(2), 7)
    ((one, three, other, two),) = sent((box, 3, Boxed(np.zeros(2), 8), box))
    assert one is two
    assert one is not other
    assert (one.note, three, other.note) == (7, 3, 8)


@pytest.mark.parametrize(
    "value",
    [
        1 << 64,
        -(1 << 64),
        "x" * 1001,
        b"x" * 1001,
        [1],
        (1,),
        {},
        object(),
        np.float32(1),
        np.zeros(600),
        np.zeros((4, 4)).T[1:],
        np.array(["text"], dtype=object),
        Boxed(np.zeros(2), -1),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'shape', '')}",
)
def test_what_is_large_or_needs_care_travels_alone(value):
    assert encode_call_entry((1, value), BOXES) is NOT_BATCHABLE
    assert encode_call_entry((np.zeros(1), value), BOXES) is NOT_BATCHABLE
    assert encode_value_entry(value, BOXES) is NOT_BATCHABLE


def test_many_arguments_travel_alone():
    assert encode_call_entry((0,) * 8, BOXES) is not NOT_BATCHABLE
    assert encode_call_entry((0,) * 9, BOXES) is NOT_BATCHABLE


def test_without_boxes_there_are_arrays_only():
    assert encode_call_entry((Boxed(np.zeros(1), 0),), None) is NOT_BATCHABLE
    (arrived,) = decode_call_entry(encode_call_entry((np.ones(1),), None), None)
    assert arrived == 1


def test_a_class_that_pretends_to_be_a_number_is_none():
    class Pretender:
        __class__ = int

    assert encode_call_entry((Pretender(),), BOXES) is NOT_BATCHABLE


def test_the_largest_entries_fit_into_a_frame():
    from aiograd.wire.framing import SMALL as FRAME

    largest = [np.zeros(512), "\U0001f600" * 1000, b"x" * 1000, (1 << 64) - 1]
    for value in largest:
        entry = encode_call_entry((value,) * 8, BOXES)
        assert entry is not NOT_BATCHABLE
        assert len(encode_batch([entry])) + 64 < FRAME


def test_a_row_that_is_none_is_refused():
    with pytest.raises(ProtocolError, match="not tuple"):
        decode_batch(pickle.dumps((1, 2)))
