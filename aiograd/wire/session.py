"""A session: two streams of bytes that outlive their connections.

Both sides count the bytes of each direction, and keep what they sent until the peer acknowledges
it. When a connection breaks, the side that dialled it dials again; in the handshake each side says
how much it has received, and the other one goes on from there. So every byte arrives once and in
order, whatever message the cut was in the middle of, and nothing above has to know:

    sent      ├──── acknowledged ──────┼────── kept ──────┤
    received  ├───────────────────────────────┤             the next connection goes on here

The alternative, ids and a cache of replies per call, needs a rule for each kind of message. Here a
message costs one count per read and one reference per write. A resent byte was never received, so
memory that was borrowed for a call that is done is never read again.

Memory is bounded: beyond `limit` bytes the oldest are dropped, and a peer that needs them cannot
resume.

A session that is lost never goes on, but the two workers may begin another one. So a session has an
id: the number of the dial that began it. Every offer names its session, and dials have rising
numbers. Together they keep late offers out of a session they do not belong to:

    DIAL of another session, newer than all that is known   ──▶ the peer has lost this one
    DIAL that is not newer                                  ──▶ abandoned by its sender: DUPLICATE
    RESUME or NUDGE of another session                      ──▶ LOST

A session at rest needs no connection: its two ends agree to close it, and the next message makes
another one. The side that dials proposes it, the other one agrees by the same message:

    dials  ──SLEEP, everything of yours is here──▶  waits
           ◀──SLEEP, everything of yours is here──
           closes the connection

A message that crosses these is not acknowledged, so its sender resumes the session and sends it
again.

A session belongs to a pair of incarnations; it needs no other name. A pure state machine: when to
dial, and for how long, is decided in `rpc.link.dialer`.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from aiograd.errors import ProtocolError
from aiograd.wire.framing import HEADER_SIZE, pack_header
from aiograd.wire.messages import PING, SLEEP

ACK_WITH_WRITE: Final = 64 * 1024  # bytes received after which the next write acknowledges them
ACK_NOW: Final = 1024 * 1024  # bytes received after which the acknowledgement waits for no write

# What a client offers. Only the side that dialled first dials again, so that no two dials cross;
# the other side connects to nudge it.
DIAL: Final = 0  # the first connection of a new session
RESUME: Final = 1  # the next connection of a session
NUDGE: Final = 2  # nothing but a request: the connection broke here, dial again
LOOK: Final = 3  # nothing: a connection came up meanwhile

# What a server answers.
ACCEPTED: Final = 1
DUPLICATE: Final = 2  # another connection between the two is used, or about to be
LOST: Final = 3  # the session is over: this start of the client, or too many bytes, were lost

Piece = bytes | memoryview


class Offer(NamedTuple):
    """What a client wants, as it says in its proof."""

    word: int = DIAL
    number: int = 1  # of the connection; a worker never dials with the same number twice
    received: int = 0
    session: int = 0  # the number of the dial that began it


class Session:
    """One side of a session. Positions are bytes since its beginning."""

    __slots__ = (
        "_limit",
        "acked",
        "base",
        "due",
        "fence",
        "full",
        "id",
        "kept",
        "number",
        "overdue",
        "own_pings",
        "pings",
        "received",
        "role",
        "sent",
        "told",
    )

    acked: int
    due: int
    overdue: int
    role: str
    number: int
    id: int

    def __init__(self, limit: int = 64 << 20, fence: int = 0) -> None:
        self._limit = limit
        self.id = 0  # the number of the dial that began it; 0: not known yet
        self.fence: int = fence  # dials of the peer up to this number are out of date
        self.role = ""  # "dials" or "waits", from the first connection on
        self.number = 0  # of the latest connection, given by the side that dials
        self.sent: int = 0
        self.base: int = 0  # everything before was acknowledged, or dropped
        self.kept: deque[Piece] = deque()  # from `base` to `sent`
        self.full: int = limit  # `sent` beyond this position drops the oldest pieces
        self.received: int = 0
        self.acked = 0  # how much of `received` the peer was told
        # `received` beyond these is acknowledged with the next write, and at once. Precomputed:
        # they are compared after every read and before every write.
        self.due, self.overdue = ACK_WITH_WRITE, ACK_NOW
        # PING and SLEEP say nothing but that a side is there: they are no use of the session.
        self.pings: int = 0  # received
        self.own_pings: int = 0  # sent
        self.told: int = 0  # bytes without pings that were received when the peer was last told

    # ── bytes ───────────────────────────────────────────────────────────────────────────────────

    def keep(self, piece: Piece) -> None:
        """Keep a piece that is about to be written, until the peer acknowledges it."""
        self.kept.append(piece)
        self.sent += len(piece)
        if self.sent > self.full:
            self._drop(self.sent - self._limit)

    def acknowledge(self, ask: bool = False) -> bytes:
        """Return the frame that says how much was received; `ask`: the peer shall do so, too.

        A PING: the acknowledgement is also the sign of life of a quiet connection.
        """
        return pack_header(PING, 0, 0, self._tell(), 0.0, ask)

    def sleep(self) -> bytes:
        """Return the frame that says that this side needs no connection for now."""
        return pack_header(SLEEP, 0, 0, self._tell(), 0.0, self.number & 0xFFFFFFFF)

    def may_sleep(self, position: int, connection: int) -> bool:
        """Whether a SLEEP is about the latest connection, and the peer has all that was sent."""
        return connection == self.number & 0xFFFFFFFF and position == self.sent

    def _tell(self) -> int:
        self.acked = received = self.received
        self.due, self.overdue = received + ACK_WITH_WRITE, received + ACK_NOW
        self.own_pings += 1
        self.told = self.heard
        return received

    @property
    def heard(self) -> int:
        """Bytes received so far, without pings."""
        return self.received - self.pings * HEADER_SIZE

    @property
    def said(self) -> int:
        """Bytes sent so far, without pings; a ping that is not written yet counts as sent."""
        return self.sent - self.own_pings * HEADER_SIZE

    @property
    def owes(self) -> bool:
        """Whether the peer was not told of messages that came; pings are no messages."""
        return self.heard > self.told

    def acknowledged(self, position: int) -> None:
        """Drop what the peer has: everything before this position."""
        if position > self.sent:
            raise ProtocolError(
                f"PING: the peer acknowledges {position} bytes, of {self.sent} that were sent"
            )
        # Whole pieces only: a piece that arrived in part is kept, and cut when it is sent again.
        kept, base = self.kept, self.base
        while kept:
            after = base + len(kept[0])
            if after > position:
                break
            base = after
            kept.popleft()
        self.base, self.full = base, base + self._limit

    def _drop(self, position: int) -> None:
        while self.base < position:
            self.base += len(self.kept.popleft())
        self.full = self.base + self._limit

    def copy_kept(self) -> None:
        """Copy what is only borrowed: without a connection it is kept for an unknown time."""
        self.kept = deque(bytes(piece) for piece in self.kept)

    def resumable(self, position: int) -> bool:
        """Whether everything from this position on is here."""
        return self.base <= position <= self.sent

    def unacknowledged(self, position: int) -> list[Piece]:
        """Return what must be sent again over a new connection: everything from `position` on."""
        self.acknowledged(position)
        pieces = list(self.kept)
        if pieces:
            pieces[0] = pieces[0][position - self.base :]
        return pieces

    # ── connections ─────────────────────────────────────────────────────────────────────────────

    def offer(self, number: int) -> Offer:
        """Return what to offer with a new connection of that number, when there is none."""
        if self.role == "waits":
            return Offer(NUDGE, self.number, self.received, self.id)
        # All dials of one session name it alike, so that the peer knows a repeated one.
        self.id = self.id or number
        return Offer(RESUME if self.role else DIAL, number, self.received, self.id)

    def replaced_by(self, offer: Offer) -> bool:
        """Whether the peer begins another session with this offer: then it has lost ours."""
        # Without a role the session never began, so there is nothing to lose. A dial up to the
        # fence is old: it was sent before, and came late.
        if offer.word != DIAL or not self.role or offer.number <= self.fence:
            return False
        return self.role == "dials" or offer.session != self.id

    def answer(self, offer: Offer, *, dialling: bool = False, first: bool = False) -> int:
        """Decide about the offer of an authenticated client; the session changes if it is accepted.

        `dialling`: this side makes its first connection, too; `first`: and that one is preferred.
        """
        if offer.word == LOOK:
            return DUPLICATE
        if offer.word == NUDGE:
            # While this side dials for the first time, the nudge can only be about that dial: it
            # was accepted over there, and broke before the answer came.
            ours = self.role == "dials" and offer.session == self.id
            return DUPLICATE if ours or (dialling and not self.role) else LOST
        # Two first dials that cross: both sides must choose the same one, or both are closed.
        if self.role == "dials" or (not self.role and dialling and first):
            return DUPLICATE
        if offer.number <= self.fence:
            return DUPLICATE  # its sender has abandoned it, and dialled again since
        if offer.word == RESUME and (not self.role or offer.session != self.id):
            return LOST
        if not self.resumable(offer.received):
            return LOST
        # The peer dials from now on, and nothing older than this dial counts any more.
        self.role, self.number, self.id = "waits", offer.number, offer.session
        self.fence = offer.number
        return ACCEPTED

    def nudged(self, offer: Offer) -> bool:
        """Whether the peer says that the latest connection is broken."""
        return offer.word == NUDGE and self.role == "dials" and offer.number == self.number

    def accepted(self, offer: Offer, received: int, latest: int) -> bool:
        """Take note that the peer accepted our offer; return whether this side can go on, too.

        `latest`: the peer's latest dial by then. If it dialled us at the same time, that dial may
        still arrive, and must not be taken for the beginning of the next session.
        """
        self.role, self.number, self.id = "dials", offer.number, offer.session
        self.fence = max(self.fence, latest)
        return self.resumable(received)
