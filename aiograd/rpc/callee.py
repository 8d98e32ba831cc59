"""The callee's side of a link: takes what the peer calls, and gets it to run.

    message ─▶ unpack ─▶ waits ─▶ run (`running`) ─▶ reply or fault (`answering`)

Where a function runs: a coroutine function as a task, a registered op or `@inline` function right
here, any other plain function in a thread. A call runs at most once, and never after its budget is
spent. The commonest ones take a shorter way.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import DeadlineExceeded, NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.answering import NOTHING
from aiograd.rpc.baggage import call_alone, split, split_kept, unlabelled, unpack
from aiograd.rpc.current import DEADLINE, GUEST
from aiograd.rpc.functions import INLINE, THREAD, Target, function_name
from aiograd.rpc.incoming import Incoming, unfinished
from aiograd.rpc.running import Running
from aiograd.rpc.streams import StreamSource
from aiograd.rpc.travel import Arrival
from aiograd.wire.flat import decode_call
from aiograd.wire.frames import Transfer
from aiograd.wire.messages import (
    ALONG,
    CALL,
    CARRIED,
    EMPTY,
    EXTRA,
    FLAT,
    KEEP,
    LARGE,
    LEISURE,
    NESTED,
    POST,
    REPLY,
    REQUEST,
    SHARED,
    STREAM,
    TRAVELLED,
)
from aiograd.wire.rows import call_of

if TYPE_CHECKING:
    from aiograd.rpc.link import Link

_REQUESTS = 64  # of the library itself, for each call that may be under way
_HELD = 256  # bytes that a message takes besides its body
# Of these a call by the quick road has FLAT alone.
_NO_QUICK_ROAD = FLAT | TRAVELLED | STREAM | EXTRA
NO_TIME: Final = 0.0  # the budget of a call that nobody waits for any more
_WHERE = LARGE | SHARED  # how a message came, not what it is
_AGES = 1e9  # seconds; nobody waits longer, and clocks cannot count much further


class Callee(Running):
    """Everything one peer has called here."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._limit = link.agent.options.outbound_buffer
        self._most = link.agent.options.max_inflight
        # Messages that wait until the peer has read its answers, with the memory they take.
        self._held: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._context = _context_for(link)  # in which the peer's calls run

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
            flags & _NO_QUICK_ROAD == FLAT
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
                self._fail(Incoming(self, id, target, CALL), error)
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
        """A request or post is complete; it stays behind what is held back."""
        outbox = self._outbox
        if self._held or ((outbox.paused or outbox.waiting) and outbox.over(self._limit)):
            self._hold(kind, flags, id, budget, target, body)
        elif (
            kind == POST
            and flags & ~_WHERE == FLAT
            and not (type(body) is Transfer and body.refused)
        ):
            self._take_post(id, target, body)
        elif (
            kind == REQUEST
            and flags & _NO_QUICK_ROAD == FLAT
            and budget > 0
            and type(body) is not Transfer
            and len(self.running) < self._most
        ):
            self._serve_at_once(flags, id, budget, target, body)
        else:
            self.arrived(kind, flags, id, budget, target, body)

    def _take_post(self, id: int, target: Target, body: Any) -> None:
        """The shortest way of a post: nobody waits for an answer."""
        incoming = Incoming(self, id, target, POST)
        incoming.context = self._context.copy()
        try:
            if type(body) is Transfer:
                data, *lent = body.segments
                incoming.args, _ = decode_call(data, lent=lent)
            else:
                incoming.args, _ = decode_call(body)
        except Exception as error:
            return self._fail(incoming, error)
        self._serve(incoming)

    def _hold(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        """Let it wait for a peer that does not read, within the memory for what comes in."""
        size = _HELD + (body.size if isinstance(body, Transfer) else len(body))
        self._agent.limits.reached("outbound_buffer")
        if not self._agent.budget.reserve(size):
            raise ProtocolError(f"{self._link.peer.name} calls on and on, and reads no answers")
        copy = body if isinstance(body, Transfer) else bytes(body)
        self._held.append((size, (kind, flags, id, budget, target, copy)))

    def proceed(self) -> None:
        """The peer has read something: go on with what was held back."""
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

    def _carried(
        self, context: contextvars.Context, target: Target, data: Any
    ) -> tuple[Arrival, Any]:
        """Take in the baggage of a message of the quick road; what is left is its payload."""
        arrival = Arrival(self._link.peer, target.kind)
        data = unlabelled(self._agent, data, arrival)
        if arrival.held is not None and self._agent.baggage is not None:
            context.run(self._agent.baggage.enter, arrival.held)
        return arrival, data

    def _go_at_once(
        self, flags: int, id: int, budget: float, target: Target, body: Any, lent: Sequence[Any]
    ) -> None:
        """The shortest way from bytes to a function: plain arguments, not in a thread."""
        context, token = self._context.copy(), None
        if flags & KEEP:
            token, body = split_kept(body)
        try:
            held, (args, kwargs) = self._decode(flags, context, target, body, lent)
        except Exception as error:
            if token is not None:
                return self._fail(self._expected(flags, id, target, token), error)
            return self._fail(Incoming(self, id, target, CALL), error)
        if token is not None:
            self._run_and_keep(flags, id, target, token, args, kwargs, context, held)
        elif target.mode == INLINE:
            self._run_inline(id, budget, target, args, kwargs, context, held)
        else:
            self._begin_task(id, budget, target, args, kwargs, context, held)

    def _decode(
        self,
        flags: int,
        context: contextvars.Context,
        target: Target,
        data: Any,
        lent: Sequence[Any] = (),
    ) -> tuple[Any, tuple[Any, dict[str, Any] | None]]:
        """The baggage of a message of the quick road, and its arguments."""
        boxes = self._agent.travellers.boxes
        if not flags & CARRIED:
            return None, decode_call(data, boxes, None, lent)
        arrival, data = self._carried(context, target, data)
        return arrival.held, decode_call(data, boxes, arrival, lent)

    def _run_inline(
        self,
        id: int,
        budget: float,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        context: contextvars.Context | None = None,
        held: Any = None,
    ) -> None:
        """Run a function that cannot wait, and answer."""
        if context is None:
            context = self._context.copy()
        if target.kind != "op":
            context.run(DEADLINE.set, self._agent.loop.time() + budget)
        try:
            value = (
                context.run(target.func, *args, **kwargs)
                if kwargs
                else context.run(target.func, *args)
            )
        except BaseException as error:
            return self._fail(Incoming(self, id, target, CALL), error)
        if not self._reply_at_once(id, value, held):
            incoming = Incoming(self, id, target, CALL)
            incoming.context, incoming.held = context, held
            self._result(incoming, value)

    def _run_and_keep(
        self,
        flags: int,
        id: int,
        target: Target,
        token: bytes,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        context: contextvars.Context | None = None,
        held: Any = None,
    ) -> None:
        """The same for an op whose result stays here: nobody else can see it begin."""
        keeper, link = self._agent.keeper, self._link
        assert keeper is not None
        if context is None:
            context = self._context.copy()
        try:
            value = (
                context.run(target.func, *args, **kwargs)
                if kwargs
                else context.run(target.func, *args)
            )
        except BaseException as error:
            return self._fail(self._expected(flags, id, target, token), error)
        boxes = self._agent.travellers.boxes
        if (boxes is None or value.__class__ is not boxes[0]) and unfinished(value):
            incoming = self._expected(flags, id, target, token)
            incoming.context, incoming.held = context, held
            return self._result(incoming, value)
        keeper.made(link.peer, token, value)
        if not flags & ALONG:
            link.send(REPLY, EMPTY, id, 0.0, 0, NOTHING, "reply")
        elif self._reply_at_once(id, value, held):
            return
        elif flags & LEISURE:  # it has not been asked for so far
            link.send(REPLY, EMPTY | KEEP, id, 0.0, 0, NOTHING, "reply")
        else:
            incoming = Incoming(self, id, target, CALL)
            incoming.held = held
            self._send_along(incoming, value)

    def _expected(self, flags: int, id: int, target: Target, token: bytes) -> Incoming:
        """A call whose result stays here, in case that it does not come at once."""
        incoming = Incoming(self, id, target, CALL)
        incoming.along = flags & ALONG != 0
        self._expect(incoming, token)
        return incoming

    def _serve_at_once(self, flags: int, id: int, budget: float, target: Target, body: Any) -> None:
        """The same for a service of the library, most of which answer without waiting."""
        agent = self._agent
        context = self._context.copy()
        held = None
        try:
            held, (args, _) = self._decode(flags, context, target, body)
            handler = agent.services.get(target.name)
            if handler is None:
                raise ProtocolError(f"no service {target.name!r}", agent.name)
            value = context.run(handler, self._link.peer, *args)
        except Exception as error:
            return self._fail(Incoming(self, id, target, REQUEST), error)
        if not self._reply_at_once(id, value, held, flags & LEISURE):
            incoming = Incoming(self, id, target, REQUEST)
            incoming.context, incoming.held = context, held
            if budget < _AGES:
                incoming.bucket = agent.deadlines.bucket(agent.loop.time() + budget)
                incoming.bucket[incoming] = None
            self._result(incoming, value)

    def _begin_task(
        self,
        id: int,
        budget: float,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        context: contextvars.Context | None = None,
        held: Any = None,
    ) -> None:
        """Run a coroutine function as a task."""
        agent = self._agent
        incoming = self.running[id] = Incoming(self, id, target, CALL)
        incoming.args, incoming.kwargs, incoming.held = args, kwargs, held
        if context is None:
            context = self._context.copy()
        incoming.context = context
        deadline = agent.loop.time() + budget if budget <= _AGES else math.inf
        context.run(DEADLINE.set, deadline)
        if deadline != math.inf:
            incoming.bucket = bucket = agent.deadlines.bucket(deadline, budget)
            bucket[incoming] = None
        incoming.task = agent.loop.create_task(self._perform(incoming), context=context)

    def arrived(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        """A call, request or post is complete."""
        agent = self._agent
        incoming = Incoming(self, id, target, kind)
        if isinstance(body, Transfer) and body.refused:
            return self._fail(incoming, Overloaded(agent.name, "no memory for its arguments"))
        if not budget > 0:  # spent, or no number
            return self._fail(incoming, DeadlineExceeded(agent.name, target.name, 0.0))
        if len(self.running) >= self._most and self._crowded(kind, flags):
            agent.limits.reached("max_inflight")
            why = f"{self._most} of its calls are under way"
            return self._fail(incoming, Overloaded(agent.name, why))
        if budget > _AGES:
            budget = math.inf
        if isinstance(target.error, NotAllowed):  # refused before anything of it is unpickled
            return self._fail(incoming, target.error)
        self.running[id] = incoming
        waits: list[asyncio.Future[Any]] = []
        incoming.context = context = self._context.copy()
        deadline = agent.loop.time() + budget
        if budget != math.inf:
            incoming.bucket = bucket = agent.deadlines.bucket(deadline, budget)
            bucket[incoming] = None
        if kind == CALL:
            context.run(DEADLINE.set, deadline)
        try:
            if type(body) is tuple:  # it came in a row
                incoming.args, token = body
                if token is not None:
                    incoming.along = flags & ALONG != 0
                    self._expect(incoming, token)
            elif flags & FLAT:
                data, *lent = body.segments if isinstance(body, Transfer) else (body,)
                arrival = None
                if flags & KEEP:
                    token, data = split_kept(data)
                    incoming.along = flags & ALONG != 0
                    self._expect(incoming, token)
                elif flags & EXTRA:
                    extra, data = split(data)
                    self._noted(incoming, extra)
                if flags & CARRIED:
                    arrival, data = self._carried(context, target, data)
                    incoming.held = arrival.held
                boxes = agent.travellers.boxes
                incoming.args, incoming.kwargs = decode_call(data, boxes, arrival, lent)
            else:
                waits = self._unpack(incoming, flags, body)
        except Exception as error:
            return self._fail(incoming, error)
        if incoming.target.error is not None:
            return self._fail(incoming, incoming.target.error)
        if flags & STREAM:
            incoming.stream = StreamSource(self._link, incoming)
        if waits:
            incoming.task = agent.spawn(self._wait_and_run(incoming, waits))
        else:
            self._run(incoming)

    def _expect(self, incoming: Incoming, token: Any) -> None:
        """Tell the keeper, before anything waits or runs, of a result that shall stay here."""
        assert self._agent.keeper is not None
        self._agent.keeper.expect(self._link.peer, token)
        incoming.token, incoming.kept = token, True

    def _noted(self, incoming: Incoming, extra: dict[str, Any]) -> None:
        """What rides along with a call, before it is decoded."""
        if "record" in extra and not self._agent.restricts(self._link.peer):
            incoming.record = extra["record"] is True
        if "keep" in extra:
            self._expect(incoming, extra["keep"])

    def _unpack(self, incoming: Incoming, flags: int, body: Any) -> list[asyncio.Future[Any]]:
        agent, peer = self._agent, self._link.peer
        arrival = Arrival(peer, incoming.target.kind)

        def expect(extra: dict[str, Any]) -> None:
            self._noted(incoming, extra)
            if incoming.kept:
                arrival.kind = "remote"

        value, _ = unpack(agent, flags, body, arrival, expect)
        incoming.held = arrival.held
        if incoming.kind != CALL:
            incoming.args = value
        elif incoming.target is agent.inside:  # the function came inside the call
            incoming.func, incoming.args, incoming.kwargs = value
            incoming.target = Target(incoming.func, function_name(incoming.func))
        else:
            incoming.args, incoming.kwargs = value
        if incoming.held is not None and agent.baggage is not None:
            assert incoming.context is not None
            incoming.context.run(agent.baggage.enter, incoming.held)
        return arrival.waits

    # ── no longer wanted ────────────────────────────────────────────────────────────────────────

    def cancel(self, id: int) -> None:
        """The caller no longer wants it."""
        incoming = self.running.get(id)
        if incoming is not None:
            self._abandon(incoming)
        for at, (size, (kind, flags, number, _, *rest)) in enumerate(self._held):
            if number == id:
                self._held[at] = size, (kind, flags, number, NO_TIME, *rest)

    def close(self) -> None:
        """The peer is gone: nobody waits for anything that still runs."""
        while self._held:
            self._agent.budget.release(self._held.popleft()[0])
        for incoming in list(self.running.values()):
            self._abandon(incoming)


def _context_for(link: Link) -> contextvars.Context:
    """The worker's context, in which a guest is known as one."""
    agent = link.agent
    if agent.trusts(link.peer):
        return agent.context
    context = agent.context.copy()
    context.run(GUEST.set, link.peer)
    return context
