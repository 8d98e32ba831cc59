"""The callee's side of a link: takes what the peer calls, and gets it to run.

    message ─▶ unpack ─▶ waits ─▶ run (`running`) ─▶ reply or fault (`answering`)

Where a function runs: a coroutine function as a task, a registered op or `@inline` function right
here, any other plain function in a thread. A call runs at most once, and never after its budget is
spent. The commonest ones take a shorter way (`shortcuts`).
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import DeadlineExceeded, NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.callee.functions import INLINE, THREAD, Target, function_name
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.callee.shortcuts import AGES, Shortcuts
from aiograd.rpc.caller.streams import StreamSource
from aiograd.rpc.envelope import call_alone, split, split_kept, unpack
from aiograd.rpc.extension import Arrival
from aiograd.rpc.scope import DEADLINE
from aiograd.wire.fastcodec import call_of
from aiograd.wire.framing import Transfer
from aiograd.wire.messages import (
    CALL,
    FAST,
    KEEP,
    LARGE,
    METADATA,
    NESTED,
    PIGGYBACK,
    POST,
    REQUEST,
    SHARED,
    STREAM,
    TRAVELLED,
)

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link

_REQUESTS = 64  # of the library itself, for each call that may be under way
_HELD = 256  # bytes that a message takes besides its body
# Of these a call by the quick road has FAST alone.
_NO_QUICK_ROAD = FAST | TRAVELLED | STREAM | METADATA
NO_TIME: Final = 0.0  # the budget of a call that nobody waits for any more
_WHERE = LARGE | SHARED  # how a message came, not what it is


class Callee(Shortcuts):
    """Everything one peer has called here."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._limit = link.agent.options.outbound_buffer
        self._most = link.agent.options.max_inflight
        # Messages that wait until the peer has read its answers, with the memory they take.
        self._held: deque[tuple[int, tuple[Any, ...]]] = deque()

    def leave_room(self, size: int) -> None:
        """So many of the bytes that may wait for the peer wait elsewhere."""
        self._limit -= size

    # ── arriving ────────────────────────────────────────────────────────────────────────────────

    def call(self, flags: int, id: int, budget: float, target: Target, body: Any) -> None:
        """A call is complete."""
        outbox = self._outbox
        if self._held or ((outbox.paused or outbox.waiting) and outbox.over(self._limit)):
            self._hold(CALL, flags, id, budget, target, body)
        elif (
            flags & _NO_QUICK_ROAD == FAST
            and budget > 0
            and target.error is None
            and target.mode != THREAD
            and not (flags & KEEP and target.kind != "op")
            and (target.mode == INLINE or len(self.running) < self._most)
            and self._agent.profiles is None
            and not (type(body) is Transfer and body.refused)
        ):
            lent: Sequence[Any] = ()
            if type(body) is Transfer:
                body, *lent = body.segments
            self._go_at_once(flags, id, budget, target, body, lent)
        else:
            self.arrived(CALL, flags, id, budget, target, body)

    def calls(
        self, flags: int, first: int, budget: float, target: Target, entries: list[Any]
    ) -> None:
        """Calls of one function have come in a row."""
        outbox, boxes = self._outbox, self._agent.travellers.boxes
        for id, entry in enumerate(entries, first):
            if self._held or ((outbox.paused or outbox.waiting) and outbox.over(self._limit)):
                self._hold(CALL, flags, id, budget, target, call_alone(flags, entry))
                continue
            token = None
            try:
                if flags & KEEP:
                    token, entry = entry
                args = call_of(entry, boxes)
            except Exception as error:
                self._fail(Invocation(self, id, target, CALL), self._undecodable(error))
                continue
            if budget > 0 and target.error is None and self._agent.profiles is None:
                if token is not None:
                    if target.kind == "op":
                        self._run_and_keep(flags, id, target, token, args)
                        continue
                elif target.mode == INLINE:
                    self._run_inline(id, budget, target, args)
                    continue
                elif target.mode != THREAD and len(self.running) < self._most:
                    self._begin_task(id, budget, target, args)
                    continue
            self.arrived(CALL, flags, id, budget, target, (args, token))

    def service(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        """A request or post is complete; it stays behind what is carried back."""
        outbox = self._outbox
        if self._held or ((outbox.paused or outbox.waiting) and outbox.over(self._limit)):
            self._hold(kind, flags, id, budget, target, body)
        elif (
            kind == POST
            and flags & ~_WHERE == FAST
            and not (type(body) is Transfer and body.refused)
        ):
            self._take_post(id, target, body)
        elif (
            kind == REQUEST
            and flags & _NO_QUICK_ROAD == FAST
            and budget > 0
            and type(body) is not Transfer
            and len(self.running) < self._most
        ):
            self._serve_at_once(flags, id, budget, target, body)
        else:
            self.arrived(kind, flags, id, budget, target, body)

    def _hold(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        """Let it wait for a peer that does not read, within the memory for what comes in."""
        size = _HELD
        if not isinstance(body, Transfer):
            size += len(body)
        elif not body.refused:
            size += body.size
        self._agent.limits.reached("outbound_buffer")
        if not self._agent.budget.reserve(size):
            raise ProtocolError(f"{self._link.peer.name} calls on and on, and reads no answers")
        copy = body if isinstance(body, Transfer) else bytes(body)
        self._held.append((size, (kind, flags, id, budget, target, copy)))

    def proceed(self) -> None:
        """The peer has read something: go on with what was carried back."""
        while self._held and not self._outbox.over(self._limit):
            size, message = self._held.popleft()
            self._agent.budget.release(size)
            self.arrived(*message)

    def _crowded(self, kind: int, flags: int) -> bool:
        """Whether the peer has more under way than was agreed on, or than anybody needs."""
        if kind != CALL or flags & NESTED:
            return len(self.running) >= self._most * _REQUESTS
        wanted = sum(each.kind == CALL and not each.abandoned for each in self.running.values())
        return wanted >= self._most

    def arrived(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        """A call, request or post is complete."""
        agent = self._agent
        invocation = Invocation(self, id, target, kind)
        if isinstance(body, Transfer) and body.refused:
            refusal = agent.budget.refusal(agent.name, "its arguments", body.size, body.refused)
            return self._refuse(invocation, refusal)
        if not budget > 0:  # spent, or no number
            return self._refuse(invocation, DeadlineExceeded(agent.name, target.name, 0.0))
        if len(self.running) >= self._most and self._crowded(kind, flags):
            agent.limits.reached("max_inflight")
            why = f"{self._most} of its calls are under way"
            return self._refuse(invocation, Overloaded(agent.name, why))
        if budget > AGES:
            budget = math.inf
        if isinstance(target.error, NotAllowed):  # refused before anything of it is unpickled
            return self._refuse(invocation, target.error)
        self.running[id] = invocation
        waits: list[asyncio.Future[Any]] = []
        invocation.context = context = self._context.copy()
        deadline = agent.loop.time() + budget
        if budget != math.inf:
            invocation.bucket = bucket = agent.deadlines.bucket(deadline, budget)
            bucket[invocation] = None
        if kind == CALL:
            context.run(DEADLINE.set, deadline)
        try:
            if type(body) is tuple:  # it came in a row
                invocation.args, token = body
                if token is not None:
                    invocation.along = flags & PIGGYBACK != 0
                    self._expect(invocation, token)
            elif flags & FAST:
                self._unpack_flat(invocation, flags, context, body)
            else:
                waits = self._unpack(invocation, flags, body)
        except Exception as error:
            return self._refuse(invocation, self._undecodable(error))
        if invocation.target.error is not None:
            return self._refuse(invocation, invocation.target.error)
        if flags & STREAM:
            invocation.stream = StreamSource(self._link, invocation)
        if waits:
            invocation.task = agent.spawn(self._wait_and_run(invocation, waits))
        else:
            self._run(invocation)

    def refuse(self, kind: int, id: int, target: Target, error: Exception) -> None:
        """A call, request or post takes no effect, or none that its sender will hear of."""
        self._refuse(Invocation(self, id, target, kind), error)

    def _noted(self, invocation: Invocation, extra: dict[str, Any]) -> None:
        """What rides along with a call, before it is decoded."""
        if "record" in extra and not self._agent.restricts(self._link.peer):
            invocation.record = extra["record"] is True
        if "keep" in extra:
            self._expect(invocation, extra["keep"])

    def _unpack_flat(
        self, invocation: Invocation, flags: int, context: contextvars.Context, body: Any
    ) -> None:
        """Decode a call that came by the quick road."""
        data, *lent = body.segments if isinstance(body, Transfer) else (body,)
        if flags & KEEP:
            token, data = split_kept(data)
            invocation.along = flags & PIGGYBACK != 0
            self._expect(invocation, token)
        elif flags & METADATA:
            extra, data = split(data)
            self._noted(invocation, extra)
        invocation.carried, (invocation.args, invocation.kwargs) = self._decode(
            flags, context, invocation.target, data, lent
        )

    def _unpack(self, invocation: Invocation, flags: int, body: Any) -> list[asyncio.Future[Any]]:
        """Decode any other call; what has to be waited for before it runs."""
        agent, peer = self._agent, self._link.peer
        arrival = Arrival(peer, invocation.target.kind)

        def expect(extra: dict[str, Any]) -> None:
            self._noted(invocation, extra)
            if invocation.kept:
                arrival.kind = "remote"

        value, _ = unpack(agent, flags, body, arrival, expect)
        invocation.carried = arrival.carried
        if invocation.kind != CALL:
            invocation.args = value
        elif invocation.target is agent.inside:  # the function came inside the call
            invocation.func, invocation.args, invocation.kwargs = value
            invocation.target = Target(invocation.func, function_name(invocation.func))
        else:
            invocation.args, invocation.kwargs = value
        if invocation.carried is not None and agent.baggage is not None:
            assert invocation.context is not None
            invocation.context.run(agent.baggage.enter, invocation.carried)
        return arrival.waits

    # ── no longer wanted ────────────────────────────────────────────────────────────────────────

    def cancel(self, id: int) -> None:
        """The caller no longer wants it."""
        invocation = self.running.get(id)
        if invocation is not None:
            self._abandon(invocation)
        for at, (size, (kind, flags, number, _, *rest)) in enumerate(self._held):
            if number == id:
                self._held[at] = size, (kind, flags, number, NO_TIME, *rest)

    def close(self) -> None:
        """The peer is gone: nobody waits for anything that still runs."""
        while self._held:
            self._agent.budget.release(self._held.popleft()[0])
        for invocation in list(self.running.values()):
            self._abandon(invocation)
