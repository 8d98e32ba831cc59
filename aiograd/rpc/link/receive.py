"""What comes over a link: where each kind of message goes, in which order, and each only once.

    frames ─▶ receive ─┬─▶ handler of its kind ─▶ `Caller`, `Callee`, `SharedMemory`, `Session`
                       └─▶ `Inbox`, behind large messages that are still arriving ─▶ handler

Functions are named by numbers, which the peer defines before it uses them. A peer that breaks the
rules is not argued with: its link ends.

The order in which a peer's messages take effect, and that each does so once.

Large messages arrive in pieces between others, so a small one may be complete before a large one
that was sent earlier. Calls and replies may overtake each other; a request or post of the library
waits for everything sent before it, and calls wait for those. What belongs to one stream (a lane)
stays in order.

    sent:       call (large)   call   post   call
    complete:                  call   post   call   call (large)
    effect:                    call                 call (large)   post   call

One connection of a link: what asyncio calls when bytes come, and when they can go.

How much memory of a worker may be taken by messages that come in and are not dealt with yet.

All peers share it: large messages that are still arriving, small ones that wait behind them, and
calls of peers that read no answers. A message for which there is none left is refused: it is not
read, its sender gets `Overloaded`, and the link and everything else on it go on. So is one for
which the system has no memory although the budget has.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import Overloaded, ProtocolError
from aiograd.rpc.callee.dispatch import NO_TIME
from aiograd.rpc.callee.functions import TABLE, Target, resolve
from aiograd.rpc.envelope import call_alone
from aiograd.rpc.link.shared_memory import SharedMemory
from aiograd.rpc.observe.metrics import Limits
from aiograd.wire.fastcodec import decode_batch, value_alone
from aiograd.wire.framing import Frame, FrameReader, Transfer
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
    ORDERED,
    PING,
    POST,
    REPLY,
    REQUEST,
    SHARED,
    SHM_ACCEPT,
    SHM_OFFER,
    SHM_RELEASE,
)
from aiograd.wire.session import Session

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link


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
        self._shared: SharedMemory | None = None
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

    def share(self, shared: SharedMemory) -> None:
        """Take messages about memory that both sides see."""
        self._shared = shared
        self._handlers |= {
            SHM_OFFER: lambda flags, id, budget, target, body: shared.offered(body),
            SHM_ACCEPT: lambda flags, id, budget, target, body: shared.accepted(target),
            SHM_RELEASE: lambda flags, id, budget, target, body: shared.released(body),
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
                    if flags & BATCH or (kind not in NUMBERED and kind not in ANSWERS):
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
            if self._shared is not None and self._shared.unused:
                self._shared.release_blocks()
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
        if flags & BATCH and kind in (CALL, REPLY):
            self._receive_batch(kind, flags, id, budget, found, body)
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

    def _receive_batch(
        self, kind: int, flags: int, first: int, budget: float, target: Any, body: Any
    ) -> None:
        """Calls or replies in a row, while a large message is under way."""
        if self._restricted:
            raise self._pickled()
        entries = decode_batch(body)
        if kind == CALL:
            self._once.take_batch(first, len(entries))
        for number, entry in enumerate(entries, first):
            data = value_alone(entry) if kind == REPLY else call_alone(flags, entry)
            self._put_behind(kind, flags & ~BATCH, number, budget, target, data)

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
        if flags & BATCH:
            entries = decode_batch(body)
            self._once.take_batch(id, len(entries))
            self._callee.calls(flags & ~BATCH, id, budget, self._target(target), entries)
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
        if flags & (FAST | BATCH):
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


class Once:
    """Takes each call, request and post of a peer once, in constant memory.

    A sender numbers these messages in the order in which it announces them (see `Caller.last_id`),
    and the bytes of a session arrive once and in order. So numbers strictly rise on a link: one
    that repeats the latest is a copy of it, made by fault injection, and a smaller one is no honest
    peer's. Numbers may be left out, for messages that were dropped on purpose or never left.

    A number is taken when its message is *announced*. A large message is complete long after
    thousands of later ones, so a rule about complete messages would need a memory of every gap.
    """

    def __init__(self) -> None:
        self._last = 0  # the number taken last; they begin with 1

    def fresh(self, number: int) -> bool:
        """Take this number; False if its message is a copy of the latest one."""
        if number > self._last:
            self._last = number
            return True
        if number == self._last and number:
            return False
        raise self._misnumbered(number)

    def take_batch(self, first: int, count: int) -> None:
        """Take the numbers of a row. Rows are never copied: fault injection ends them."""
        if first <= self._last:
            raise self._misnumbered(first)
        self._last = first + count - 1

    def _misnumbered(self, number: int) -> ProtocolError:
        return ProtocolError(f"message {number} was announced after message {self._last}")


class _Entry:
    __slots__ = ("action", "kind", "lane", "ready")

    def __init__(self, kind: int, lane: int, action: Callable[[], None], ready: bool) -> None:
        self.kind, self.lane, self.action, self.ready = kind, lane, action, ready


class Inbox:
    """Messages that wait for a large one sent before them. Empty almost always."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []  # always the same list
        self._large: dict[Any, _Entry] = {}

    def __contains__(self, key: Any) -> bool:
        """Whether a large message was announced and is not complete."""
        return key in self._large

    def has_call(self, lane: int) -> bool:
        """Whether a call, request or post of this number waits here."""
        return any(entry.lane == lane and entry.kind in NUMBERED for entry in self.entries)

    def announce(self, key: Any, kind: int, lane: int, action: Callable[[], None]) -> None:
        """A large message begins; `action` runs when it is complete and its turn."""
        entry = self._large[key] = _Entry(kind, lane, action, ready=False)
        self.entries.append(entry)

    def complete(self, key: Any) -> None:
        self._large.pop(key).ready = True
        self._settle()

    def put(self, kind: int, lane: int, action: Callable[[], None]) -> None:
        """A small message; `action` runs now if it may overtake what is still coming."""
        self.entries.append(_Entry(kind, lane, action, ready=True))
        self._settle()

    def _settle(self) -> None:
        ready: list[_Entry] = []
        waiting: list[_Entry] = []
        ordered = False  # one of the library's messages waits further ahead
        lanes: set[int] = set()
        for entry in self.entries:
            if entry.kind in ORDERED:
                blocked = bool(waiting)
            elif entry.kind == CALL:
                blocked = ordered
            else:
                blocked = entry.lane in lanes
            if entry.ready and not blocked:
                ready.append(entry)
                continue
            waiting.append(entry)
            ordered = ordered or entry.kind in ORDERED
            if entry.kind in ANSWERS:
                lanes.add(entry.lane)
        self.entries[:] = waiting
        for entry in ready:
            entry.action()


