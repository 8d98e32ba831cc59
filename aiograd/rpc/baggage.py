"""Packing and unpacking: a payload, what rides along with it, and the order of both.

    payload encoded ─▶ baggage.depart        baggage.arrive ─▶ payload decoded ─▶ baggage.landed

What rides along is a small dict in front of the payload, present only if there is something in it.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

from aiograd.rpc.travel import Arrival, Departure
from aiograd.wire.frames import Transfer
from aiograd.wire.messages import EXTRA, TRAVELLED
from aiograd.wire.payload import Payload, encode_named

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

_LENGTH = struct.Struct("<I")


def pack(
    agent: Agent, value: Any, departure: Departure, name: str, extra: dict[str, Any] | None = None
) -> tuple[int, Payload]:
    """Encode a message with its baggage; flags and payload. Undoes the departure if that fails."""
    try:
        payload = encode_named(agent.codec, value, departure, name)
        flags = TRAVELLED if payload.travelled else 0
        if departure.held is not None and agent.baggage is not None:
            baggage = agent.baggage.depart(departure.held, departure)
            if baggage is not None:
                extra = {**(extra or {}), "baggage": baggage}
        if extra:
            flags |= EXTRA
            payload = Payload(in_front(extra, payload.data), payload.buffers, payload.travelled)
    except BaseException:
        departure.cancel()
        raise
    return flags, payload


def in_front(extra: dict[str, Any], data: bytes) -> bytes:
    """Put what rides along in front of a payload."""
    first = pickle.dumps(extra, 5)
    return b"".join((_LENGTH.pack(len(first)), first, data))


def split(data: Any) -> tuple[dict[str, Any], Any]:
    """Take what rides along from a payload."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    return pickle.loads(data[_LENGTH.size : start]), data[start:]


def unpack(
    agent: Agent, flags: int, body: Any, arrival: Arrival | None, expect: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Decode a message; its value, and what rode along, which `expect` is told before decoding."""
    segments: Any = body.segments if isinstance(body, Transfer) else (body,)
    data, buffers = segments[0], segments[1:]
    if arrival is None or not flags & (EXTRA | TRAVELLED):
        return agent.codec.decode(data, buffers), {}
    extra: dict[str, Any] = {}
    if flags & EXTRA:
        extra, data = split(data)
        if expect is not None:
            expect(extra)
        if "baggage" in extra and agent.baggage is not None:
            arrival.held = agent.baggage.arrive(extra["baggage"], arrival)
    value = agent.codec.decode(data, buffers, bool(flags & TRAVELLED), arrival)
    if agent.baggage is not None:
        agent.baggage.landed(arrival)
    return value, extra
