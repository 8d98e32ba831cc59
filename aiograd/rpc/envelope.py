"""Packing and unpacking: a payload, what rides along with it, and the order of both.

    payload encoded ─▶ baggage.depart        baggage.arrive ─▶ payload decoded

What rides along is a small dict in front of the payload, present only if there is something in it.
Both are encoded as the peer may have it: pickled, or as plain data. On the quick road the baggage
has no need of the dict: it is a label of fixed size between the two.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import ProtocolError, SerializationError
from aiograd.rpc.extension import Arrival, Departure
from aiograd.wire.codec import Payload, encode_named
from aiograd.wire.fastcodec import call_alone as entry_alone
from aiograd.wire.fastcodec import decode_call, decode_value, encode_call, encode_value
from aiograd.wire.framing import MAX_SEGMENTS, SMALL, Transfer
from aiograd.wire.messages import BAGGAGE, FAST, KEEP, METADATA, TRAVELLED

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.wire.codec import Codec
    from aiograd.wire.safecodec import DataCodec

_LENGTH = struct.Struct("<I")
_LABEL = struct.Struct("<QQI")
_LABEL_SIZE = _LABEL.size
_SHORT = struct.Struct("<H")
FITS: Final = SMALL - _LABEL_SIZE  # bytes of a payload that travels in one frame, label or not


def pack(
    agent: Agent,
    value: Any,
    departure: Departure,
    name: str,
    most: int,
    extra: dict[str, Any] | None = None,
) -> tuple[int, Payload]:
    """Encode a message with its baggage, of at most so many bytes; flags and payload.

    Undoes the departure if that fails."""
    codec = agent.codec_for(departure.to)
    departure.plain = codec.plain
    try:
        lent: list[pickle.PickleBuffer] = []
        quick = None if codec.plain else _quick(agent, value, departure, name, lent)
        if quick is not None:
            flags, quick = labelled(agent, quick, departure)
            payload = Payload(quick, lent)
        else:
            departure.scratch.clear()
            payload = encode_named(codec, value, departure, name)
            flags = TRAVELLED if payload.travelled else 0
            if departure.carried is not None and agent.baggage is not None:
                baggage = agent.baggage.depart(departure.carried, departure)
                if baggage is not None:
                    extra = {**(extra or {}), "baggage": baggage}
        if extra:
            flags |= METADATA
            data = in_front(extra, payload.data, codec)
            payload = Payload(data, payload.buffers, payload.travelled)
        check_size(payload, name, most)
    except BaseException:
        departure.cancel()
        raise
    return flags, payload


def check_size(payload: Payload, path: str, most: int) -> None:
    """SerializationError if a payload has more bytes, or pieces, than one message may have."""
    if payload.buffers or len(payload.data) > SMALL:
        size = payload.size()
        if size > most or len(payload.buffers) >= MAX_SEGMENTS:
            limit = f"max_message is {most}"
            raise SerializationError(path, f"{size} bytes are too many for one message; {limit}")


def _quick(
    agent: Agent, value: Any, departure: Departure, name: str, lent: list[pickle.PickleBuffer]
) -> bytes | None:
    """A call or a result by the quick road, if nothing in it needs the general one."""
    boxes = agent.travellers.boxes
    if name == "call":
        if len(value) != 2:
            return None
        return encode_call(value[0], value[1], boxes, departure, lent)
    return encode_value(value, boxes, departure, lent) if name == "result" else None


def labelled(agent: Agent, data: bytes, departure: Departure) -> tuple[int, bytes]:
    """Put the baggage of a flat payload before it; its flags, and all of it."""
    if departure.carried is not None and agent.baggage is not None:
        baggage = agent.baggage.depart(departure.carried, departure)
        if baggage is not None:
            return FAST | BAGGAGE, _LABEL.pack(*baggage) + data
    return FAST, data


def unlabelled(agent: Agent, data: Any, arrival: Arrival) -> Any:
    """Take in the baggage before a flat payload; what is left is the payload."""
    if agent.baggage is not None:
        arrival.carried = agent.baggage.arrive(_LABEL.unpack_from(data), arrival)
    return data[_LABEL_SIZE:]


def in_front(extra: dict[str, Any], data: bytes, codec: Codec | DataCodec | None = None) -> bytes:
    """Put what rides along in front of a payload, pickled unless the codec is for plain data."""
    if codec is None or not codec.plain:
        first = pickle.dumps(extra, 5)
    else:
        first = codec.encode(extra, None).data
    return b"".join((_LENGTH.pack(len(first)), first, data))


def split(data: Any, codec: Codec | DataCodec | None = None) -> tuple[dict[str, Any], Any]:
    """Take what rides along from a payload."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    first, rest = data[_LENGTH.size : start], data[start:]
    if codec is None or not codec.plain:
        return pickle.loads(first), rest
    extra = codec.decode(first)
    if type(extra) is not dict:
        raise ProtocolError("what rides along is not a dict")
    return extra, rest


def keep_in_front(token: bytes, data: bytes) -> bytes:
    """Put the token of a result that stays in front of a flat payload."""
    return b"".join((_SHORT.pack(len(token)), token, data))


def call_alone(flags: int, entry: Any) -> bytes:
    """The payload of a call that came in a row, as if it had come alone."""
    if not flags & KEEP:
        return entry_alone(entry)
    token, entry = entry
    return keep_in_front(token, entry_alone(entry))


def split_kept(data: Any) -> tuple[bytes, Any]:
    """Take the token from a payload."""
    (length,) = _SHORT.unpack_from(data)
    start = _SHORT.size + length
    return bytes(data[_SHORT.size : start]), data[start:]


def unpack(
    agent: Agent, flags: int, body: Any, arrival: Arrival, expect: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Decode a message; its value, and what rode along, which `expect` is told before decoding."""
    segments: Any = body.segments if isinstance(body, Transfer) else (body,)
    data, buffers = segments[0], segments[1:]
    codec = agent.codec_for(arrival.sender)
    if not flags & (METADATA | TRAVELLED | FAST):
        return codec.decode(data, buffers, False, arrival), {}
    extra: dict[str, Any] = {}
    if flags & METADATA:
        extra, data = split(data, codec)
        if expect is not None:
            expect(extra)
        if "baggage" in extra and agent.baggage is not None:
            arrival.carried = agent.baggage.arrive(extra["baggage"], arrival)
    if not flags & FAST:
        return codec.decode(data, buffers, bool(flags & TRAVELLED), arrival), extra
    if flags & BAGGAGE:
        data = unlabelled(agent, data, arrival)
    decode = decode_value if arrival.kind == "reply" else decode_call
    return decode(data, agent.travellers.boxes, arrival, buffers), extra