LAST_WORDS: Final = 0.25  # seconds for what was written before closing to leave


class Connection(asyncio.BufferedProtocol):
    """The protocol of an established connection: bytes to frames."""

    def __init__(self, link: Link, transport: Any, reader: FrameReader, session: Session) -> None:
        self._link, self._receive = link, link.receiving.receive
        self.transport = transport
        self._reader, self._session = reader, session
        self.ended = link.agent.loop.create_future()

    def mute(self) -> None:
        """Whatever still comes does not count any more: it goes nowhere."""
        self._reader, self._session = _Nowhere(), Session()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        session = self._session
        session.received += nbytes
        try:
            frames = self._reader.advance(nbytes)
        except Exception as error:  # on another connection it would only come again
            self._link.broken(error)
            return
        if frames:
            self._receive(frames)
        elif (shared := self._link.shared) is not None and shared.urgent and shared.unused:
            shared.release_blocks()
        if session.received >= session.overdue and session is self._session:
            self._link.outbox.acknowledge()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._link.connection is self:
            self._link.outbox.pause()

    def resume_writing(self) -> None:
        if self._link.connection is self:
            self._link.outbox.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._link.disconnected(self, exc)


class _Nowhere(FrameReader):
    """Reads what nobody wants to know."""

    def __init__(self) -> None:
        self._bin = memoryview(bytearray(4096))

    def get_buffer(self) -> memoryview:
        return self._bin

    def advance(self, count: int) -> list[Frame]:
        return []


async def hang_up(connections: Sequence[Connection]) -> None:
    """Let the last words leave, but wait for nobody who does not read them."""
    ends = [connection.ended for connection in connections]
    if ends:
        await asyncio.wait(ends, timeout=LAST_WORDS)
    for connection in connections:
        if not connection.ended.done():
            connection.transport.abort()
    if ends:
        await asyncio.wait(ends, timeout=LAST_WORDS)


class Budget:
    """Bytes that one worker has reserved for what comes in, at most `Options.inbound_budget`."""

    def __init__(self, most: int, limits: Limits) -> None:
        self._most, self._limits = most, limits
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Take memory for a message of `size` bytes; False if there is not enough."""
        if self.used + size > self._most:
            self._limits.reached("inbound_budget")
            return False
        self.used += size
        return True

    def unavailable(self, size: int = 0) -> None:
        """The system did not give memory, of which so many bytes were reserved."""
        self._limits.reached("allocation")
        self.used -= size

    def refusal(self, worker: str, what: str, size: int, limit: str) -> Overloaded:
        """What the sender of a message is told for which this worker has no memory."""
        most = f"inbound_budget: {self.used} of {self._most} are taken"
        why = most if limit == "inbound_budget" else "allocation: the system has none left"
        return Overloaded(worker, f"no memory for {what}, {size} bytes ({why})")

    def undecodable(self, worker: str, what: str, error: Exception) -> Exception:
        """The same where memory was missing to decode a message; any other error as it is."""
        if not isinstance(error, MemoryError):
            return error
        self.unavailable()
        return Overloaded(worker, f"no memory to decode {what} (allocation: {error})")

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        self.used -= size
