"""The kinds of messages two workers exchange, their flags, and which flags go together.

Every message is one frame (see `framing`), or, when it is large, one announcement and its chunks.

    kind         id          target      body
    DEFINE       –           number      how to find a function, op or service
    FORGET       –           number      –
    CALL         sequence    function    arguments                     answered by REPLY or FAULT
    REQUEST      sequence    service     arguments                     answered by REPLY or FAULT
    POST         sequence    service     arguments                     only if refused: FAULT
    REPLY        of call     –           value
    FAULT        of call     1: a post   the exception
    CANCEL       of call     –           –
    ITEM         of stream   –           next value of a stream
    CREDIT       of stream   count       how many more items the reader can take
    CHUNK        –           transfer    the next piece of a large message
    PING         position    1: answer   a heartbeat; bytes of the session received so far
    SLEEP        position    connection  nothing is under way: the connection may be closed
    GOODBYE      –           –           an orderly end; nothing follows
    SHM_OFFER    –           –           memory that both sides can map, for large messages
    SHM_ACCEPT   –           1 or 0      whether it could be mapped
    SHM_RELEASE  –           1: awaited  blocks of it that are free again

The body of a CALL, REQUEST, POST, REPLY or ITEM is an envelope (`rpc.envelope`):

    [token if KEEP] [label if BAGGAGE] [dict if METADATA] payload

The payload is encoded by `fastcodec` if FAST is set, else by `codec`, or by `safecodec` for peers
that may not run code here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

DEFINE: Final = 1
FORGET: Final = 2
CALL: Final = 3
REQUEST: Final = 4
POST: Final = 5
REPLY: Final = 6
FAULT: Final = 7
CANCEL: Final = 8
ITEM: Final = 9
CREDIT: Final = 10
CHUNK: Final = 11
PING: Final = 12
GOODBYE: Final = 13
SLEEP: Final = 14
SHM_OFFER: Final = 20
SHM_ACCEPT: Final = 21
SHM_RELEASE: Final = 22

KINDS: Final = {
    DEFINE: "define",
    FORGET: "forget",
    CALL: "call",
    REQUEST: "request",
    POST: "post",
    REPLY: "reply",
    FAULT: "fault",
    CANCEL: "cancel",
    ITEM: "item",
    CREDIT: "credit",
    CHUNK: "chunk",
    PING: "ping",
    GOODBYE: "goodbye",
    SLEEP: "sleep",
    SHM_OFFER: "shm offer",
    SHM_ACCEPT: "shm accept",
    SHM_RELEASE: "shm release",
}

# ── flags ───────────────────────────────────────────────────────────────────────────────────────

LARGE: Final = 1  # the body lists segment lengths; the segments follow in chunks
TRAVELLED: Final = 2  # the payload holds travellers, so decoding needs an arrival
METADATA: Final = 4  # a small dict comes before the payload: recording, spans
OP: Final = 8  # the target is a registered op
STREAM: Final = 16  # the call wants items, not one reply
EMPTY: Final = 32  # no envelope at all: the value is None
FAST: Final = 64  # the payload is `fastcodec`'s: numbers, strings and arrays, not nested
BAGGAGE: Final = 128  # a label comes before the payload: three numbers
SHARED: Final = 256  # large, but not in chunks: the body says where it lies in shared memory
NESTED: Final = 512  # a call beyond the window, made by a call that the callee has made here
KEEP: Final = 1024  # the result stays at the callee, under the token that comes first
PIGGYBACK: Final = 2048  # with KEEP: the reply brings a copy; EMPTY | KEEP if it cannot
LAZY: Final = 4096  # nobody waits for the answer: it may wait for other messages
BATCH: Final = 8192  # several calls of one function, or replies: ids count up, the body is a list

# Of a DEFINE, which has no envelope: the same bits mean something else.
BY_VALUE: Final = 1 << 13  # with EXPOSED: a line with the name, then the pickled function
EXPOSED: Final = 1 << 14  # the name of an exposed function
SERVICE: Final = 1 << 15  # the name of a service

# ── groups of kinds ─────────────────────────────────────────────────────────────────────────────

NUMBERED: Final = frozenset({CALL, REQUEST, POST})  # have a sequence number, run at most once
ANSWERS: Final = frozenset({REPLY, FAULT, ITEM})  # of one stream: stay in order
ORDERED: Final = frozenset({REQUEST, POST})  # wait until everything sent earlier has arrived

# ── which flags go together ─────────────────────────────────────────────────────────────────────

_SIZE: Final = LARGE | SHARED
_GENERAL: Final = TRAVELLED | METADATA | BAGGAGE | _SIZE
_CALL: Final = KEEP | PIGGYBACK | OP | STREAM | NESTED

# (kind, flags that are set, flags that may be set besides). A frame that fits none of these lines
# is a protocol error: the receiver never has to think about a combination that nobody sends.
FORMS: Final = (
    (DEFINE, 0, 0),
    (DEFINE, OP, 0),
    (DEFINE, SERVICE, 0),
    (DEFINE, EXPOSED, BY_VALUE),
    (FORGET, 0, 0),
    (CALL, 0, _GENERAL | _CALL),
    (CALL, FAST, BAGGAGE | METADATA | _SIZE | _CALL),
    (CALL, FAST | BATCH, OP | KEEP | PIGGYBACK | NESTED),
    (REQUEST, 0, _GENERAL),
    (REQUEST, FAST, BAGGAGE | LAZY),
    (POST, 0, _GENERAL),
    (POST, FAST, BAGGAGE | _SIZE),
    (REPLY, EMPTY, KEEP),
    (REPLY, 0, _GENERAL),
    (REPLY, FAST, BAGGAGE | METADATA | _SIZE),
    (REPLY, FAST | BATCH, 0),
    (FAULT, 0, METADATA | _SIZE),
    (ITEM, 0, _GENERAL),
    (CANCEL, 0, 0),
    (CREDIT, 0, 0),
    (CHUNK, 0, 0),
    (CHUNK, SHARED, 0),
    (PING, 0, 0),
    (GOODBYE, 0, 0),
    (SLEEP, 0, 0),
    (SHM_OFFER, 0, 0),
    (SHM_ACCEPT, 0, 0),
    (SHM_RELEASE, 0, 0),
)


def _combinations(kind: int, required: int, optional: int) -> Iterator[int]:
    subset = optional
    while True:
        flags = required | subset
        # Shared memory is for large messages only, and a copy comes only of a result that stays.
        lone_chunk = kind == CHUNK
        if (flags & _SIZE != SHARED or lone_chunk) and flags & (KEEP | PIGGYBACK) != PIGGYBACK:
            yield flags
        if not subset:
            return
        subset = (subset - 1) & optional


# `kind << 16 | flags` of every legal frame. A set of integers, because every frame is looked up.
LEGAL: Final = frozenset(
    kind << 16 | flags for kind, *form in FORMS for flags in _combinations(kind, *form)
)


def describe_flags(flags: int) -> str:
    """Name the flags of a call, request or answer, for error messages."""
    names = [name for name, value in _FLAGS.items() if flags & value]
    return " | ".join(names) or "no flags"


_FLAGS: Final = {
    "LARGE": LARGE,
    "TRAVELLED": TRAVELLED,
    "METADATA": METADATA,
    "OP": OP,
    "STREAM": STREAM,
    "EMPTY": EMPTY,
    "FAST": FAST,
    "BAGGAGE": BAGGAGE,
    "SHARED": SHARED,
    "NESTED": NESTED,
    "KEEP": KEEP,
    "PIGGYBACK": PIGGYBACK,
    "LAZY": LAZY,
    "BATCH": BATCH,
}
