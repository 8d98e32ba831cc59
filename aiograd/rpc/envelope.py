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
from aiograd.rpc.extension import BOX, FINISH, Arrival, Baggage, Departure, Travellers
from aiograd.wire.codec import Codec, Payload, encode_named
from aiograd.wire.fastcodec import Boxes, decode_call, decode_value, encode_call, encode_value
from aiograd.wire.framing import MAX_SEGMENTS, SMALL, Transfer
from aiograd.wire.messages import BAGGAGE, FAST, KEEP, METADATA, TRAVELLED
from aiograd.wire.safecodec import DataCodec

_LENGTH: Final = struct.Struct("<I")
_LABEL: Final = struct.Struct("<QQI")
_LABEL_SIZE: Final = _LABEL.size
_pack_label: Final = _LABEL.pack
_read_label: Final = _LABEL.unpack_from
_TOKEN: Final = struct.Struct("<H")


class Packer(Protocol):
    """What packing and unpacking needs of a worker."""

    @property
    def travellers(self) -> Travellers:
        """The types that need care on the way, with their travellers."""

    @property
    def baggage(self) -> Baggage | None:
        """What calls and replies carry beside their payload."""


class Route(Protocol):
    """What packing needs of the channel to a peer."""

    @property
    def codec(self) -> Codec | DataCodec:
        """How values are encoded: pickled, or as plain data if either side is restricted."""

    boxes: Boxes  # what the peer is known to take by the fast codec
    # A library's box is added when values of the library have gone both ways by the general codec.
    # What arrived says that the peer has it loaded, what was sent lets the peer know the same.
    box_heard: tuple[Any, Any] | None
    box_told: bool

    @property
    def max_message(self) -> int:
        """Bytes of one message."""


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
    route: Route,
    value: tuple[Any, ...],
    departure: Departure,
    token: bytes | None = None,
    metadata: dict[str, Any] | None = None,
) -> tuple[int, Payload]:
    """Encode `(args, kwargs)` or `(function, args, kwargs)`; flags and body.

    Raises SerializationError for what cannot travel, or is too large for one message; then
    everything that travellers did is undone."""
    try:
        data, flags = None, FAST
        lent: list[Any] = []
        departure.plain = plain = route.codec.plain
        if not plain and len(value) == 2:
            args, kwargs = value
            data = encode_call(args, kwargs, route.boxes, departure, lent)
        if data is None:
            flags, data, lent = _encode(route, value, departure, "call")
        if departure.carried is not None or token is not None or metadata:
            more, head = _head(worker, route, departure, token, metadata)
            flags, data = flags | more, head + data
        payload = Payload(data, lent)
        if lent or len(data) > SMALL:
            check_size(payload, "call", route.max_message)
    except BaseException:
        departure.cancel()
        raise
    return flags, payload


def pack_value(
    worker: Packer,
    route: Route,
    value: Any,
    departure: Departure,
    what: str,
    metadata: dict[str, Any] | None = None,
) -> tuple[int, Payload]:
    """Encode one value: a result, an item, the arguments of a service; flags and body.

    `what` names it in errors; see `pack_call`."""
    try:
        data, flags = None, FAST
        lent: list[Any] = []
        departure.plain = plain = route.codec.plain
        if not plain and what == "result":
            data = encode_value(value, route.boxes, departure, lent)
        if data is None:
            flags, data, lent = _encode(route, value, departure, what)
        if departure.carried is not None or metadata:
            more, head = _head(worker, route, departure, None, metadata)
            flags, data = flags | more, head + data
        payload = Payload(data, lent)
        if lent or len(data) > SMALL:
            check_size(payload, what, route.max_message)
    except BaseException:
        departure.cancel()
        raise
    return flags, payload


def pack_service(
    worker: Packer, route: Route, args: tuple[Any, ...], departure: Departure
) -> tuple[int, Payload]:
    """Encode the arguments of a service; flags and body. See `pack_call`."""
    if not route.codec.plain:
        data = encode_call(args, None)
        if data is not None and len(data) <= SMALL:
            if departure.carried is None:
                return FAST, Payload(data)
            flags, head = _head(worker, route, departure, None, None)
            return FAST | flags, Payload(head + data)
    return pack_value(worker, route, args, departure, f"{departure.kind} arguments")


