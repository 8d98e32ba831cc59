"""What comes over a link: where each kind of message goes, in which order, and each only once.

    frames ─▶ receive ─┬─▶ handler of its kind ─▶ `Caller`, `Callee`, `Shared`, `Session`
                       └─▶ `Inbox`, behind large messages that are still arriving ─▶ handler

Functions are named by numbers, which the peer defines before it uses them. A peer that breaks the
rules is not argued with: its link ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiograd.errors import ProtocolError
from aiograd.rpc.baggage import call_alone
from aiograd.rpc.callee import NO_TIME
from aiograd.rpc.definitions import resolve
from aiograd.rpc.functions import TABLE, Target
from aiograd.rpc.inbox import Inbox, Once
from aiograd.rpc.shared import Shared
from aiograd.wire.fastcodec import decode_row, value_alone
from aiograd.wire.framing import Frame, Transfer
from aiograd.wire.messages import (
    ANSWERS,
    BORROW,
    CALL,
    CANCEL,
    CREDIT,
    DEFINE,
    FAULT,
    FLAT,
    FORGET,
    GOODBYE,
    ITEM,
    LEND,
    NUMBERED,
    PING,
    POST,
    REPLY,
    REQUEST,
    RETURN,
    ROW,
    SHARED,
)

if TYPE_CHECKING:
    from aiograd.rpc.link import Link

Handler = Callable[..., None]  # of one kind of message: flags, id, budget, target, body
_BEHIND = 512  # bytes that a waiting message takes besides its body
_REFUSALS = 8192  # headers and bodies for a peer that does not read: no more is refused, it is over


class Receiving:
    """The messages of one peer, from their frames to whom they concern."""

    def __init__(self, link: Link) -> None:
        self._link, self._agent, self._peer = link, link.agent, link.peer.name
        self._callee, self._outbox, self._restricted = link.callee, link.outbox, link.restricted
        inside = link.agent.inside if link.agent.trusts(link.peer) else link.agent.refused
        self._targets: dict[int, Target] = {0: inside}  # functions the peer may name
        self._once = Once()
        self._inbox = Inbox()
        self._unwanted: set[int] = set()  # calls in it that were cancelled
        self._behind = 0  # bytes of small messages that wait for large ones
        self._shared: Shared | None = None
        self.goodbye = False  # the peer has said that it leaves
        self._handlers = self._make_handlers()
        # What takes a message whose turn has come; its number was taken when it was announced.
        self._takers = self._plain_only(
            {
                CALL: self._callee.call,
                REQUEST: functools.partial(self._callee.service, REQUEST),
                POST: functools.partial(self._callee.service, POST),
                REPLY: link.caller.reply,
                FAULT: link.caller.fault,
                ITEM: link.caller.item,
            }
        )

    def _make_handlers(self) -> dict[int, Handler]:
        caller, callee, session = self._link.caller, self._callee, self._link.session
        handlers: dict[int, Handler] = {
            CALL: self._on_call,
            REQUEST: functools.partial(self._on_numbered, REQUEST),
            POST: functools.partial(self._on_numbered, POST),
            REPLY: caller.reply,
            FAULT: caller.fault,
            ITEM: caller.item,
            CANCEL: lambda flags, id, budget, target, body: callee.cancel(id),
            CREDIT: lambda flags, id, budget, target, body: callee.credit(id, target),
            DEFINE: self._on_define,
            FORGET: self._on_forget,
            PING: lambda flags, id, budget, target, body: session.acknowledged(id),
            GOODBYE: self._on_goodbye,
        }
        return self._plain_only(handlers)

    def _plain_only(self, handlers: dict[int, Handler]) -> dict[int, Handler]:
        """Let handlers of a restricted link see no pickles."""
        if self._restricted:
            for kind in (*NUMBERED, *ANSWERS):
                handlers[kind] = functools.partial(self._plain, handlers[kind])
        return handlers

    def share(self, shared: Shared) -> None:
        """Take messages about memory that both sides see."""
        self._shared = shared
        self._handlers |= {
            LEND: lambda flags, id, budget, target, body: shared.borrow(body),
            BORROW: lambda flags, id, budget, target, body: shared.answered(target),
            RETURN: lambda flags, id, budget, target, body: shared.returned(body),
        }

    def close(self) -> None:
        """What waits here takes no effect any more, nor what is still in the batch being read.

        The peer may come back in another session, which knows nothing of this one."""
        for kind in self._handlers:
            self._handlers[kind] = _ignore
        self._agent.budget.release(self._behind)
        self._behind = 0

    def receive(self, frames: list[Frame]) -> None:
        outbox, handlers, waiting = self._outbox, self._handlers, self._inbox.entries
        outbox.corked = True
        try:
            for kind, flags, id, budget, target, body in frames:
                try:
                    if waiting or (type(body) is Transfer and not flags & SHARED):
                        self._receive_between(kind, flags, id, budget, target, body)
                    else:
                        handlers[kind](flags, id, budget, target, body)
                except MemoryError as error:
                    if flags & ROW or (kind not in NUMBERED and kind not in ANSWERS):
                        raise  # which calls it was, or what the peer defined, is not known here
                    found = self._target(target) if kind in NUMBERED else None
                    self._refuse(kind, id, found, error)
        except Exception as error:
            if not isinstance(error, ProtocolError):  # of a message no honest peer would send
                error = ProtocolError(f"{type(error).__name__}: {error}", self._peer)
            self._link.broken(error)
            for frame in frames:
                self._release(frame[5])
        finally:
            if self._shared is not None and self._shared.back:
                self._shared.give_back()
            outbox.uncork()
            if self._agent.runtime.spin:
                self._agent.polling.stay_awake()

    def _receive_between(
        self, kind: int, flags: int, id: int, budget: float, target: int, body: Any
    ) -> None:
        """A large message, or any message while one is under way."""
        if isinstance(body, Transfer) and body in self._inbox:
            self._release(body)
            self._link.session.due = 0  # the sender waits to have its memory for itself
            self._inbox.complete(body)
            return
        found: Any = self._target(target) if kind in NUMBERED else target
        if isinstance(body, Transfer) and kind not in NUMBERED and kind not in ANSWERS:
            raise ProtocolError(f"{self._peer} sent a large message of kind {kind}")
        if flags & ROW and kind in (CALL, REPLY):
            self._receive_row(kind, flags, id, budget, found, body)
            return
        if kind in NUMBERED and not self._once.fresh(id):
            if isinstance(body, Transfer) and not flags & SHARED:
                self._inbox.announce(body, kind, id, lambda: None)  # its bytes are still to come
            return
        if isinstance(body, Transfer) and flags & SHARED:
            self._inbox.put(kind, id, lambda: self._take(kind, flags, id, budget, found, body))
        elif isinstance(body, Transfer):  # for the first time, even if all of it is here already
            self._inbox.announce(
                body, kind, id, lambda: self._take(kind, flags, id, budget, found, body)
            )
        elif kind in NUMBERED or kind in ANSWERS:
            self._put_behind(kind, flags, id, budget, found, bytes(body))
        elif kind == CANCEL and self._inbox.has_call(id):
            self._unwanted.add(id)
        else:
            self._handlers[kind](flags, id, budget, target, body)

    def _receive_row(
        self, kind: int, flags: int, first: int, budget: float, target: Any, body: Any
    ) -> None:
        """Calls or replies in a row, while a large message is under way."""
        if self._restricted:
            raise self._pickled()
        entries = decode_row(body)
        if kind == CALL:
            self._once.take_row(first, len(entries))
        for number, entry in enumerate(entries, first):
            data = value_alone(entry) if kind == REPLY else call_alone(flags, entry)
            self._put_behind(kind, flags & ~ROW, number, budget, target, data)

    def _release(self, body: Any) -> None:
        """Give back what was reserved for a large message that is all here."""
        if isinstance(body, Transfer) and body.complete and body.reserved:
            body.reserved = False
            self._agent.budget.release(body.size)

    def _refuse(self, kind: int, id: int, target: Target | None, error: Exception) -> None:
        """Let one message take no effect for want of memory, and nothing else suffer from it."""
        if isinstance(error, MemoryError):
            self._agent.budget.unavailable()
        if target is not None:
            self._callee.refuse(kind, id, target, error)
        else:
            self._link.caller.refuse(kind, id, error)

    def _put_behind(
        self, kind: int, flags: int, id: int, budget: float, target: Any, body: bytes
    ) -> None:
        """Let a small message wait for a large one, within the memory for what comes in."""
        size = len(body) + _BEHIND
        if not self._agent.budget.reserve(size):
            if self._outbox.paused and len(self._outbox.small) > _REFUSALS:  # nobody reads them
                raise ProtocolError(f"{self._peer} sends too much behind a large message")
            what = "its arguments" if kind in NUMBERED else "the result"
            refusal = self._agent.budget.refusal(self._agent.name, what, size, "inbound_budget")
            self._refuse(kind, id, target if kind in NUMBERED else None, refusal)
            return
        self._behind += size

        def go() -> None:
            self._behind -= size
            self._agent.budget.release(size)
            self._take(kind, flags, id, budget, target, body)

        self._inbox.put(kind, id, go)

    def _take(self, kind: int, flags: int, id: int, budget: float, target: Any, body: Any) -> None:
        """The turn of a message that has waited; a call that was cancelled meanwhile is refused."""
        if kind in NUMBERED and id in self._unwanted:
            self._unwanted.discard(id)
            budget = NO_TIME
        try:
            self._takers[kind](flags, id, budget, target, body)
        except MemoryError as error:  # not `receive`: it has another message in its hands
            self._refuse(kind, id, target if kind in NUMBERED else None, error)

    def _target(self, number: int) -> Target:
        target = self._targets.get(number)
        if target is None:
            raise ProtocolError(f"{self._peer} named function {number} before defining it")
        return target

    def _on_call(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        if flags & ROW:
            entries = decode_row(body)
            self._once.take_row(id, len(entries))
            self._callee.calls(flags & ~ROW, id, budget, self._target(target), entries)
        elif self._once.fresh(id):
            found = self._targets.get(target) or self._target(target)
            self._callee.call(flags, id, budget, found, body)

    def _on_numbered(
        self, kind: int, flags: int, id: int, budget: float, target: int, body: Any
    ) -> None:
        if self._once.fresh(id):
            found = self._targets.get(target) or self._target(target)
            self._callee.service(kind, flags, id, budget, found, body)

    def _plain(self, handler: Handler, flags: int, *rest: Any) -> None:
        """Over a restricted link: pass a message on if it is not a pickle."""
        if flags & (FLAT | ROW):
            raise self._pickled()
        handler(flags, *rest)

    def _pickled(self) -> ProtocolError:
        return ProtocolError(f"{self._peer} sent a pickle where only plain data may travel")

    def _on_define(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        if not target or len(self._targets) > TABLE + 1:
            raise ProtocolError(f"{self._peer} defined too many functions, or number 0")
        self._targets[target] = resolve(self._agent, flags, bytes(body), self._link.peer)

    def _on_forget(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        if target:
            self._targets.pop(target, None)

    def _on_goodbye(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        self.goodbye = True


def _ignore(flags: int, id: int, budget: float, target: Any, body: Any) -> None:
    """A message of a session that has ended."""
