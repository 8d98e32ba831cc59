"""References that one line of a program makes one after the other.

What does not depend on the arguments is found out for the first of them: who will own the values,
how the function is called there, how the line is named. The others take it from here, as long as
all is as it was; if anything is not, `RRefs.remote` finds out again.
"""

from __future__ import annotations

import math
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from aiograd.rpc.observe.profile import SCOPE
from aiograd.rpc.scope import DEADLINE
from aiograd.rref.futures import Creation
from aiograd.rref.refcount.records import Party, pack_creation
from aiograd.wire.messages import FAST, OP

if TYPE_CHECKING:
    from aiograd.rpc.callee.functions import Shipment
    from aiograd.rpc.link.link import Link
    from aiograd.rref.registry import RRefs


def begins_series(creation: Creation) -> bool:
    """Whether the next one could be made likewise: plain, and its value comes unasked."""
    unasked = creation._frame is not None and not creation._frame[1]
    return unasked and creation._held is None and creation._inherited == math.inf


class Series:
    """Ops called by one line on one worker, whose results stay there and are fetched at once."""

    def __init__(
        self,
        refs: RRefs,
        link: Link,
        func: Any,
        frame: FrameType,
        owner: Party,
        place: bytes,
        shipment: Shipment,
    ) -> None:
        self._refs, self._agent, self._protocol = refs, refs.agent, refs.protocol
        self._link, self._to, self._owner = link, link.peer.name, owner
        self._routes, self._begin = refs.agent.links.routes, link.caller.begin_batched
        self._func, self._shipment = func, shipment
        self._code, self._instruction = frame.f_code, frame.f_lasti
        self._place = place

    def another(self, to: Any, func: Any, args: Any, frame: FrameType | None) -> Creation | None:
        """Make one more; None if this one does not belong here, or cannot go the same way."""
        agent = self._agent
        if (
            func is not self._func
            or frame is None
            or frame.f_lasti != self._instruction
            or frame.f_code is not self._code
            or to.__class__ is not str
            or to != self._to
            or args.__class__ is not tuple
            or self._routes.get(to) is not self._link
            or threading.get_ident() != agent.thread
            or not agent.loop_runs()
            or DEADLINE.get() != math.inf
            or SCOPE.get() is not None
            or (agent.baggage is not None and agent.baggage.current() is not None)
        ):
            return None
        made = self._protocol.create(self._owner)
        shipment, seconds = self._shipment, agent.options.timeout
        creation = Creation(loop=agent.loop)
        # As `RRefs.remote` and `Agent.call` prepare it, without what `begin_batched` sets, too.
        creation._bucket = creation._trace = creation._undo = creation._stream = None
        creation._subject = creation._held = creation._rref = None
        creation._function, creation._kind, creation._seconds = shipment.name, "remote", seconds
        creation._code, creation._instruction = self._code, self._instruction
        creation._refs, creation._made = self._refs, made
        creation._limited, creation._inherited = False, math.inf
        deadline = agent.loop.time() + seconds
        token = pack_creation(made.id, self._place)
        begun = False
        try:
            begun = self._begin(creation, FAST | OP, seconds, deadline, shipment, args, token)
        finally:
            if not begun:
                self._protocol.forget(made)
        if not begun:
            return None
        agent.started += 1
        return creation
