"""Where user code made references: the same few lines again and again.

An owner names the line when a value was never given back. It is told with every creation, so both
sides remember what they have seen: the creator the bytes of a place, the owner what they mean.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Final, TypeVar

from aiograd.rref.records import NOWHERE, Place

K = TypeVar("K")
V = TypeVar("V")

_MOST: Final = 1024  # places remembered; a program has few, a rogue invents them
_LONGEST: Final = 1024  # bytes of one


class Places:
    """What one worker knows of places."""

    def __init__(self) -> None:
        # By instruction, and by the address of its code: the hash of code takes a microsecond.
        self._named: dict[tuple[int, int], tuple[CodeType, bytes]] = {}
        self._read: dict[bytes, Place] = {}

    def name(self, frame: FrameType) -> bytes:
        """The line a frame is at, as it travels."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._named.get(key)
        if known is not None and known[0] is code:
            return known[1]
        named = f"{code.co_filename}:{frame.f_lineno}".encode("utf-8", "replace")[-_LONGEST:]
        _remember(self._named, key, (code, named))
        return named

    def read(self, named: bytes) -> Place:
        """What a place that came from elsewhere means."""
        place = self._read.get(named)
        if place is None:
            file, _, line = named[:_LONGEST].decode("utf-8", "replace").rpartition(":")
            place = (file, int(line)) if line.isdecimal() and len(line) < 10 else NOWHERE
            if len(named) <= _LONGEST:
                _remember(self._read, named, place)
        return place


def _remember(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
