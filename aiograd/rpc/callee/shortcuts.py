"""Shorter ways from a message to its function and back, for the commonest calls.

What is plain, runs here or as a task, and came by the fast path needs no `Invocation` until it
has something to wait for: most services and ops are answered in the tick in which they came. Which
messages may come this way is decided by the `Callee`.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import ProtocolError
from aiograd.rpc.callee.execution import Running
from aiograd.rpc.callee.functions import INLINE, Target
from aiograd.rpc.callee.invocation import Invocation, unfinished
from aiograd.rpc.callee.responses import NOTHING
from aiograd.rpc.envelope import split_kept, unlabelled
from aiograd.rpc.extension import Arrival
from aiograd.rpc.scope import DEADLINE, GUEST
from aiograd.wire.fastcodec import decode_call
from aiograd.wire.framing import Transfer
from aiograd.wire.messages import BAGGAGE, CALL, EMPTY, KEEP, LAZY, PIGGYBACK, POST, REPLY, REQUEST

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link

AGES: Final = 1e9  # seconds; nobody waits longer, and clocks cannot count much further


class Shortcuts(Running):
    """What one peer calls here, as far as it takes one of the shorter ways."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._context = _context_for(link)  # in which the peer's calls run

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _go_at_once(
        self, flags: int, id: int, budget: float, target: Target, body: Any, lent: Sequence[Any]
    ) -> None:
        """The shortest way from bytes to a function: plain arguments, not in a thread."""
        context, token = self._context.copy(), None
        if flags & KEEP:
            token, body = split_kept(body)
        try:
            carried, (args, kwargs) = self._decode(flags, context, target, body, lent)
        except Exception as error:
            error = self._undecodable(error)
            if token is not None:
                return self._fail(self._expected(flags, id, target, token), error)
            return self._fail(Invocation(self, id, target, CALL), error)
        if token is not None:
            self._run_and_keep(flags, id, target, token, args, kwargs, context, carried)
        elif target.mode == INLINE:
            self._run_inline(id, budget, target, args, kwargs, context, carried)
        else:
            self._begin_task(id, budget, target, args, kwargs, context, carried)

    def _run_inline(
        self,
        id: int,
        budget: float,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        context: contextvars.Context | None = None,
        carried: Any = None,
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
            return self._fail(Invocation(self, id, target, CALL), error)
        if not self._reply_at_once(id, value, carried):
            invocation = Invocation(self, id, target, CALL)
            invocation.context, invocation.carried = context, carried
            self._result(invocation, value)

    def _run_and_keep(
        self,
        flags: int,
        id: int,
        target: Target,
        token: bytes,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        context: contextvars.Context | None = None,
        carried: Any = None,
    ) -> None:
        """The same for an op whose result stays here: nobody else can see it begin."""
        result_store, link = self._agent.result_store, self._link
        assert result_store is not None
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
            invocation = self._expected(flags, id, target, token)
            invocation.context, invocation.carried = context, carried
            return self._result(invocation, value)
        result_store.made(link.peer, token, value)
        if not flags & PIGGYBACK:
            link.send(REPLY, EMPTY, id, 0.0, 0, NOTHING, "reply")
        elif self._reply_at_once(id, value, carried):
            return
        elif flags & LAZY:  # it has not been asked for so far
            link.send(REPLY, EMPTY | KEEP, id, 0.0, 0, NOTHING, "reply")
        else:
            invocation = Invocation(self, id, target, CALL)
            invocation.carried = carried
            self._send_along(invocation, value)

    def _expected(self, flags: int, id: int, target: Target, token: bytes) -> Invocation:
        """A call whose result stays here, in case that it does not come at once."""
        invocation = Invocation(self, id, target, CALL)
        invocation.along = flags & PIGGYBACK != 0
        self._expect(invocation, token)
        return invocation

    def _expect(self, invocation: Invocation, token: Any) -> None:
        """Tell the result store of a result that will stay here, before anything waits or runs."""
        assert self._agent.result_store is not None
        self._agent.result_store.expect(self._link.peer, token)
        invocation.token, invocation.kept = token, True

    def _begin_task(
        self,
        id: int,
        budget: float,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        context: contextvars.Context | None = None,
        carried: Any = None,
    ) -> None:
        """Run a coroutine function as a task."""
        agent = self._agent
        invocation = self.running[id] = Invocation(self, id, target, CALL)
        invocation.args, invocation.kwargs, invocation.carried = args, kwargs, carried
        if context is None:
            context = self._context.copy()
        invocation.context = context
        deadline = agent.loop.time() + budget if budget <= AGES else math.inf
        context.run(DEADLINE.set, deadline)
        if deadline != math.inf:
            invocation.bucket = bucket = agent.deadlines.bucket(deadline, budget)
            bucket[invocation] = None
        invocation.task = agent.loop.create_task(self._perform(invocation), context=context)

    # ── services ────────────────────────────────────────────────────────────────────────────────

    def _serve_at_once(self, flags: int, id: int, budget: float, target: Target, body: Any) -> None:
        """A service of the library, most of which answer without waiting."""
        agent = self._agent
        context = self._context.copy()
        try:
            carried, (args, _) = self._decode(flags, context, target, body)
        except Exception as error:
            return self._fail(Invocation(self, id, target, REQUEST), self._undecodable(error))
        try:
            handler = agent.services.get(target.name)
            if handler is None:
                raise ProtocolError(f"no service {target.name!r}", agent.name)
            value = context.run(handler, self._link.peer, *args)
        except Exception as error:
            return self._fail(Invocation(self, id, target, REQUEST), error)
        if not self._reply_at_once(id, value, carried, flags & LAZY):
            invocation = Invocation(self, id, target, REQUEST)
            invocation.context, invocation.carried = context, carried
            if budget < AGES:
                invocation.bucket = agent.deadlines.bucket(agent.loop.time() + budget)
                invocation.bucket[invocation] = None
            self._result(invocation, value)

    def _take_post(self, id: int, target: Target, body: Any) -> None:
        """The shortest way of a post: nobody waits for an answer."""
        agent = self._agent
        context = self._context.copy()
        try:
            if type(body) is Transfer:
                data, *lent = body.segments
                args, _ = decode_call(data, lent=lent)
            else:
                args, _ = decode_call(body)
            handler = agent.services.get(target.name)
            if handler is None:
                raise ProtocolError(f"no service {target.name!r}", agent.name)
        except Exception as error:
            return self._refuse(Invocation(self, id, target, POST), self._undecodable(error))
        try:
            value = context.run(handler, self._link.peer, *args)
        except Exception as error:
            return self._fail(Invocation(self, id, target, POST), error)
        if value is not None:
            invocation = Invocation(self, id, target, POST)
            invocation.context = context
            self._result(invocation, value)

    # ── decoding ────────────────────────────────────────────────────────────────────────────────

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
        if not flags & BAGGAGE:
            return None, decode_call(data, boxes, None, lent)
        arrival, data = self._carried(context, target, data)
        return arrival.carried, decode_call(data, boxes, arrival, lent)

    def _undecodable(self, error: Exception) -> Exception:
        """What the caller is told of arguments that could not be decoded."""
        agent = self._agent
        return agent.budget.undecodable(agent.name, "its arguments", error)

    def _carried(
        self, context: contextvars.Context, target: Target, data: Any
    ) -> tuple[Arrival, Any]:
        """Take in the baggage of a message of the quick road; what is left is its payload."""
        arrival = Arrival(self._link.peer, target.kind)
        data = unlabelled(self._agent, data, arrival)
        if arrival.carried is not None and self._agent.baggage is not None:
            context.run(self._agent.baggage.enter, arrival.carried)
        return arrival, data


def _context_for(link: Link) -> contextvars.Context:
    """The worker's context, in which a guest is known as one."""
    agent = link.agent
    if agent.trusts(link.peer):
        return agent.context
    context = agent.context.copy()
    context.run(GUEST.set, link.peer)
    return context
