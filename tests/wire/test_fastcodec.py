"""The quick road, which must agree with the general one."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.wire.fastcodec import BORROW_FROM, decode_call, decode_value, encode_call, encode_value


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), None), ((1, 2.5, "x", b"y", None, True), None), ((1,), {"k": "v"}), ((1 + 2j,), {})],
)
def test_numbers_and_strings_go_as_they_are(args, kwargs):
    data = encode_call(args, kwargs)
    assert data is not None
    assert decode_call(data) == (args, kwargs)


def test_small_arrays_arrive_writable_and_apart():
    x = np.arange(9.0).reshape(3, 3)
    data = encode_call((x, 2, x), None)
    assert data is not None
    x[:] = 0
    (one, two, three), kwargs = decode_call(data)
    assert (one == np.arange(9.0).reshape(3, 3)).all()
    one[0, 0] = 5
    assert (two, kwargs) == (2, None)
    assert three.dtype == np.float64


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1,),
        {"a": 1},
        np.zeros(BORROW_FROM),
        np.zeros((4, 4))[:, 1],
        np.array(["text"]),
        np.array([object()]),
        np.float64(1.0),
    ],
)
def test_everything_else_is_left_to_the_codec(value):
    assert encode_call((value,), None) is None
    assert encode_call((), {"k": value}) is None
    assert encode_value(value) is None


@pytest.mark.parametrize("value", [None, 1, "x", 2.5, np.arange(6).reshape(2, 3), np.array(1.0)])
def test_results_come_back(value):
    data = encode_value(value)
    assert data is not None
    back = decode_value(data)
    assert type(back) is type(value)
    assert np.array_equal(back, value) if value is not None else back is None


def _received(lent):
    return [bytearray(buffer.raw()) for buffer in lent]


@pytest.mark.parametrize("dtype", ["f4", "c16", "e", "?", "i8"])
def test_large_arrays_are_lent_if_there_is_a_list_to_lend_them_to(dtype):
    x, small = np.ones((BORROW_FROM, 2), dtype), np.arange(3.0)
    lent = []
    data = encode_call((x, small, "y"), {"k": 1}, lent=lent)
    assert len(lent) == 1
    assert len(data) < 500
    (back, tiny, text), kwargs = decode_call(data, lent=_received(lent))
    assert back.dtype == x.dtype
    assert back.flags.writeable
    assert np.array_equal(back, x)
    assert (tiny.tolist(), text, kwargs) == ([0.0, 1.0, 2.0], "y", {"k": 1})


def test_a_large_result_is_lent():
    x, lent = np.arange(BORROW_FROM), []
    data = encode_value(x, lent=lent)
    assert np.array_equal(decode_value(data, lent=_received(lent)), x)


def test_large_arrays_that_come_twice_or_cannot_be_written_take_the_general_road():
    x = np.arange(BORROW_FROM)
    assert encode_call((x, x), None, lent=[]) is None  # which keeps them one
    x.flags.writeable = False
    assert encode_call((x,), None, lent=[]) is None
    assert encode_value(x, lent=[]) is None
