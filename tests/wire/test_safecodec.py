"""The data-only codec gives back what it took, and nothing but ProtocolError for anything else."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiograd.errors import ProtocolError, SerializationError
from aiograd.wire.codec import Travellers
from aiograd.wire.safecodec import DataCodec

EXAMPLES = int(os.environ.get("AIOGRAD_EXAMPLES", "600"))
CODEC = DataCodec(Travellers())

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)
arrays = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes(endianness="<") | hnp.floating_dtypes(endianness="<"),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


@given(values)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    payload = CODEC.encode(value, None)
    back = CODEC.decode(payload.data, payload.buffers)
    assert back == value
    assert type(back) is type(value)


@given(arrays)
def test_arrays_come_back_equal_writable_and_their_own(array):
    if array.dtype.itemsize > 8:
        return  # long doubles do not travel
    payload = CODEC.encode(array, None)
    back = CODEC.decode(payload.data, payload.buffers)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype
    assert back.flags.writeable
    assert not np.shares_memory(back, array)


@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_lend_their_memory(order):
    array = np.asarray(np.arange(20_000.0).reshape(100, 200), order=order)
    payload = CODEC.encode([array, array.T, array[::2]], None)
    assert len(payload.buffers) == 3
    assert len(payload.data) < 200
    copies = [bytearray(buffer) for buffer in payload.buffers]
    for back, sent in zip(
        CODEC.decode(payload.data, copies), [array, array.T, array[::2]], strict=True
    ):
        np.testing.assert_array_equal(back, sent)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        {1: 2},
        {"f": open},
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, "datetime64[s]"),
        1 << 10_000,
        type,
        {1, 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_that_could_carry_code_is_refused(value):
    with pytest.raises(SerializationError):
        CODEC.encode(value, None)


def test_nesting_is_limited_on_both_sides():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(SerializationError):
        CODEC.encode(deep, None)
    with pytest.raises(ProtocolError):
        CODEC.decode(b"l\x01\x00\x00\x00" * 100 + b"0")


class Gadget:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_only_noise_here(protocol):
    with pytest.raises(ProtocolError):
        CODEC.decode(pickle.dumps(Gadget(), protocol))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"l\xff\xff\xff\xff",
        b"d\xff\xff\xff\xff",
        b"s\xff\xff\xff\xff",
        b"s\x01\x00\x00\x00\xff",
        b"ad\x01C" + (1 << 62).to_bytes(8, "little") + b"m\x00\x00\x00\x00",
        b"ad\x01C" + (2**64 - 1).to_bytes(8, "little") + b"m\x00\x00\x00\x00",
        b"ad\x02C" + (1 << 40).to_bytes(8, "little") * 2 + b"M\x00\x00\x00\x00",
        b"aO\x01C" + (1).to_bytes(8, "little") + b"m\x08\x00\x00\x00" + bytes(8),
        b"ad\xffC",
        b"T\x01\x00\x00\x00x0",
        b"00",
    ],
)
def test_broken_bytes_raise_protocol_error(data):
    with pytest.raises(ProtocolError):
        CODEC.decode(data)


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_error_or_are_a_value(data):
    assert is_refused_or_a_value(data)


def is_refused_or_a_value(data):
    """A value travels on, and is the same again, to the last byte."""
    try:
        value = CODEC.decode(data)
    except ProtocolError:
        return True
    first = CODEC.encode(value, None)
    second = CODEC.encode(CODEC.decode(first.data, first.buffers), None)
    return bytes(first.data) == bytes(second.data) and first.buffers == second.buffers


@settings(max_examples=EXAMPLES)
@given(values | arrays, st.data())
def test_mutated_values_raise_protocol_error_or_are_a_value(value, data):
    try:
        encoded = bytearray(CODEC.encode(value, None).data)
    except SerializationError:
        return
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] = data.draw(st.integers(0, 255))
    assert is_refused_or_a_value(bytes(encoded))
