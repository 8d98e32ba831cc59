"""The envelope: a payload, and what comes before it in the body of a message.

    [token if KEEP] [label if BAGGAGE] [dict if METADATA] payload

    pack:    encode the payload ─▶ baggage.depart         unpack:  baggage.arrive ─▶ decode

The baggage departs after the payload was encoded, because travellers in it may add to the baggage;
on arrival it comes first, because they look for it. The payload is encoded by the fast codec if it
can be, else as the peer may have it: pickled, or as plain data.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from aiograd.errors import ProtocolError, SerializationError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival, Baggage, Departure, Travellers
from aiograd.wire.codec import Codec, Payload, encode_named
from aiograd.wire.fastcodec import decode_call, decode_value, encode_call, encode_value
from aiograd.wire.framing import MAX_SEGMENTS, SMALL, Transfer
from aiograd.wire.messages import BAGGAGE, FAST, KEEP, METADATA, TRAVELLED
from aiograd.wire.safecodec import DataCodec

_LENGTH: Final = struct.Struct("<I")
_LABEL: Final = struct.Struct("<QQI")
_LABEL_SIZE: Final = _LABEL.size
_TOKEN: Final = struct.Struct("<H")


class CodecChoice(Protocol):
    """What knows how to speak with a peer."""

    def codec_for(self, peer: PeerInfo) -> Codec | DataCodec:
        """Return the codec for a peer: for plain data only, if either side is restricted."""


class Packer(CodecChoice, Protocol):
    """What packing and unpacking needs of a worker."""

    @property
    def travellers(self) -> Travellers:
        """The types that need care on the way, with their travellers."""

    @property
    def baggage(self) -> Baggage | None:
        """What calls and replies carry beside their payload."""


class Head(NamedTuple):
    """What came before a payload."""

    token: bytes | None
    label: tuple[int, int, int] | None
    metadata: dict[str, Any]
    data: Any  # the payload
    buffers: Sequence[Any]  # memory beside it


# ── packing ─────────────────────────────────────────────────────────────────────────────────────


def pack_call(
    worker: Packer,
    value: tuple[Any, ...],
    departure: Departure,
    most: int,
    *,
    token: bytes | None = None,
    metadata: dict[str, Any] | None = None,
) -> tuple[int, Payload]:
    """Encode `(args, kwargs)` or `(function, args, kwargs)`; flags and body.

    Raises SerializationError for what cannot travel, or has more than `most` bytes; then everything
    that travellers did is undone."""
    try:
        flags, payload = _encode_call(worker, value, departure)
        return _enclose(worker, flags, payload, departure, "call", most, token, metadata)
    except BaseException:
        departure.cancel()
        raise


def pack_value(
    worker: Packer,
    value: Any,
    departure: Departure,
    what: str,
    most: int,
    *,
    metadata: dict[str, Any] | None = None,
) -> tuple[int, Payload]:
    """Encode one value: a result, an item, the arguments of a service; flags and body.

    `what` names it in errors; see `pack_call`."""
    try:
        flags, payload = _encode_value(worker, value, departure, what)
        return _enclose(worker, flags, payload, departure, what, most, None, metadata)
    except BaseException:
        departure.cancel()
        raise


def pack_service(
    worker: Packer, args: tuple[Any, ...], departure: Departure, most: int
) -> tuple[int, Payload]:
    """Encode the arguments of a service; flags and body. See `pack_call`."""
    if not worker.codec_for(departure.to).plain:
        data = encode_call(args, None)
        if data is not None and len(data) <= SMALL:
            what = f"{departure.kind} arguments"
            return _enclose(worker, FAST, Payload(data), departure, what, most, None, None)
    return pack_value(worker, args, departure, f"{departure.kind} arguments", most)


def _encode_call(
    worker: Packer, value: tuple[Any, ...], departure: Departure
) -> tuple[int, Payload]:
    codec = worker.codec_for(departure.to)
    departure.plain = codec.plain
    if not codec.plain and len(value) == 2:
        lent: list[pickle.PickleBuffer] = []
        args, kwargs = value
        data = encode_call(args, kwargs, worker.travellers.boxes, departure, lent)
        if data is not None:
            return FAST, Payload(data, lent)
    departure.scratch.clear()  # of what the fast codec began
    payload = encode_named(codec, value, departure, "call")
    return (TRAVELLED if payload.travelled else 0), payload


def _encode_value(
    worker: Packer, value: Any, departure: Departure, what: str
) -> tuple[int, Payload]:
    codec = worker.codec_for(departure.to)
    departure.plain = codec.plain
    if not codec.plain and what == "result":
        lent: list[pickle.PickleBuffer] = []
        data = encode_value(value, worker.travellers.boxes, departure, lent)
        if data is not None:
            return FAST, Payload(data, lent)
    departure.scratch.clear()
    payload = encode_named(codec, value, departure, what)
    return (TRAVELLED if payload.travelled else 0), payload


def _enclose(
    worker: Packer,
    flags: int,
    payload: Payload,
    departure: Departure,
    what: str,
    most: int,
    token: bytes | None,
    metadata: dict[str, Any] | None,
) -> tuple[int, Payload]:
    """Put token, label and metadata before a payload, and check the size of all of it."""
    head: list[bytes] = []
    if token is not None:
        flags |= KEEP
        head += (_TOKEN.pack(len(token)), token)
    if departure.carried is not None and worker.baggage is not None:
        label = worker.baggage.depart(departure.carried, departure)
        if label is not None:
            flags |= BAGGAGE
            head.append(_LABEL.pack(*label))
    if metadata:
        flags |= METADATA
        head += _metadata(metadata, worker.codec_for(departure.to))
    if head:
        head.append(payload.data)
        payload = Payload(b"".join(head), payload.buffers, payload.travelled)
    if payload.buffers or len(payload.data) > SMALL:
        check_size(payload, what, most)
    return flags, payload


def _metadata(metadata: dict[str, Any], codec: Codec | DataCodec) -> tuple[bytes, bytes]:
    data = codec.encode(metadata, None).data if codec.plain else pickle.dumps(metadata, 5)
    return _LENGTH.pack(len(data)), data


def with_metadata(metadata: dict[str, Any], payload: Payload, codec: Codec | DataCodec) -> Payload:
    """Put metadata before a payload that has nothing else before it."""
    data = b"".join((*_metadata(metadata, codec), payload.data))
    return Payload(data, payload.buffers, payload.travelled)


def check_size(payload: Payload, what: str, most: int) -> None:
    """Raise SerializationError if a payload has more bytes, or pieces, than a message may have."""
    size = payload.size()
    if size > most or len(payload.buffers) >= MAX_SEGMENTS:
        limit = f"max_message is {most}"
        raise SerializationError(what, f"{size} bytes are too many for one message; {limit}")


# ── unpacking ───────────────────────────────────────────────────────────────────────────────────


def open_head(worker: CodecChoice, sender: PeerInfo, flags: int, body: Any) -> Head:
    """Read what comes before a payload."""
    segments: Sequence[Any] = body.segments if isinstance(body, Transfer) else (body,)
    data, *buffers = segments
    token = label = None
    metadata: dict[str, Any] = {}
    if flags & KEEP:
        (length,) = _TOKEN.unpack_from(data)
        start = _TOKEN.size + length
        token, data = bytes(data[_TOKEN.size : start]), data[start:]
    if flags & BAGGAGE:
        label, data = _LABEL.unpack_from(data), data[_LABEL_SIZE:]
    if flags & METADATA:
        metadata, data = _open_metadata(data, worker.codec_for(sender))
    return Head(token, label, metadata, data, buffers)


def _open_metadata(data: Any, codec: Codec | DataCodec) -> tuple[dict[str, Any], Any]:
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    first, rest = data[_LENGTH.size : start], data[start:]
    metadata = codec.decode(first) if codec.plain else pickle.loads(first)
    if type(metadata) is not dict:
        raise ProtocolError(f"metadata is a dict, not {type(metadata).__name__}")
    return metadata, rest


def take_label(worker: Packer, data: Any, arrival: Arrival) -> Any:
    """Let the baggage of a message arrive that has nothing else before its payload; the payload."""
    if worker.baggage is not None:
        arrival.carried = worker.baggage.arrive(_LABEL.unpack_from(data), arrival)
    return data[_LABEL_SIZE:]


def take_baggage(worker: Packer, head: Head, arrival: Arrival) -> None:
    """Let the baggage of a message arrive, before its payload is decoded."""
    if head.label is not None and worker.baggage is not None:
        arrival.carried = worker.baggage.arrive(head.label, arrival)


def unpack_value(worker: Packer, flags: int, head: Head, arrival: Arrival) -> Any:
    """Decode the payload of a reply or an item."""
    take_baggage(worker, head, arrival)
    if flags & FAST:
        return decode_value(head.data, worker.travellers.boxes, arrival, head.buffers)
    codec = worker.codec_for(arrival.sender)
    return codec.decode(head.data, head.buffers, bool(flags & TRAVELLED), arrival)


def unpack_call(worker: Packer, flags: int, head: Head, arrival: Arrival) -> Any:
    """Decode the payload of a call, request or post."""
    take_baggage(worker, head, arrival)
    if flags & FAST:
        return decode_call(head.data, worker.travellers.boxes, arrival, head.buffers)
    codec = worker.codec_for(arrival.sender)
    return codec.decode(head.data, head.buffers, bool(flags & TRAVELLED), arrival)
