"""Values to bytes and back."""

from __future__ import annotations

import collections
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from aiograd.errors import RRefReleased, SerializationError
from aiograd.wire.codec import BORROW_FROM, Codec, Travellers, encode_named


@pytest.fixture
def codec():
    return Codec(Travellers())


def round_trip(codec, value, **kw):
    payload = codec.encode(value, None)
    # As the wire does it: every buffer arrives in memory of its own.
    buffers = [np.frombuffer(bytearray(memoryview(b)), np.uint8) for b in payload.buffers]
    return codec.decode(payload.data, buffers, payload.travelled, **kw)


ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(24).reshape(2, 3, 4)[:, ::2, ::-1],
    np.array(3.5),
    np.empty((0, 3), np.float32),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.array(["a", "bcd"]),
    np.array([b"xy"]),
    np.array(["2020-01-01"], "M8[D]"),
    np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    np.arange(5, dtype=">i4"),
    np.broadcast_to(np.arange(3.0), (4, 3)),
    np.arange(BORROW_FROM // 4, dtype=np.float64).reshape(2, -1),
    np.asfortranarray(np.arange(BORROW_FROM // 4, dtype=np.float64).reshape(2, -1)),
    np.arange(BORROW_FROM).astype("M8[s]"),
    np.arange(BORROW_FROM, dtype=np.float16)[::2],
    np.zeros(BORROW_FROM, dtype=[("a", "i4"), ("b", "f8")]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}-{a.shape}")
def test_arrays_keep_value_dtype_shape_and_order_and_are_writable(codec, array):
    back = round_trip(codec, [array])[0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable
    if array.flags.c_contiguous or array.flags.f_contiguous:
        assert back.flags.f_contiguous == array.flags.f_contiguous


def test_arrays_of_objects_go_element_by_element(codec):
    array = np.array([1, "two", [3.0], None], dtype=object)
    back = round_trip(codec, array)
    assert back.tolist() == array.tolist()


def test_read_only_arrays_arrive_writable(codec):
    for size in (3, BORROW_FROM):
        array = np.frombuffer(b"\1" * size, np.uint8)
        assert not array.flags.writeable
        back = round_trip(codec, array)
        back[:] = 2
        assert array[0] == 1


def test_small_arrays_are_copied_and_large_ones_borrowed(codec):
    small, large = np.zeros(10), np.zeros(BORROW_FROM)
    payload = codec.encode((small, large), None)
    assert len(payload.buffers) == 1
    small[0] = large[0] = 9
    back = codec.decode(payload.data, payload.buffers)
    assert back[0][0] == 0
    assert back[1][0] == 9


def test_shared_references_stay_shared(codec):
    array = np.zeros(3)
    one, two = round_trip(codec, [array, {"again": array}])
    assert one is two["again"]


Point = collections.namedtuple("Point", "x y")


def test_call_containers(codec):
    array = np.arange(3)
    value = {"list": [array], "point": Point(array, 1), "dict": {"k": array}, "set": {1, 2}}
    back = round_trip(codec, value)
    assert back["list"][0] is back["point"].x is back["dict"]["k"]
    assert isinstance(back["point"], Point)
    assert back["set"] == {1, 2}


class HashableArray(np.ndarray):
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def test_an_array_as_a_key(codec):
    key = np.arange(3).view(HashableArray)
    (back,) = round_trip(codec, {key: 1})
    assert back.tolist() == [0, 1, 2]


class Nested:
    """An argument whose own pickling encodes another payload."""

    def __init__(self, codec, value):
        self.codec, self.value = codec, value

    def __reduce__(self):
        inner = self.codec.encode(self.value, None)
        return bytes, (inner.data,)


def test_call_nested_pickle(codec):
    outer = [np.arange(3), Nested(codec, [np.arange(4)]), np.arange(5)]
    first, inner, last = round_trip(codec, outer)
    assert (first.size, last.size) == (3, 5)
    assert pickle.loads(inner)[0].tolist() == [0, 1, 2, 3]


def test_functions_that_cannot_be_imported_go_by_value(codec):
    factor = 3
    triple = round_trip(codec, lambda x: x * factor)
    assert triple(5) == 15


def test_functions_that_can_be_imported_go_by_reference(codec):
    assert round_trip(codec, {"f": np.linalg.norm})["f"] is np.linalg.norm
    assert len(codec.encode(socket.gethostname, None).data) < 60


# ── travellers ──────────────────────────────────────────────────────────────────────────────────


class Ticket:
    def __init__(self, value):
        self.value = value


class Special(Ticket):
    pass


class TicketTraveller:
    tag = "ticket"

    def depart(self, value, departure):
        departure.append(value)
        return {"v": value.value}

    def arrive(self, data, arrival):
        arrival.append(data)
        return Ticket(data["v"])


@dataclass
class Holder:
    name: str
    inside: object


def test_travellers_are_found_at_any_depth(codec):
    codec.travellers.add(Ticket, TicketTraveller())
    departed: list = []
    value = [Holder("h", {"deep": (Ticket(1), Special(2))})]
    payload = codec.encode(value, departed)
    assert payload.travelled
    arrived: list = []
    back = codec.decode(payload.data, payload.buffers, True, arrived)
    one, two = back[0].inside["deep"]
    assert (one.value, two.value) == (1, 2)
    assert [t.value for t in departed] == [1, 2]
    assert arrived == [{"v": 1}, {"v": 2}]


def test_a_traveller_that_appears_twice_travels_once(codec):
    codec.travellers.add(Ticket, TicketTraveller())
    departed: list = []
    ticket = Ticket(1)
    payload = codec.encode([ticket, ticket], departed)
    one, two = codec.decode(payload.data, payload.buffers, True, [])
    assert one is two
    assert len(departed) == 1


def test_travellers_registered_later_are_noticed(codec):
    codec.encode(Ticket(1), [])
    codec.travellers.add(Ticket, TicketTraveller())
    assert codec.encode(Ticket(1), []).travelled


def test_payloads_without_travellers_say_so(codec):
    codec.travellers.add(Ticket, TicketTraveller())
    assert not codec.encode([np.zeros(3), "x"], []).travelled


# ── what cannot travel ──────────────────────────────────────────────────────────────────────────


class Thing:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("lock",)


def path_of(codec, args, kwargs=None):
    with pytest.raises(SerializationError) as caught:
        encode_named(codec, (args, kwargs), None, "call")
    return caught.value.path


def test_what_cannot_travel_is_named_by_its_path(codec):
    lock = threading.Lock()
    assert path_of(codec, (1, lock)) == "args[1]"
    assert path_of(codec, ({"x": [Thing(lock=lock)]},)) == "args[0]['x'][0].lock"
    assert path_of(codec, (), {"key": (lock,)}) == "kwargs['key'][0]"
    slotted = Slotted()
    slotted.lock = lock
    assert path_of(codec, (slotted,)) == "args[0].lock"
    assert path_of(codec, ((i for i in ()),)) == "args[0]"
    assert path_of(codec, (lambda: lock,)) == "args[0].lock"


def test_open_files_and_sockets_are_refused(codec, tmp_path):
    with open(tmp_path / "f", "w+") as file, socket.socket() as sock:
        assert path_of(codec, ([file],)) == "args[0][0]"
        assert path_of(codec, (file.buffer,)) == "args[0]"
        assert path_of(codec, (Thing(s=sock),)) == "args[0].s"
    assert round_trip(codec, io.BytesIO(b"abc")).read() == b"abc"


def test_cycles_do_not_hide_the_culprit(codec):
    a: dict = {}
    a["self"], a["bad"] = a, threading.Lock()
    assert path_of(codec, (a,)) == "args[0]['bad']"


def test_nesting_that_is_too_deep_is_a_serialization_error(codec):
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert path_of(codec, (value,)) == "call"


def test_an_error_in_a_reducer_is_reported_with_its_text(codec):
    class Rude:
        def __reduce__(self):
            raise ValueError("not me")

    with pytest.raises(SerializationError, match="not me") as caught:
        encode_named(codec, ((Rude(),), None), None, "call")
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_a_traveller_refuses_is_raised_as_it_is(codec):
    class Gone:
        tag = "gone"

        def depart(self, value, departure):
            raise RRefReleased("released")

    codec.travellers.add(Thing, Gone())
    with pytest.raises(RRefReleased):
        encode_named(codec, ((Thing(),), None), None, "call")


def test_a_failed_encoding_leaves_nothing_behind(codec):
    with pytest.raises(SerializationError):
        encode_named(codec, (np.zeros(BORROW_FROM), threading.Lock()), None, "result")
    payload = codec.encode([1, 2], None)
    assert payload.buffers == []
    assert codec.decode(payload.data) == [1, 2]


COLLECTS = """
import gc
from aiograd.wire.codec import Codec, Travellers

class Temporary:
    def __reduce__(self):
        return str, ("x",)

    def __del__(self):
        gc.collect()

class Sent:
    def __reduce__(self):
        return list, (tuple([[Temporary(), (str(i),)] for i in range(8)]),)

codec = Codec(Travellers())
for _ in range(5):
    codec.encode([Sent(), Sent()], None)
"""


def test_a_collection_while_a_pickler_forgets_what_reducers_made_finds_no_freed_object():
    # With the debug allocator freed memory is overwritten: the crash is certain.
    environ = {**os.environ, "PYTHONMALLOC": "debug"}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", COLLECTS],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
