"""What goes by value besides plain functions and classes, as another process gets it."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import cloudpickle
import pytest

from aiograd.errors import SerializationError
from aiograd.wire.codec import Codec, Travellers, encode_named


@pytest.fixture
def codec():
    return Codec(Travellers())


def elsewhere(monkeypatch):
    """Let cloudpickle know no class of this process, as in another one."""
    for name in ("_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_DYNAMIC_CLASS_TRACKER_BY_ID"):
        tracker = getattr(cloudpickle.cloudpickle, name)
        monkeypatch.setattr(cloudpickle.cloudpickle, name, type(tracker)())


def sent(codec, monkeypatch, value):
    payload = codec.encode(value, None)
    elsewhere(monkeypatch)
    return codec.decode(payload.data, [], payload.travelled)


def test_classes_that_go_by_value_have_their_slots_at_the_receiver(codec, monkeypatch):
    @dataclass(slots=True)
    class Point:
        x: int
        y: int = 0

    class Secretive:
        __slots__ = ("__hidden",)

        def __init__(self):
            self.__hidden = 1

        def hidden(self):
            return self.__hidden

    class Open(Point):
        pass

    class Pair(NamedTuple):
        left: int
        right: int

    values = [Point(1), Secretive(), Open(3), Pair(4, 5)]
    point, secretive, opened, pair = sent(codec, monkeypatch, values)
    assert pair.right == 5
    assert type(point) is not Point
    assert (point.x, point.y, secretive.hidden(), opened.x) == (1, 0, 1, 3)
    assert not hasattr(point, "__dict__")
    assert not hasattr(secretive, "__dict__")
    assert vars(opened) == {}
    with pytest.raises(AttributeError):
        point.z = 1


def test_cached_functions_go_by_value_with_their_options_and_marks(codec, monkeypatch):
    @functools.lru_cache(maxsize=7, typed=True)
    def double(x):
        return 2 * x

    double.mark = "set on the cached function"
    double(1)
    back = sent(codec, monkeypatch, double)
    assert back is not double
    assert back(4) == 8
    assert back.cache_parameters() == {"maxsize": 7, "typed": True}
    assert back.cache_info().currsize == 1  # what was stored here did not travel
    assert back.mark == double.mark


@functools.cache
def importable(x):
    return x


def test_cached_functions_that_can_be_imported_go_by_name(codec, monkeypatch):
    assert sent(codec, monkeypatch, importable) is importable


def test_cached_properties_travel_with_their_class(codec, monkeypatch):
    class Circle:
        def __init__(self, radius):
            self.radius = radius

        @functools.cached_property
        def area(self):
            """Three times the square."""
            return 3 * self.radius**2

    circle = sent(codec, monkeypatch, Circle(2))
    assert type(circle) is not Circle
    assert (circle.area, vars(circle)) == (12, {"radius": 2, "area": 12})
    assert type(circle).area.__doc__ == "Three times the square."


def test_functions_with_single_dispatch_travel(codec, monkeypatch):
    @functools.singledispatch
    def kind(value):
        return "other"

    kind.register(int, lambda value: "int")
    assert kind(1) == "int"  # fills its cache
    back = sent(codec, monkeypatch, kind)
    assert (back(1), back("a")) == ("int", "other")


def test_dictionaries_with_weak_keys_that_nothing_would_hold_are_refused(codec):
    class Key:
        pass

    key = Key()
    with pytest.raises(SerializationError, match=r"value\['notes'\]"):
        encode_named(codec, {"notes": weakref.WeakKeyDictionary({key: 1})}, None, "value")