def _encode(
    route: Route, value: Any, departure: Departure, what: str
) -> tuple[int, bytes, list[Any]]:
    """Encode by the general codec; flags, data and the buffers beside it."""
    departure.scratch.clear()  # of what the fast codec began
    payload = encode_named(route.codec, value, departure, what)
    if BOX in departure.scratch and not route.box_told:
        route.box_told = True
        _add_box(route)
    return (TRAVELLED if payload.travelled else 0), payload.data, list(payload.buffers)


def _head(
    worker: Packer,
    route: Route,
    departure: Departure,
    token: bytes | None,
    metadata: dict[str, Any] | None,
) -> tuple[int, bytes]:
    """Return what comes before a payload: token, label and metadata, and their flags."""
    flags, parts = 0, b""
    if token is not None:
        flags, parts = KEEP, _TOKEN.pack(len(token)) + token
    if departure.carried is not None and worker.baggage is not None:
        label = worker.baggage.depart(departure.carried, departure)
        if label is not None:
            flags |= BAGGAGE
            parts += _pack_label(*label)
    if metadata:
        flags |= METADATA
        parts += _metadata(metadata, route.codec)
    return flags, parts


def _metadata(metadata: dict[str, Any], codec: Codec | DataCodec) -> bytes:
    data = codec.encode(metadata, None).data if codec.plain else pickle.dumps(metadata, 5)
    return _LENGTH.pack(len(data)) + data


def with_metadata(metadata: dict[str, Any], payload: Payload, codec: Codec | DataCodec) -> Payload:
    """Put metadata before a payload that has nothing else before it."""
    return Payload(_metadata(metadata, codec) + payload.data, payload.buffers, payload.travelled)


def check_size(payload: Payload, what: str, most: int) -> None:
    """Raise SerializationError if a payload has more bytes, or pieces, than a message may have."""
    size = payload.size()
    if size > most or len(payload.buffers) >= MAX_SEGMENTS:
        limit = f"max_message is {most}"
        raise SerializationError(what, f"{size} bytes are too many for one message; {limit}")


# ── unpacking ───────────────────────────────────────────────────────────────────────────────────


def open_head(codec: Codec | DataCodec, flags: int, body: Any) -> Head:
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
        label, data = _read_label(data), data[_LABEL_SIZE:]
    if flags & METADATA:
        metadata, data = _open_metadata(data, codec)
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
        arrival.carried = worker.baggage.arrive(_read_label(data), arrival)
    return data[_LABEL_SIZE:]


def take_baggage(worker: Packer, head: Head, arrival: Arrival) -> None:
    """Let the baggage of a message arrive, before its payload is decoded."""
    if head.label is not None and worker.baggage is not None:
        arrival.carried = worker.baggage.arrive(head.label, arrival)


def unpack_value(
    worker: Packer, codec: Codec | DataCodec, flags: int, head: Head, arrival: Arrival
) -> Any:
    """Decode the payload of a reply or an item."""
    take_baggage(worker, head, arrival)
    if flags & FAST:
        return decode_value(head.data, worker.travellers.boxes, arrival, head.buffers)
    return _decode(codec, flags, head, arrival)


def unpack_call(
    worker: Packer, codec: Codec | DataCodec, flags: int, head: Head, arrival: Arrival
) -> Any:
    """Decode the payload of a call, request or post."""
    take_baggage(worker, head, arrival)
    if flags & FAST:
        return decode_call(head.data, worker.travellers.boxes, arrival, head.buffers)
    return _decode(codec, flags, head, arrival)


def hear_of_box(route: Route, arrival: Arrival) -> None:
    """Note that values of a library came by the general codec."""
    if not arrival.restricted:
        route.box_heard = arrival.scratch[BOX]
        if route.box_told:
            _add_box(route)


def _add_box(route: Route) -> None:
    known, box = route.boxes, route.box_heard
    if box is not None and known is not None:
        route.boxes = (known[0], known[1], *box)


def _decode(codec: Codec | DataCodec, flags: int, head: Head, arrival: Arrival) -> Any:
    """Decode by the general codec, and let travellers finish what they could only begin."""
    value = codec.decode(head.data, head.buffers, bool(flags & TRAVELLED), arrival)
    if arrival.scratch:
        finish = arrival.scratch.get(FINISH)
        if finish is not None:
            finish()
    return value
