"""Copies of results that stay with the callee, and come along with the reply all the same.

Whoever asks for a copy while the call has not left gets it with the reply, in one message. Then the
next ones are expected to be asked for, too: small results of ops come unasked, and their calls need
not wait for the end of the tick. The first copy that nobody wanted ends that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiograd.wire.framing import HEADER
from aiograd.wire.messages import BAGGAGE, LAZY, OP, PIGGYBACK

if TYPE_CHECKING:
    from aiograd.rpc.future import Future
    from aiograd.rpc.link.send import Outbox

NO_VALUE: Final = object()  # the answer to a call whose result could not come along


class Copies:
    """What one caller has asked of one peer."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._first = self._last = 0  # ids of the latest ops in a row whose results stay
        self.eager = False  # the next ones come unasked

    def stays(self, future: Future[Any], id: int, flags: int) -> int:
        """A call is sent whose result will stay: its flags."""
        if not (flags & OP and self._last == id - 1):
            self._first = id
        self._last = id
        if self.eager and flags & (OP | BAGGAGE) == OP:
            future._frame = (self._outbox.ticks, b"")
            return flags | PIGGYBACK | LAZY
        return flags

    def along(self, future: Future[Any], last: int, alone: bool = False) -> bool:
        """Let a copy come along with the reply, if its call has not left; `last` is the last call.

        If it is the only one under way (`alone`), it leaves now that nothing is to be added to it.

        A copy is as of the end of its call, so nothing that could change it may have been sent
        since: only more ops whose results stay.
        """
        if future._frame is None or future._id < self._first or last != self._last:
            return False
        (at, frame), outbox = future._frame, self._outbox
        if not frame:  # it comes unasked, as long as this tick lasts
            if at == outbox.ticks:
                future._frame = None
            return at == outbox.ticks
        small = outbox.small
        if at >= len(small) or small[at] is not frame:
            return False
        magic, kind, flags, *rest = HEADER.unpack(frame)
        small[at] = HEADER.pack(magic, kind, flags | PIGGYBACK, *rest)
        self.eager = True
        if alone:
            outbox.flush_early()
        return True

    def unasked(self, future: Future[Any]) -> bool:
        """Whether a copy came along that nobody wants; then no more do."""
        if future._frame is None or future._frame[1]:
            return False
        self.eager = False
        return True
