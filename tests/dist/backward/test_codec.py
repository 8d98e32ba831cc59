"""The answers of a gradient message: packed arrays are decoded to the arrays they were."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.dist.backward.codec import decode, encode
from aiograd.wire.fastcodec import decode_call, encode_plain

A, B = np.ones((3, 3)), np.arange(4.0)


def test_encoded_answers_are_decoded_to_the_same_arrays():
    answers = [(7, [A], None), (8, None, [(0, 5, 1)]), (9, [None, B, A], None)]
    (first, second, third) = decode(encode(answers, []))
    assert first[0] == 7
    assert np.array_equal(first[1][0], A)
    assert second == answers[1]
    assert third[1][0] is None
    assert np.array_equal(third[1][1], B)


def test_a_small_broadcast_array_is_decoded_to_a_writable_array():
    answers = [(1, [np.broadcast_to(np.float32(2), (2, 3)), np.array(5.0)], None)]
    ((_, (spread, scalar), _),) = decode(encode(answers, []))
    assert spread.shape == (2, 3)
    assert spread.dtype == np.float32
    assert spread.flags.writeable
    assert scalar.shape == ()


def test_a_large_array_broadcast_from_a_number_is_encoded_as_that_number():
    large = np.broadcast_to(np.float32(0.5), (300, 400))
    buffers = []
    flat = encode([(1, [large], None)], buffers)
    assert not buffers
    assert len(encode_plain((flat,))) < 200
    ((_, (spread,), _),) = decode(flat)
    assert spread.shape == (300, 400)
    assert spread.dtype == np.float32
    assert (spread == 0.5).all()
    assert encode([(1, [spread], None)], buffers) == flat  # and does so to the next worker
    assert not buffers


def test_a_large_array_broadcast_from_a_row_is_encoded_as_that_row():
    large = np.broadcast_to(np.arange(400.0), (300, 400))
    buffers = []
    flat = encode([(1, [large], None)], buffers)
    assert not buffers
    assert len(encode_plain((flat,))) < 3500
    ((_, (array,), _),) = decode(flat)
    assert np.array_equal(array, large)
    assert array.strides == large.strides
    assert not array.flags.writeable


def test_a_broadcast_column_with_negative_strides_is_decoded_to_the_same_array():
    column = np.broadcast_to(np.arange(300.0)[::-1, None], (300, 400))
    ((_, (array,), _),) = decode(encode([(1, [column], None)], []))
    assert np.array_equal(array, column)
    assert array.strides == (8, 0)


def test_a_broadcast_row_that_is_itself_large_is_one_zero_copy_buffer():
    large = np.broadcast_to(np.arange(100_000.0), (3, 100_000))
    buffers = []
    flat = encode([(1, [large], None)], buffers)
    assert [buffer.raw().nbytes for buffer in buffers] == [800_000]
    ((_, (array,), _),) = decode(flat)
    assert np.array_equal(array, large)
    assert not array.flags.writeable


def test_large_gradients_are_zero_copy_buffers():
    large = np.arange(100_000.0)
    buffers = []
    flat = encode([(1, [large, A], None), (2, [large], None)], buffers)
    assert [buffer.raw().nbytes for buffer in buffers] == [800_000, 800_000]
    args, _ = decode_call(
        encode_plain((flat,), buffers), lent=[bytearray(each.raw()) for each in buffers]
    )
    ((_, (first, small), _), (_, (again,), _)) = decode(args[0])
    large[:] = 0  # what arrived is not looking at it
    assert np.array_equal(first, np.arange(100_000.0))
    assert np.array_equal(again, first)
    assert np.array_equal(small, A)


@pytest.mark.parametrize("gradients", [["no array"], [A.astype(object)]])
def test_a_gradient_that_is_no_plain_array_is_left_to_the_general_codec(gradients):
    assert encode([(1, gradients, None)], []) is None


def test_answers_that_were_not_encoded_are_decoded_to_themselves():
    answers = [(7, [A, None], None), (8, None, [(0, 5, 1)])]
    (first, second) = decode(answers)
    assert first[1][0] is A
    assert first[1][1] is None
    assert second == answers[1]
