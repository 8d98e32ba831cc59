"""The callee's side of a link: runs what the peer calls, and answers.

    message ─▶ baggage.arrive ─▶ decode ─▶ baggage.landed ─▶ waits ─▶ run ─▶ reply or fault

A call runs at most once, never after its budget is spent, and its coroutine is cancelled when the
caller cancels or the budget runs out. A thread cannot be stopped: its result is dropped, and it
counts as abandoned until it returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, Overloaded, ProtocolError, SerializationError
from aiograd.rpc import faults
from aiograd.rpc.current import DEADLINE
from aiograd.rpc.functions import INLINE, TASK, THREAD, Target, function_name, run_mode
from aiograd.rpc.travel import Arrival, Departure
from aiograd.wire.frames import Transfer
from aiograd.wire.messages import CALL, EMPTY, EXTRA, FAULT, POST, REPLY, STREAM, TRAVELLED
from aiograd.wire.payload import Payload, encode_named

if TYPE_CHECKING:
    from aiograd.rpc.deadlines import Bucket
    from aiograd.rpc.link import Link

_log = logging.getLogger("aiograd")
EXTRA_LENGTH = struct.Struct("<I")


class Incoming:
    """One call being served."""

    __slots__ = (
        "abandoned",
        "answered",
        "args",
        "bucket",
        "callee",
        "context",
        "error",
        "func",
        "held",
        "id",
        "kept",
        "kind",
        "kwargs",
        "stream",
        "target",
        "task",
        "token",
        "value",
    )

    def __init__(self, callee: Callee, id: int, target: Target, kind: int) -> None:
        self.callee, self.id, self.target, self.kind = callee, id, target, kind
        self.func: Any = target.func
        self.args: Any = ()
        self.kwargs: Any = None
        self.context: contextvars.Context | None = None
        self.held: Any = None
        self.token: Any = None
        self.kept = False  # its result stays here
        self.bucket: Bucket | None = None
        self.task: asyncio.Task[Any] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.answered = self.abandoned = False
        self.stream: Any = None

    # As a job of the thread pool.

    def run(self) -> None:
        assert self.context is not None
        try:
            self.value = self.context.run(self.func, *self.args, **(self.kwargs or {}))
        except BaseException as error:
            self.error = error

    def finished(self) -> None:
        self.callee.returned(self)

    def expire(self) -> None:
        self.callee.expired(self)


class Callee:
    """Everything one peer has called here."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._agent = link.agent
        self.running: dict[int, Incoming] = {}
        self.abandoned = 0

    # ── arriving ────────────────────────────────────────────────────────────────────────────────

    def arrived(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        """A call, request or post is complete."""
        incoming = Incoming(self, id, target, kind)
        if isinstance(body, Transfer) and body.refused:
            return self._fail(incoming, Overloaded(self._agent.name, "no memory for its arguments"))
        if budget <= 0:
            return self._fail(incoming, DeadlineExceeded(self._agent.name, target.name, 0.0))
        self.running[id] = incoming
        context: contextvars.Context | None = None
        if kind == CALL:
            context = self._agent.context.copy()
            if budget != math.inf:
                deadline = self._agent.loop.time() + budget
                incoming.bucket = self._agent.deadlines.bucket(deadline)
                incoming.bucket[incoming] = None
                context.run(DEADLINE.set, deadline)
            incoming.context = context
        try:
            waits = self._unpack(incoming, flags, body)
            if target.error is not None:
                raise target.error
        except Exception as error:
            return self._fail(incoming, error)
        if waits:
            incoming.task = self._agent.spawn(self._wait_and_run(incoming, waits))
        else:
            self._run(incoming)

    def _unpack(
        self, incoming: Incoming, flags: int, body: Any
    ) -> list[asyncio.Future[Any]] | None:
        agent = self._agent
        segments: Any = body.segments if isinstance(body, Transfer) else (body,)
        data, buffers = segments[0], segments[1:]
        if not flags & (EXTRA | TRAVELLED):
            self._set_args(incoming, agent.codec.decode(data, buffers))
            return None
        arrival = Arrival(self._link.peer, incoming.target.kind)
        if flags & EXTRA:
            (length,) = EXTRA_LENGTH.unpack_from(data)
            start = EXTRA_LENGTH.size + length
            extra = agent.codec.decode(data[EXTRA_LENGTH.size : start])
            data = data[start:]
            if "keep" in extra:
                incoming.token, incoming.kept = extra["keep"], True
                arrival.kind = "remote"
                assert agent.keeper is not None
                agent.keeper.expect(self._link.peer, incoming.token)
            if "baggage" in extra and agent.baggage is not None:
                incoming.held = arrival.held = agent.baggage.arrive(extra["baggage"], arrival)
        self._set_args(
            incoming, agent.codec.decode(data, buffers, bool(flags & TRAVELLED), arrival)
        )
        if agent.baggage is not None:
            agent.baggage.landed(arrival)
            if incoming.held is not None and incoming.context is not None:
                incoming.context.run(agent.baggage.enter, incoming.held)
        return arrival.waits

    def _set_args(self, incoming: Incoming, value: Any) -> None:
        if incoming.kind != CALL:
            incoming.args = value
        elif len(value) == 3:  # the function came inside the call
            incoming.func, incoming.args, incoming.kwargs = value
            target = Target(incoming.func, function_name(incoming.func))
            incoming.target = target
        else:
            incoming.args, incoming.kwargs = value

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    async def _wait_and_run(self, incoming: Incoming, waits: list[asyncio.Future[Any]]) -> None:
        try:
            for each in waits:
                await each
        except asyncio.CancelledError as error:
            return self._fail(incoming, error)
        except Exception as error:
            return self._fail(incoming, error)
        incoming.task = None
        self._run(incoming)

    def _run(self, incoming: Incoming) -> None:
        if incoming.kind != CALL:
            return self._serve(incoming)
        mode, context = incoming.target.mode, incoming.context
        assert context is not None
        if incoming.stream is not None:
            return
        if mode == THREAD:
            self._agent.pool.submit(incoming)
            return
        try:
            value = context.run(incoming.func, *incoming.args, **(incoming.kwargs or {}))
        except Exception as error:
            return self._fail(incoming, error)
        except asyncio.CancelledError as error:
            return self._fail(incoming, error)
        if mode == TASK or unfinished(value):
            incoming.task = self._agent.spawn(self._await(incoming, value), context)
        else:
            self._succeed(incoming, value)

    def _serve(self, incoming: Incoming) -> None:
        """A service of the library itself: always on the loop."""
        handler = self._agent.services.get(incoming.target.name)
        try:
            if handler is None:
                raise ProtocolError(f"no service {incoming.target.name!r}", self._agent.name)
            value = self._agent.context.copy().run(handler, self._link.peer, *incoming.args)
        except Exception as error:
            return self._fail(incoming, error)
        if unfinished(value):
            incoming.task = self._agent.spawn(
                self._await(incoming, value), self._agent.context.copy()
            )
        else:
            self._succeed(incoming, value)

    async def _await(self, incoming: Incoming, awaitable: Any) -> None:
        try:
            value = await awaitable
        except asyncio.CancelledError as error:
            self._fail(incoming, error)
            if incoming.abandoned:
                raise
        except Exception as error:
            self._fail(incoming, error)
        except BaseException as error:  # SystemExit in a function must not end the worker
            self._fail(incoming, error)
        else:
            self._succeed(incoming, value)

    def returned(self, incoming: Incoming) -> None:
        """A thread is done with it."""
        if incoming.abandoned:
            self.abandoned -= 1
            self._forget(incoming)
            if incoming.kept and not incoming.answered:
                self._fail(incoming, incoming.error or asyncio.CancelledError())
        elif incoming.error is not None:
            self._fail(incoming, incoming.error)
        elif unfinished(incoming.value):
            incoming.task = self._agent.spawn(
                self._await(incoming, incoming.value), incoming.context
            )
        else:
            self._succeed(incoming, incoming.value)

    # ── answering ───────────────────────────────────────────────────────────────────────────────

    def _succeed(self, incoming: Incoming, value: Any) -> None:
        self._forget(incoming)
        if incoming.kind == POST or incoming.answered:
            return
        incoming.answered = True
        peer, agent = self._link.peer, self._agent
        if incoming.kept:
            assert agent.keeper is not None
            agent.keeper.keep(peer, incoming.token, value)
            return self._link.send(REPLY, EMPTY, incoming.id, 0.0, 0, Payload(b""), "reply")
        if value is None and incoming.held is None:
            return self._link.send(REPLY, EMPTY, incoming.id, 0.0, 0, Payload(b""), "reply")
        departure = Departure(peer, "reply", incoming.held)
        try:
            flags, payload = pack(self._link, value, departure, {}, lambda: "result")
        except Exception as error:
            departure.cancel()
            if isinstance(error, SerializationError):
                error = SerializationError(error.path, error.what, agent.name)
            return self._answer_fault(incoming, error)
        self._link.send(REPLY, flags, incoming.id, 0.0, 0, payload, "reply", departure.undo)

    def _fail(self, incoming: Incoming, error: BaseException) -> None:
        self._forget(incoming)
        if incoming.answered:
            return
        incoming.answered = True
        peer, agent = self._link.peer, self._agent
        if incoming.kept:
            assert agent.keeper is not None
            agent.keeper.fail(peer, incoming.token, error)
            return self._link.send(REPLY, EMPTY, incoming.id, 0.0, 0, Payload(b""), "reply")
        if incoming.abandoned:
            return
        self._answer_fault(incoming, error)

    def _answer_fault(self, incoming: Incoming, error: BaseException) -> None:
        name = incoming.target.name
        text = faults.traceback_text(error)
        if incoming.kind == POST:
            _log.error(
                "%s: %s from %s failed\n%s", self._agent.name, name, self._link.peer.name, text
            )
            return
        if incoming.kind == CALL:
            _log.warning(
                "%s: %s() called by %s failed\n%s",
                self._agent.name,
                name,
                self._link.peer.name,
                text,
            )
        departure = Departure(self._link.peer, "reply")
        fault = faults.describe(self._agent.codec, error, departure)
        payload = self._agent.codec.encode((fault, name, text), departure)
        self._link.send(FAULT, 0, incoming.id, 0.0, 0, payload, "reply")

    def _forget(self, incoming: Incoming) -> None:
        self.running.pop(incoming.id, None)
        if incoming.bucket is not None:
            incoming.bucket.pop(incoming, None)
            incoming.bucket = None

    # ── ending early ────────────────────────────────────────────────────────────────────────────

    def cancel(self, id: int) -> None:
        """The caller no longer wants it."""
        incoming = self.running.get(id)
        if incoming is not None:
            self._abandon(incoming)

    def expired(self, incoming: Incoming) -> None:
        incoming.bucket = None
        if incoming.id in self.running:
            self._abandon(incoming)

    def _abandon(self, incoming: Incoming) -> None:
        if incoming.abandoned:
            return
        incoming.abandoned = True
        if incoming.stream is not None:
            incoming.stream.close()
        if incoming.task is not None:
            incoming.task.cancel()
        elif incoming.target.mode == THREAD:
            self.abandoned += 1
            self.running.pop(incoming.id, None)

    def close(self) -> None:
        """The peer is gone: nobody waits for anything that still runs."""
        for incoming in list(self.running.values()):
            self._abandon(incoming)


def unfinished(value: Any) -> bool:
    """Whether a result must be awaited. Other awaitables, such as an RRef, are values."""
    return inspect.iscoroutine(value) or asyncio.isfuture(value)


def pack(
    link: Link, value: Any, departure: Departure, extra: dict[str, Any], name: Any
) -> tuple[int, Payload]:
    """Encode a message with its baggage; flags and payload."""
    agent = link.agent
    payload = encode_named(agent.codec, value, departure, name)
    flags = TRAVELLED if payload.travelled else 0
    if departure.held is not None and agent.baggage is not None:
        baggage = agent.baggage.depart(departure.held, departure)
        if baggage is not None:
            extra["baggage"] = baggage
    if extra:
        first = pickle.dumps(extra, 5)
        flags |= EXTRA
        data = b"".join((EXTRA_LENGTH.pack(len(first)), first, payload.data))
        payload = Payload(data, payload.buffers, payload.travelled)
    return flags, payload


__all__ = ["INLINE", "STREAM", "Callee", "Incoming", "pack", "run_mode"]
