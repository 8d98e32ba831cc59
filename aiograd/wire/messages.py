"""The kinds of messages two workers exchange, and the flags on them.

Every message is one frame (see `frames`), or, when it is large, one announcement and its chunks.

    kind      id          target      body
    DEFINE    –           number      how to find a function, op or service
    FORGET    –           number      –
    CALL      sequence    function    arguments                           answered by REPLY or FAULT
    REQUEST   sequence    service     arguments                           answered by REPLY or FAULT
    POST      sequence    service     arguments                           only if refused: FAULT
    REPLY     of call     –           value
    FAULT     of call     1: a post   what was raised
    CANCEL    of call     –           –
    ITEM      of stream   –           next value of a stream
    CREDIT    of stream   how many    the reader can take so many items more
    CHUNK     –           transfer    the next piece of a large message
    PING      –           –           only says: I am here
    GOODBYE   –           –           an orderly end; nothing follows
    SHM_OFFER      –           –           memory that both sides can see, for large messages
    SHM_ACCEPT    –           1 or 0      whether it could be opened
    SHM_RELEASE    –           –           which blocks of it are free again

How bodies are encoded is `payload`'s affair; who sends what when is `rpc`'s.
"""

from __future__ import annotations

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
    SHM_OFFER: "lend",
    SHM_ACCEPT: "borrow",
    SHM_RELEASE: "return",
}

# Flags
LARGE: Final = 1  # the body lists segment lengths; the segments follow in chunks
TRAVELLED: Final = 2  # the payload holds travellers, so decoding needs an arrival
METADATA: Final = 4  # a second, small payload comes first: baggage, token, …
OP: Final = 8  # a registered op
STREAM: Final = 16  # the call wants items, not one reply
EMPTY: Final = 32  # no payload at all: the value is None
SHARED: Final = 256  # large, but not in chunks: the body says where it lies in lent memory
FAST: Final = 64  # the payload is `flat`'s: numbers, strings and small arrays
NESTED: Final = 512  # a call beyond the window, in the name of one that the callee has made
BAGGAGE: Final = 128  # a label comes before a flat payload: its baggage, as three numbers
KEEP: Final = 1024  # the result stays at the callee, under a token that comes first of all
PIGGYBACK: Final = 2048  # …and a copy of it comes along with the reply; EMPTY | KEEP if it cannot
BATCH: Final = 8192  # several calls of one function, or replies: ids count up, the body is a list
LAZY: Final = 4096  # nobody waits for the answer, or, with PIGGYBACK, has asked for the copy so far

NUMBERED: Final = frozenset({CALL, REQUEST, POST})  # have a sequence number, run at most once
ANSWERS: Final = frozenset({REPLY, FAULT, ITEM})  # of one stream: stay in order
ORDERED: Final = frozenset({REQUEST, POST})  # wait until everything sent earlier has arrived
