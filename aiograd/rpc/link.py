"""A link: everything between this worker and one peer.

It is dialled when first needed, batches what is sent in one tick, and ends with the connection:
then every call under way fails with `WorkerLost`. A peer that is only silent is *suspect*: its
process may be stopped or its loop blocked, and it resumes unharmed when it wakes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiograd.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    WorkerClosed,
    WorkerLost,
    WorkerUnresponsive,
)
from aiograd.rpc import faults
from aiograd.rpc.callee import EXTRA_LENGTH, Callee
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.functions import SERVICE, TABLE, Shipment, Target
from aiograd.rpc.future import Future
from aiograd.rpc.inbox import Inbox, Once
from aiograd.rpc.outbox import Outbox, is_small
from aiograd.rpc.travel import Arrival, run_undo
from aiograd.wire.frames import Frame, FrameReader, Transfer
from aiograd.wire.messages import (
    CALL,
    CANCEL,
    CREDIT,
    DEFINE,
    EMPTY,
    EXTRA,
    FAULT,
    FORGET,
    GOODBYE,
    ITEM,
    NUMBERED,
    OP,
    PING,
    POST,
    REPLY,
    REQUEST,
    TRAVELLED,
)
from aiograd.wire.payload import Payload

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

_log = logging.getLogger("aiograd")
_UNRESPONSIVE = 30.0  # seconds of silence after which calls without a deadline end
_EMBEDDED = Target(lambda: None, "")  # stands for a function that comes inside its call


class Connection(asyncio.BufferedProtocol):
    """The protocol of an established connection: bytes to frames."""

    def __init__(self, link: Link, transport: Any) -> None:
        self._link = link
        self.transport = transport
        agent = link.agent
        self.reader = FrameReader(agent.options.max_message, agent.reserve)
        self.read = 0  # how often bytes came; a silent peer does not change it

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.read += 1
        try:
            frames = self.reader.advance(nbytes)
        except ProtocolError as error:
            self._link.broken(error)
            return
        self._link.receive(frames)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._link.outbox.pause()

    def resume_writing(self) -> None:
        self._link.outbox.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.disconnected(self, exc)


class Link:
    """One peer. States: new → dialling → open → lost (or closed by us)."""

    def __init__(self, agent: Agent, peer: PeerInfo) -> None:
        self.agent, self.peer = agent, peer
        self.state = "new"
        self.connection: Connection | None = None
        self.outbox = Outbox(agent.loop, lambda: None)
        self.callee = Callee(self)
        self.error: Exception | None = None  # why it is lost
        self.suspect = False
        self.pending: dict[int, Future[Any]] = {}
        self.streams: dict[int, Any] = {}
        self._inflight = 0
        self._waiting: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._next_id = 0
        self._once = Once()
        self._inbox = Inbox()
        self._numbers: OrderedDict[Shipment, int] = OrderedDict()  # functions the peer knows
        self._next_number = 0
        self._targets: dict[int, Target] = {0: _EMBEDDED}  # functions the peer may name
        self._silent = 0  # heartbeats without a byte from the peer
        self._last_read = self._last_written = 0
        self._goodbye = False
        self._handlers: dict[int, Callable[[int, int, float, int, Any], None]] = {
            CALL: functools.partial(self._on_numbered, CALL),
            REQUEST: functools.partial(self._on_numbered, REQUEST),
            POST: functools.partial(self._on_numbered, POST),
            REPLY: self._on_reply,
            FAULT: self._on_fault,
            CANCEL: self._on_cancel,
            DEFINE: self._on_define,
            FORGET: self._on_forget,
            ITEM: self._on_item,
            CREDIT: self._on_credit,
            PING: self._on_ping,
            GOODBYE: self._on_goodbye,
        }

    # ── connecting ──────────────────────────────────────────────────────────────────────────────

    def opened(self, transport: Any) -> None:
        """A proven connection to the peer; everything queued so far leaves now."""
        self.state = "open"
        self.connection = Connection(self, transport)
        transport.set_protocol(self.connection)
        if not transport.is_reading():
            transport.resume_reading()
        self.outbox.open(transport)

    def broken(self, error: Exception) -> None:
        """The peer broke the protocol: end the connection."""
        _log.error("%s: closing the connection to %s: %s", self.agent.name, self.peer.name, error)
        if self.connection is not None:
            self.connection.transport.abort()
        self.lose(WorkerLost(self.peer.name, why=str(error)))

    def disconnected(self, connection: Connection, exc: Exception | None) -> None:
        if connection is self.connection and self.state == "open":
            why = "it was shut down" if self._goodbye else str(exc or "connection closed")
            self.lose(WorkerLost(self.peer.name, why=why))

    def lose(self, error: Exception) -> None:
        """The peer is gone, or was never there."""
        if self.state in ("lost", "closed"):
            return
        self.state, self.error = "lost", error
        self._end(error)
        self.agent.peer_lost(self.peer, error)

    def close(self) -> None:
        """We leave: say so, end everything."""
        if self.state in ("lost", "closed"):
            return
        was, self.state = self.state, "closed"
        self.error = WorkerClosed(f"{self.agent.name} was shut down", self.agent.name)
        connection = self.connection
        if was == "open" and connection is not None:
            self.outbox.put(GOODBYE, 0, 0, 0.0, 0, b"")
            self.outbox.flush()
        self._end(self.error)
        if connection is not None:
            if connection.transport.get_write_buffer_size():
                connection.transport.abort()
            else:
                connection.transport.close()

    def _end(self, error: Exception) -> None:
        unsent = self.outbox.unsent()
        nothing_sent = self.connection is None
        self.outbox.close()
        futures = list(self.pending.items())
        self.pending.clear()
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            self._finish(future)
            _set_exception(future, self._lost(error, executed="no"))
        for id, future in futures:
            never = nothing_sent or (CALL, id) in unsent
            self._finish(future)
            if future._stream is not None:
                future._stream.ended(self._lost(error, "no" if never else "unknown"))
            else:
                _set_exception(future, self._lost(error, "no" if never else "unknown"))
        self.callee.close()

    def _lost(self, error: Exception, executed: str) -> Exception:
        if isinstance(error, WorkerLost):
            return WorkerLost(error.worker, executed, error.why)
        return error

    # ── calling ─────────────────────────────────────────────────────────────────────────────────

    def begin(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        deadline: float,
        shipment: Shipment,
        payload: Payload,
        embedded: bool = False,
    ) -> None:
        """Send a call or request, or let it wait until fewer are under way."""
        if future.cancelled():
            run_undo(future._undo)
            return
        if self.state in ("lost", "closed"):
            assert self.error is not None
            run_undo(future._undo)
            future._link = None
            future.set_exception(self._lost(self.error, executed="no"))
            return
        future._link = self
        if deadline != math.inf:
            future._bucket = bucket = self.agent.deadlines.bucket(deadline)
            bucket[future] = None
        if kind == CALL and (self._inflight >= self.agent.options.max_inflight or self._waiting):
            start = functools.partial(
                self._start, future, kind, flags, deadline, shipment, payload, embedded
            )
            self._waiting.append((future, start))
        else:
            self._start(future, kind, flags, deadline, shipment, payload, embedded)

    def _start(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        deadline: float,
        shipment: Shipment,
        payload: Payload,
        embedded: bool,
    ) -> None:
        number = 0 if embedded else self.number(shipment)
        self._next_id = future._id = id = self._next_id + 1
        self.pending[id] = future
        if kind == CALL:
            self._inflight += 1
        budget = deadline - self.agent.loop.time() if deadline != math.inf else math.inf
        self.send(kind, flags, id, budget, number, payload, future._kind, future._undo, future)

    def post(self, shipment: Shipment, flags: int, payload: Payload, undo: list[Any]) -> None:
        if self.state in ("lost", "closed"):
            run_undo(undo)
            return
        number = self.number(shipment)
        self._next_id += 1
        self.send(POST, flags, self._next_id, math.inf, number, payload, shipment.name, undo)

    def number(self, shipment: Shipment) -> int:
        """The number under which the peer knows a function; it is told first if it does not."""
        number = self._numbers.get(shipment)
        if number is None:
            if len(self._numbers) >= TABLE:
                _, old = self._numbers.popitem(last=False)
                self.outbox.put(FORGET, 0, 0, 0.0, old, b"")
            self._next_number += 1
            number = self._numbers[shipment] = self._next_number
            assert shipment.data is not None
            self._put(DEFINE, shipment.flags, 0, 0.0, number, Payload(shipment.data))
        return number

    def cancelled(self, future: Future[Any]) -> None:
        """The caller gave up."""
        sent = future._id in self.pending
        if sent:
            del self.pending[future._id]
            self._put_small(CANCEL, future._id)
        self._finish(future)
        if sent:
            self._next()

    def expired(self, future: Future[Any]) -> None:
        """The deadline of a call has come."""
        future._bucket = None
        waited = future._id == 0
        if not waited and future._id not in self.pending:
            return
        if not waited:
            del self.pending[future._id]
            self._put_small(CANCEL, future._id)
        self._finish(future)
        error: Exception = DeadlineExceeded(self.peer.name, future._function, future._seconds)
        if waited:
            error = Overloaded(
                self.peer.name,
                f"{self.agent.options.max_inflight} calls were under way until the deadline",
            )
        if future._stream is not None:
            future._stream.ended(error)
        _set_exception(future, error)
        self._next()

    def _finish(self, future: Future[Any]) -> None:
        """Forget a call that has ended, however it did."""
        future._link = None
        if future._id and future._kind in _USER_KINDS:
            self._inflight -= 1
        if future._bucket is not None:
            future._bucket.pop(future, None)
            future._bucket = None

    def _next(self) -> None:
        while self._waiting and self._inflight < self.agent.options.max_inflight:
            future, start = self._waiting.popleft()
            if not future.done():
                start()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        kind: int,
        flags: int,
        id: int,
        budget: float,
        target: int,
        payload: Payload,
        name: str,
        undo: list[Any] | None = None,
        future: Future[Any] | None = None,
    ) -> None:
        """Queue a message, unless somebody wants it to fail."""
        if self.state == "new":
            self.agent.dial(self)
        if self.state in ("lost", "closed"):
            run_undo(undo)
            return
        meddler = self.agent.faults
        if meddler is None:
            self._put(kind, flags, id, budget, target, payload)
            return
        verdict = meddler.on_send(name, self.peer.name)
        put = functools.partial(self._put, kind, flags, id, budget, target, payload)
        if verdict.action == "delay":
            self.agent.loop.call_later(verdict.seconds, self._put_late, put)
        elif verdict.action == "fail":
            run_undo(undo)
            if future is not None:
                self.pending.pop(id, None)
                self._finish(future)
                error = WorkerLost(self.peer.name, "no", "injected failure")
                self.agent.loop.call_soon(_set_exception, future, error)
        elif verdict.action != "drop":
            put()
            if verdict.action == "duplicate":
                put()

    def _put_late(self, put: Callable[[], None]) -> None:
        if self.state not in ("lost", "closed"):
            put()

    def _put(
        self, kind: int, flags: int, id: int, budget: float, target: int, payload: Payload
    ) -> None:
        data, buffers, _ = payload
        if is_small(data, buffers):
            self.outbox.put(kind, flags, id, budget, target, data)
        else:
            self.outbox.put_large(kind, flags, id, budget, target, (data, *buffers))

    def _put_small(self, kind: int, id: int, target: int = 0) -> None:
        if self.state in ("open", "dialling"):
            self.outbox.put(kind, 0, id, 0.0, target, b"")

    def beat(self) -> None:
        """Once per heartbeat: say that we live, and notice when the peer does not."""
        connection = self.connection
        if self.state != "open" or connection is None:
            return
        if self.outbox.written == self._last_written and self.outbox.empty:
            self.outbox.put(PING, 0, 0, 0.0, 0, b"")
        self._last_written = self.outbox.written
        # Counted in beats of ours, not by the clock: a blocked loop here proves nothing about them.
        self._silent = 0 if connection.read != self._last_read else self._silent + 1
        self._last_read = connection.read
        silence = self._silent * self.agent.options.heartbeat
        self.suspect = silence >= self.agent.options.silence
        if silence >= _UNRESPONSIVE:
            for id, future in list(self.pending.items()):
                if future._bucket is None:
                    del self.pending[id]
                    self._finish(future)
                    error = WorkerUnresponsive(self.peer.name, why=f"{silence:g} s")
                    _set_exception(future, error)
            self._next()

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def receive(self, frames: list[Frame]) -> None:
        outbox, handlers, inbox = self.outbox, self._handlers, self._inbox
        outbox.corked = True
        try:
            for kind, flags, id, budget, target, body in frames:
                if inbox or type(body) is Transfer:
                    self._receive_between(kind, flags, id, budget, target, body)
                else:
                    handlers[kind](flags, id, budget, target, body)
        except ProtocolError as error:
            self.broken(error)
        finally:
            outbox.corked = False
            outbox.flush()

    def _receive_between(
        self, kind: int, flags: int, id: int, budget: float, target: int, body: Any
    ) -> None:
        """A large message, or any message while one is under way."""
        if isinstance(body, Transfer):
            if body.complete:
                if not body.refused:
                    self.agent.release(body.size)
                self._inbox.complete(body)
                return
            found: Any = self._target(target) if kind in NUMBERED else target
            self._inbox.announce(
                body, kind, lambda: self._handlers[kind](flags, id, budget, found, body)
            )
            return
        if kind in NUMBERED:
            found, copy = self._target(target), bytes(body)
            self._inbox.put(kind, lambda: self._handlers[kind](flags, id, budget, found, copy))
        else:
            self._handlers[kind](flags, id, budget, target, body)

    def _target(self, number: int) -> Target:
        target = self._targets.get(number)
        if target is None:
            raise ProtocolError(f"{self.peer.name} named function {number} before defining it")
        return target

    def _on_numbered(
        self, kind: int, flags: int, id: int, budget: float, target: Any, body: Any
    ) -> None:
        if self._once.fresh(id):
            found = target if type(target) is Target else self._target(target)
            self.callee.arrived(kind, flags, id, budget, found, body)

    def _on_reply(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        future = self.pending.pop(id, None)
        if future is None:
            self._drop_reply(flags, body)
            return
        self._finish(future)
        if self._waiting:
            self._next()
        if flags & EMPTY:
            value, waits = None, None
        elif not flags & (EXTRA | TRAVELLED) and type(body) is not Transfer:
            try:
                value, waits = self.agent.codec.decode(body), None
            except Exception as error:
                _set_exception(future, faults.annotate(error, future._function, self.peer.name, ""))
                return
        else:
            try:
                value, waits = self._unpack_reply(flags, body)
            except Exception as error:
                _set_exception(future, error)
                return
        if waits:
            self.agent.spawn(_settle(future, value, waits))
        elif not future.done():
            future.set_result(value)

    def _drop_reply(self, flags: int, body: Any) -> None:
        """Nobody waits for it, but its travellers must still arrive to be let go properly."""
        if flags & (TRAVELLED | EXTRA) and not flags & EMPTY:
            try:
                self._unpack_reply(flags, body)
            except Exception as error:
                _log.debug("a late reply from %s: %r", self.peer.name, error)

    def _unpack_reply(self, flags: int, body: Any) -> tuple[Any, list[asyncio.Future[Any]]]:
        agent = self.agent
        if isinstance(body, Transfer) and body.refused:
            raise Overloaded(agent.name, "no memory here for the result")
        segments: Any = body.segments if isinstance(body, Transfer) else (body,)
        data, buffers = segments[0], segments[1:]
        arrival = Arrival(self.peer, "reply")
        if flags & EXTRA:
            (length,) = EXTRA_LENGTH.unpack_from(data)
            start = EXTRA_LENGTH.size + length
            extra = agent.codec.decode(data[EXTRA_LENGTH.size : start])
            data = data[start:]
            if "baggage" in extra and agent.baggage is not None:
                arrival.held = agent.baggage.arrive(extra["baggage"], arrival)
        value = agent.codec.decode(data, buffers, bool(flags & TRAVELLED), arrival)
        if agent.baggage is not None:
            agent.baggage.landed(arrival)
        return value, arrival.waits

    def _on_fault(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        future = self.pending.pop(id, None)
        if future is None:
            return
        self._finish(future)
        self._next()
        segments = body.segments if isinstance(body, Transfer) else (body,)
        try:
            fault, function, text = self.agent.codec.decode(segments[0], segments[1:])
            error = faults.rebuild(self.agent.codec, fault, self.peer.name)
            error = faults.annotate(error, function, self.peer.name, text)
        except Exception as trouble:
            error = ProtocolError(f"a fault that cannot be read: {trouble!r}", self.peer.name)
        if future._stream is not None:
            future._stream.ended(error)
        _set_exception(future, error)

    def _on_cancel(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        self.callee.cancel(id)

    def _on_define(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        if len(self._targets) > TABLE + 1:
            raise ProtocolError(f"{self.peer.name} defined too many functions")
        data = body.segments[0] if isinstance(body, Transfer) else body
        self._targets[target] = self.agent.resolve(flags, bytes(data))

    def _on_forget(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        self._targets.pop(target, None)

    def _on_item(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        pass

    def _on_credit(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        pass

    def _on_ping(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        pass

    def _on_goodbye(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        self._goodbye = True


_USER_KINDS = frozenset({"call", "op", "remote"})


def _set_exception(future: Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def _settle(future: Future[Any], value: Any, waits: list[asyncio.Future[Any]]) -> None:
    """End a reply when everything it brought may be used."""
    try:
        for each in waits:
            await each
    except asyncio.CancelledError:
        _set_exception(future, WorkerClosed("closed while a result was arriving"))
        raise
    except Exception as error:
        _set_exception(future, error)
    else:
        if not future.done():
            future.set_result(value)


__all__ = ["OP", "SERVICE", "Connection", "Link"]
