"""What comes over a link: frames to the part that they concern, each once, and in order.

    Connection ─▶ FrameReader ─▶ Receiver ─┬─▶ `Callee`, `Replies`, `SharedMemory`, `Session`
                                           └─▶ Inbox, behind large messages ─▶ the same

A batch is unpacked here, so nobody else knows it. Functions are named by numbers, which the peer
defines before it uses them. A peer that breaks the protocol loses its link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol

from aiograd.errors import ProtocolError
from aiograd.rpc.callee.dispatch import NO_TIME, Callee
from aiograd.rpc.callee.functions import TABLE, Target
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.caller.replies import Replies
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.link.inbox import Inbox, Once
from aiograd.rpc.link.send import Outbox
from aiograd.rpc.link.shared_memory import SharedMemory
from aiograd.wire.fastcodec import decode_batch
from aiograd.wire.framing import Frame, Transfer
from aiograd.wire.messages import (
    ANSWERS,
    BATCH,
    CALL,
    CANCEL,
    CREDIT,
    DEFINE,
    FAST,
    FAULT,
    FORGET,
    GOODBYE,
    ITEM,
    NUMBERED,
    PING,
    POST,
    REPLY,
    REQUEST,
    SHARED,
    SHM_ACCEPT,
    SHM_OFFER,
    SHM_RELEASE,
    SLEEP,
)
from aiograd.wire.session import Session

Handler = Callable[[Frame], None]
_BEHIND: Final = 512  # bytes that a waiting message takes besides its body
_NAMES: Final = 512 << 10  # bytes of the names of functions that a partner may define
# Headers and bodies for a peer that does not read: no more is refused, the link ends.
_REFUSALS: Final = 8192


class Receiving(Protocol):
    """The link, as far as receiving concerns it."""

    outbox: Outbox
    session: Session
    restricted: bool
    asked: bool  # the peer wants a sign of life

    @property
    def peer_name(self) -> str:
        """The name of the peer, for errors."""

    def resolve(self, flags: int, data: bytes) -> Target:
        """Find the function that the peer defines."""

    def broken(self, error: Exception) -> None:
        """End the link: the peer broke the protocol."""

    def sleep_received(self, position: int, connection: int) -> None:
        """Take note that the peer needs no connection for now."""


class Receiver:
    """The messages of one peer, from their frames to the part that they concern."""

    def __init__(
        self, link: Receiving, callee: Callee, replies: Replies, budget: Budget, name: str
    ) -> None:
        self._link, self._callee, self._replies = link, callee, replies
        self._budget, self._name = budget, name
        self._outbox = link.outbox
        self._targets: dict[int, Target] = {}  # functions the peer may name
        self._names: dict[int, int] = {}  # bytes of their names, if the peer is a partner
        self._name_bytes = 0
        self._once = Once()
        self._inbox = Inbox()
        self._cancelled: set[int] = set()  # calls in it that were cancelled
        self._behind = 0  # bytes of small messages that wait for large ones
        self._shared: SharedMemory | None = None
        self._closed = False
        self.goodbye: bool = False  # the peer has said that it leaves
        self.after_batch: Callable[[], None] | None = None  # keeps the loop awake after traffic
        self._handlers: dict[int, Handler] = {
            CALL: self._on_call,
            REQUEST: self._on_numbered,
            POST: self._on_numbered,
            REPLY: self._on_reply,
            FAULT: replies.fault,
            ITEM: replies.item,
            CANCEL: lambda frame: callee.cancel(frame.id),
            CREDIT: lambda frame: callee.execution.credit(frame.id, frame.target),
            DEFINE: self._on_define,
            FORGET: self._on_forget,
            PING: self._on_ping,
            SLEEP: self._on_sleep,
            GOODBYE: self._on_goodbye,
        }

    def allow_inside(self, target: Target) -> None:
        """Set what function number 0 means: one that comes inside its call."""
        self._targets[0] = target

    @property
    def waiting(self) -> bool:
        """Whether a large message is under way."""
        return bool(self._inbox.entries)

    def share(self, shared: SharedMemory) -> None:
        """Take messages about memory that both sides see."""
        self._shared = shared
        self._handlers |= {
            SHM_OFFER: lambda frame: shared.offered(frame.body),
            SHM_ACCEPT: lambda frame: shared.accepted(frame.target),
            SHM_RELEASE: lambda frame: shared.released(frame.body),
        }

    def close(self) -> None:
        """Drop what waits here, and what is still in the batch being read.

        The peer may come back in another session, which knows nothing of this one."""
        self._closed = True
        for kind in self._handlers:
            self._handlers[kind] = _ignore
        self._budget.release(self._behind)
        self._behind = 0

    # ── sorting ─────────────────────────────────────────────────────────────────────────────────

    def receive(self, frames: list[Frame]) -> None:
        """Let every message take effect, or wait for a large one sent before it."""
        outbox, handlers, waiting = self._outbox, self._handlers, self._inbox.entries
        restricted = self._link.restricted
        outbox.corked = True
        try:
            for frame in frames:
                kind = frame.kind
                if restricted and frame.flags & FAST:
                    raise self._error("a pickle where only plain data may travel")
                try:
                    if waiting or (frame.body.__class__ is Transfer and not frame.flags & SHARED):
                        self._receive_between(frame)
                    else:
                        handlers[kind](frame)
                except MemoryError as error:
                    if frame.flags & BATCH or (kind not in NUMBERED and kind not in ANSWERS):
                        raise  # which calls it was, or what the peer defined, is not known here
                    self._refuse(frame, error)
        except Exception as error:
            if not isinstance(error, ProtocolError):  # of a message no honest peer would send
                error = ProtocolError(f"{type(error).__name__}: {error}", self._link.peer_name)
            self._link.broken(error)
            for frame in frames:
                self._release(frame.body)
        finally:
            if self._shared is not None and self._shared.unused:
                self._shared.release_blocks()
            outbox.uncork()
            if self.after_batch is not None:
                self.after_batch()

    def give_up(self, transfer: Transfer) -> None:
        """Let a large message count as complete that was refused while it was under way."""
        self._outbox.corked = True
        try:
            if transfer in self._inbox:
                self._inbox.complete(transfer)
        except ProtocolError as error:  # of a message behind it
            self._link.broken(error)
        finally:
            self._outbox.uncork()

    def _error(self, text: str) -> ProtocolError:
        return ProtocolError(f"{self._link.peer_name} sent {text}")

    def _invocation(self, frame: Frame) -> Invocation:
        target = self._target(frame.target)
        return Invocation(frame.kind, frame.flags, frame.id, frame.budget, target, frame.body)

    def _target(self, number: int) -> Target:
        target = self._targets.get(number)
        if target is None:
            raise self._error(f"the number {number} of a function before defining it")
        return target

    def _invocations(self, frame: Frame) -> list[Invocation]:
        """Unpack a batch of calls."""
        entries = decode_batch(frame.body)
        self._once.take_batch(frame.id, len(entries))
        kind, flags, budget, target = frame.kind, frame.flags, frame.budget, frame.target
        found = self._target(target)
        return [
            Invocation(kind, flags, id, budget, found, entry)
            for id, entry in enumerate(entries, frame.id)
        ]

    def _on_call(self, frame: Frame) -> None:
        if not frame.flags & BATCH:
            self._on_numbered(frame)
            return
        entries = decode_batch(frame.body)
        self._once.take_batch(frame.id, len(entries))
        target = self._targets.get(frame.target) or self._target(frame.target)
        self._callee.accept_batch(frame, target, entries)

    def _on_numbered(self, frame: Frame) -> None:
        if self._once.fresh(frame.id):
            target = self._targets.get(frame.target) or self._target(frame.target)
            self._callee.accept(
                Invocation(frame.kind, frame.flags, frame.id, frame.budget, target, frame.body)
            )

    def _on_reply(self, frame: Frame) -> None:
        if frame.flags & BATCH:
            self._replies.reply_entries(frame.id, decode_batch(frame.body))
        else:
            self._replies.reply(frame)

    def _on_define(self, frame: Frame) -> None:
        if not frame.target or len(self._targets) > TABLE + 1:
            raise self._error("a definition of too many functions, or of number 0")
        if self._link.restricted:
            self._count_name(frame.target, len(frame.body))
        self._targets[frame.target] = self._link.resolve(frame.flags, bytes(frame.body))

    def _count_name(self, number: int, size: int) -> None:
        """Bound the names of a partner's functions: the table is for as many short ones."""
        self._name_bytes += size - self._names.pop(number, 0)
        self._names[number] = size
        if self._name_bytes > _NAMES:
            raise self._error(f"names of functions of more than {_NAMES} bytes")

    def _on_forget(self, frame: Frame) -> None:
        if frame.target:
            self._targets.pop(frame.target, None)
            self._name_bytes -= self._names.pop(frame.target, 0)

    def _on_ping(self, frame: Frame) -> None:
        session = self._link.session
        session.pings += 1
        session.acknowledged(frame.id)
        if frame.target:
            self._link.asked = True

    def _on_sleep(self, frame: Frame) -> None:
        session = self._link.session
        session.pings += 1
        session.acknowledged(frame.id)
        self._link.sleep_received(frame.id, frame.target)

    def _on_goodbye(self, frame: Frame) -> None:
        self.goodbye = True

    # ── behind a large message ──────────────────────────────────────────────────────────────────

    def _receive_between(self, frame: Frame) -> None:
        """Take a large message, or any message while one is under way."""
        kind, flags, id, body = frame.kind, frame.flags, frame.id, frame.body
        large = isinstance(body, Transfer)
        if self._closed:  # by an earlier message of this batch
            self._release(body)
        elif large and body in self._inbox:
            self._release(body)
            self._link.session.due = 0  # the sender waits to have its memory for itself
            self._inbox.complete(body)
        elif kind not in NUMBERED and kind not in ANSWERS:
            if large:
                raise self._error(f"a large message of kind {kind}")
            if kind == CANCEL and self._inbox.has_call(id):
                self._cancelled.add(id)
            else:
                self._handlers[kind](frame)
        elif flags & BATCH:
            self._receive_batch(frame)
        elif kind in NUMBERED and not self._once.fresh(id):
            if large and not flags & SHARED:
                self._inbox.announce(body, kind, id, _nothing)  # its bytes are still to come
        else:
            take = self._taker(frame)
            if large and not flags & SHARED:  # for the first time, even if all of it is here
                self._inbox.announce(body, kind, id, take)
            elif large:
                self._inbox.put(kind, id, take)
            else:
                self._put_behind(kind, id, len(body), take, self._refuser(frame))

    def _receive_batch(self, frame: Frame) -> None:
        """Let the calls or replies of a batch wait one by one."""
        size = len(frame.body)
        if frame.kind == CALL:
            calls = self._invocations(frame)
            for call in calls:
                call.size = size // len(calls)
                take, refuse = self._call_taker(call), self._call_refuser(call)
                self._put_behind(CALL, call.id, call.size, take, refuse)
            return
        entries = decode_batch(frame.body)
        for id, entry in enumerate(entries, frame.id):
            alone = replace(frame, id=id, flags=FAST)
            take = self._reply_taker(id, entry)
            self._put_behind(REPLY, id, size // len(entries), take, self._refuser(alone))

    def _taker(self, frame: Frame) -> Callable[[], None]:
        """Return what lets a message take effect when its turn has come."""
        if frame.kind in NUMBERED:
            call = self._invocation(frame)
            if not isinstance(call.body, Transfer):
                call.body = bytes(call.body)  # the view is valid only while this batch is read
            return self._call_taker(call)
        if not isinstance(frame.body, Transfer):
            frame = replace(frame, body=bytes(frame.body))
        handler = self._handlers[frame.kind]

        def take() -> None:
            try:
                handler(frame)
            except MemoryError as error:  # not `receive`: it has another message in its hands
                self._refuse(frame, error)

        return take

    def _call_taker(self, call: Invocation) -> Callable[[], None]:
        def take() -> None:
            if call.id in self._cancelled:
                self._cancelled.discard(call.id)
                call.budget = NO_TIME
            try:
                self._callee.accept(call)
            except MemoryError as error:
                self._refuse_call(call, error)

        return take

    def _reply_taker(self, id: int, entry: Any) -> Callable[[], None]:
        return lambda: self._replies.reply_entries(id, [entry])

    def _put_behind(
        self,
        kind: int,
        id: int,
        size: int,
        take: Callable[[], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        """Let a small message wait for a large one, within the memory for what comes in."""
        size += _BEHIND
        if not self._budget.reserve(size):
            if self._outbox.paused and self._outbox.length > _REFUSALS:  # nobody reads them
                raise self._error("too much behind a large message")
            what = "its arguments" if kind in NUMBERED else "the result"
            refuse(self._budget.refusal(self._name, what, size, "inbound_budget"))
            return
        self._behind += size

        def go() -> None:
            if self._closed:  # `close` has released the memory
                return
            self._behind -= size
            self._budget.release(size)
            take()

        self._inbox.put(kind, id, go)

    # ── memory ──────────────────────────────────────────────────────────────────────────────────

    def _release(self, body: Any) -> None:
        """Give back what was reserved for a large message that is all here."""
        if isinstance(body, Transfer) and body.complete and body.reserved:
            body.reserved = False
            self._budget.release(body.size)

    def _refuser(self, frame: Frame) -> Callable[[Exception], None]:
        return lambda error: self._refuse(frame, error)

    def _call_refuser(self, call: Invocation) -> Callable[[Exception], None]:
        return lambda error: self._refuse_call(call, error)

    def _refuse(self, frame: Frame, error: Exception) -> None:
        """Let one message take no effect for want of memory, and nothing else suffer from it."""
        if frame.kind in NUMBERED:
            self._refuse_call(self._invocation(frame), error)
            return
        if isinstance(error, MemoryError):
            self._budget.unavailable()
        self._replies.refuse(frame.kind, frame.id, error)

    def _refuse_call(self, call: Invocation, error: Exception) -> None:
        if isinstance(error, MemoryError):
            self._budget.unavailable()
        # Another object: this one may count as answered, if memory was missing for its answer.
        again = Invocation(call.kind, call.flags, call.id, call.budget, call.target, None)
        self._callee.refuse(again, error)


def _ignore(frame: Frame) -> None:
    """Drop a message of a session that has ended."""


def _nothing() -> None:
    """Let a copy of a message, made by fault injection, take no effect."""
