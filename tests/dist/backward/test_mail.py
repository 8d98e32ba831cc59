"""Messages of a pass come back from their flat form as they were."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.dist.backward.mail import flatten, unflatten
from aiograd.wire.fastcodec import decode_call, encode_plain

A, B = np.ones((3, 3)), np.arange(4.0)


def test_what_was_flattened_comes_back():
    answers = [(7, [A], None), (8, None, [(0, 5, 1)]), (9, [None, B, A], None)]
    (first, second, third) = unflatten(flatten(answers, []))
    assert first[0] == 7
    assert np.array_equal(first[1][0], A)
    assert second == answers[1]
    assert third[1][0] is None
    assert np.array_equal(third[1][1], B)


def test_a_spread_scalar_comes_back_in_its_shape_and_writable():
    answers = [(1, [np.broadcast_to(np.float32(2), (2, 3)), np.array(5.0)], None)]
    ((_, (spread, scalar), _),) = unflatten(flatten(answers, []))
    assert spread.shape == (2, 3)
    assert spread.dtype == np.float32
    assert spread.flags.writeable
    assert scalar.shape == ()


def test_a_number_that_is_spread_over_a_large_array_travels_alone():
    large = np.broadcast_to(np.float32(0.5), (300, 400))
    lent = []
    flat = flatten([(1, [large], None)], lent)
    assert not lent
    assert len(encode_plain((flat,))) < 200
    ((_, (spread,), _),) = unflatten(flat)
    assert spread.shape == (300, 400)
    assert spread.dtype == np.float32
    assert (spread == 0.5).all()
    assert flatten([(1, [spread], None)], lent) == flat  # and does so to the next worker
    assert not lent


def test_a_row_that_is_shown_again_and_again_travels_once():
    large = np.broadcast_to(np.arange(400.0), (300, 400))
    lent = []
    flat = flatten([(1, [large], None)], lent)
    assert not lent
    assert len(encode_plain((flat,))) < 3500
    ((_, (array,), _),) = unflatten(flat)
    assert np.array_equal(array, large)
    assert array.strides == large.strides
    assert not array.flags.writeable


def test_columns_and_backward_rows_that_are_shown_again_and_again_come_back():
    column = np.broadcast_to(np.arange(300.0)[::-1, None], (300, 400))
    ((_, (array,), _),) = unflatten(flatten([(1, [column], None)], []))
    assert np.array_equal(array, column)
    assert array.strides == (8, 0)


def test_a_large_row_that_is_shown_again_and_again_lends_its_memory_once():
    large = np.broadcast_to(np.arange(100_000.0), (3, 100_000))
    lent = []
    flat = flatten([(1, [large], None)], lent)
    assert [buffer.raw().nbytes for buffer in lent] == [800_000]
    ((_, (array,), _),) = unflatten(flat)
    assert np.array_equal(array, large)
    assert not array.flags.writeable


def test_large_gradients_lend_their_memory():
    large = np.arange(100_000.0)
    lent = []
    flat = flatten([(1, [large, A], None), (2, [large], None)], lent)
    assert [buffer.raw().nbytes for buffer in lent] == [800_000, 800_000]
    args, _ = decode_call(
        encode_plain((flat,), lent), lent=[bytearray(each.raw()) for each in lent]
    )
    ((_, (first, small), _), (_, (again,), _)) = unflatten(args[0])
    large[:] = 0  # what arrived is not looking at it
    assert np.array_equal(first, np.arange(100_000.0))
    assert np.array_equal(again, first)
    assert np.array_equal(small, A)


@pytest.mark.parametrize("gradients", [["no array"], [A.astype(object)]])
def test_what_is_strange_takes_the_general_road(gradients):
    assert flatten([(1, gradients, None)], []) is None
