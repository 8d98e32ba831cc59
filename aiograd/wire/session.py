"""A session: two streams of bytes that go on over one connection after another.

Both sides count the bytes of each direction, and keep what they sent until the other one says that
it came. When a connection breaks, the side that dialled it dials again; in the handshake each tells
how much it has received, and the other goes on from there. So every byte arrives once and in order,
whatever was cut in the middle of what, and nothing above has to know:

    sent      ├── known to have come ──┼────── kept ──────┤
    received  ├───────────────────────────────┤             the next connection goes on here

Memory is bounded: beyond `limit` bytes the oldest are let go, and who needs them cannot resume.

A session that is lost never goes on, but the two may begin another one. So a session has an id: the
number of the dial that began it. Every offer names the session it is about, and dials have rising
numbers. Together they keep what is late out of a session that it does not belong to:

    dial of another session, newer than all that is known ──▶ the peer has lost this one
    dial that is not newer ──▶ it was given up over there, and comes late: DUPLICATE
    resume or nudge of another session ──▶ LOST

A pure state machine: `rpc.link.dialer` decides when to dial, and for how long.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from aiograd.errors import ProtocolError
from aiograd.wire.framing import header
from aiograd.wire.messages import PING

LITTLE: Final = 64 * 1024  # bytes received after which the next write takes the news along
MUCH: Final = 1024 * 1024  # bytes received after which the news does not wait for a write

# What a client wants. Only the side that dialled first dials again, so that no two dials cross.
DIAL: Final = 0  # the first connection of a new session
RESUME: Final = 1  # the next one
NUDGE: Final = 2  # the connection broke here: please dial again
LOOK: Final = 3  # nothing: a connection came up meanwhile

# What becomes of it.
ACCEPTED: Final = 1
DUPLICATE: Final = 2  # another connection between the two is used, or about to be
LOST: Final = 3  # the session is over: this start of the client was declared lost, or too much was

Piece = bytes | memoryview


class Offer(NamedTuple):
    """What a client says in its proof."""

    word: int = DIAL
    number: int = 1  # of the connection; a worker never dials with the same number twice
    received: int = 0
    session: int = 0  # the number of the dial that began it


class Session:
    """One side of a session. Positions are bytes since its beginning."""

    __slots__ = (
        "_limit",
        "base",
        "due",
        "fence",
        "full",
        "id",
        "kept",
        "number",
        "overdue",
        "received",
        "role",
        "sent",
        "told",
    )

    def __init__(self, limit: int = 64 << 20, fence: int = 0) -> None:
        self._limit = limit
        self.id = 0  # the number of the dial that began it; 0: not known yet
        self.fence = fence  # dials of the peer up to this number are out of date
        self.role = ""  # "dials" or "waits", from the first connection on
        self.number = 0  # of the latest connection, given by the side that dials
        self.sent = 0
        self.base = 0  # everything before was received, or let go
        self.kept: deque[Piece] = deque()
        self.full = limit  # position from which on the oldest is let go
        self.received = 0
        self.told = 0  # how much of it the peer was told
        self.due, self.overdue = LITTLE, MUCH

    # ── bytes ───────────────────────────────────────────────────────────────────────────────────

    def keep(self, piece: Piece) -> None:
        """This is about to be written."""
        self.kept.append(piece)
        self.sent += len(piece)
        if self.sent > self.full:
            self._drop(self.sent - self._limit)

    def acknowledge(self) -> bytes:
        """The frame that tells how much has come."""
        self.told = received = self.received
        self.due, self.overdue = received + LITTLE, received + MUCH
        return header(PING, 0, 0, received, 0.0, 0)

    def acknowledged(self, position: int) -> None:
        """The peer has everything before this position."""
        if position > self.sent:
            raise ProtocolError(f"{position} bytes came over there, of {self.sent} that were sent")
        kept, base = self.kept, self.base
        while kept and base + len(kept[0]) <= position:
            base += len(kept.popleft())
        self.base, self.full = base, base + self._limit

    def _drop(self, position: int) -> None:
        while self.base < position:
            self.base += len(self.kept.popleft())
        self.full = self.base + self._limit

    def own(self) -> None:
        """Copy what is only borrowed: nobody knows for how long it will have to be kept."""
        self.kept = deque(bytes(piece) for piece in self.kept)

    def resumable(self, position: int) -> bool:
        """Whether everything from this position on is here."""
        return self.base <= position <= self.sent

    def rest(self, position: int) -> list[Piece]:
        """What has to be sent again over a new connection."""
        self.acknowledged(position)
        pieces = list(self.kept)
        if pieces:
            pieces[0] = pieces[0][position - self.base :]
        return pieces

    # ── connections ─────────────────────────────────────────────────────────────────────────────

    def offer(self, number: int) -> Offer:
        """What to say when there is no connection, and this side makes one of that number."""
        if self.role == "waits":
            return Offer(NUDGE, self.number, self.received, self.id)
        # All dials of one session name it alike, so that the peer knows a repeated one.
        self.id = self.id or number
        return Offer(RESUME if self.role else DIAL, number, self.received, self.id)

    def replaced_by(self, offer: Offer) -> bool:
        """Whether the peer begins another session: then it has lost this one."""
        if offer.word != DIAL or not self.role or offer.number <= self.fence:
            return False
        return self.role == "dials" or offer.session != self.id

    def answer(self, offer: Offer, *, dialling: bool = False, first: bool = False) -> int:
        """Decide about a proven client.

        `dialling`: this side makes its first connection, too; `first`: and that one is preferred.
        """
        if offer.word == LOOK:
            return DUPLICATE
        if offer.word == NUDGE:
            ours = self.role == "dials" and offer.session == self.id
            return DUPLICATE if ours or (dialling and not self.role) else LOST
        if self.role == "dials" or (not self.role and dialling and first):
            return DUPLICATE
        if offer.number <= self.fence:
            return DUPLICATE  # it was given up over there, and comes late
        if offer.word == RESUME and (not self.role or offer.session != self.id):
            return LOST
        if not self.resumable(offer.received):
            return LOST
        self.role, self.number, self.id = "waits", offer.number, offer.session
        self.fence = offer.number
        return ACCEPTED

    def nudged(self, offer: Offer) -> bool:
        """Whether the peer says that the latest connection is broken."""
        return offer.word == NUDGE and self.role == "dials" and offer.number == self.number

    def accepted(self, offer: Offer, received: int, latest: int) -> bool:
        """The peer took our offer: whether this side can go on, too.

        `latest`: the peer's latest dial by then. If it dialled us at the same time, that dial may
        still arrive, and must not be taken for the beginning of the next session."""
        self.role, self.number, self.id = "dials", offer.number, offer.session
        self.fence = max(self.fence, latest)
        return self.resumable(received)
