"""How an invocation is answered: with its value, an exception, or nothing but "it stays here".

    succeed ─┬─ fast path ──▶ outbox, in a batch with others     small plain values
             └─ general ────▶ channel.send REPLY
    fail ───────────────────▶ channel.send FAULT

Every invocation is answered once at most. One that its caller has abandoned is not answered.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Protocol

from aiograd.errors import (
    DeadlineExceeded,
    NotAllowed,
    ProtocolError,
    RemoteError,
    SerializationError,
)
from aiograd.rpc import remote_exceptions
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.channel import Channel, Host
from aiograd.rpc.envelope import check_size, pack_value, with_metadata
from aiograd.rpc.extension import Departure, ResultStore
from aiograd.rpc.link.send import LAZY as LAZY_LANE
from aiograd.wire.codec import Payload
from aiograd.wire.fastcodec import NOT_BATCHABLE, encode_value_entry
from aiograd.wire.framing import Frame
from aiograd.wire.messages import (
    CALL,
    EMPTY,
    FAST,
    FAULT,
    KEEP,
    LAZY,
    METADATA,
    PIGGYBACK,
    POST,
    REPLY,
)

_log = logging.getLogger("aiograd")
_security = logging.getLogger("aiograd.security")
_NOTHING: Final = Payload(b"")
REPLY_HEAD: Final = (REPLY, FAST, 0.0, 0)  # the head of replies in a batch


class ResponseHost(Host, Protocol):
    """What answers need of the worker."""

    @property
    def result_store(self) -> ResultStore | None:
        """Where results stay that the caller gets references to."""


class Responses:
    """Answers what one peer calls here."""

    def __init__(self, channel: Channel, host: ResponseHost) -> None:
        self._channel, self._host = channel, host
        self._outbox = channel.outbox

    # ── values ──────────────────────────────────────────────────────────────────────────────────

    def succeed(self, invocation: Invocation, value: Any) -> None:
        """Answer with a value, or keep it here."""
        if invocation.kind == POST or invocation.answered:
            return
        invocation.answered = True
        spans = None if invocation.visit is None else self._spans(invocation, value, None)
        if invocation.token is not None:
            self._keep(invocation, value)
            if not invocation.flags & PIGGYBACK:
                value = None
        if invocation.carried is not None or spans is not None:
            return self._succeed(invocation, value, spans)  # they go back with the answer
        channel, host = self._channel, self._host
        if (
            not channel.restricted
            and channel.error is None
            and host.fault_injector is None  # wants to see messages one by one
        ):
            # Fast path: replies with small plain values that follow each other share a frame and
            # one pickle, as calls do (`Caller.start_batched`).
            entry = encode_value_entry(value, channel.boxes)
            if entry is not NOT_BATCHABLE:
                if value is None and invocation.flags & LAZY:
                    self._outbox.put(Frame(REPLY, EMPTY, invocation.id), LAZY_LANE)
                else:
                    self._outbox.put_batched(REPLY_HEAD, invocation.id, entry)
                return
        self._succeed(invocation, value, None)

    def _succeed(self, invocation: Invocation, value: Any, spans: dict[str, Any] | None) -> None:
        if value is None and invocation.carried is None and spans is None:
            self._send(REPLY, EMPTY, invocation, _NOTHING)
            return
        channel = self._channel
        departure = Departure(channel.peer, "reply", invocation.carried)
        try:
            flags, payload = pack_value(self._host, channel, value, departure, "result", spans)
        except Exception as error:
            if invocation.token is not None:
                # Only the copy cannot travel. Who asks for the value once more is told why.
                self._send(REPLY, EMPTY | KEEP, invocation, _NOTHING)
                return
            if isinstance(error, SerializationError):
                error = SerializationError(error.path, error.what, self._host.name)
            return self._fault(invocation, error, spans)
        frame = Frame(REPLY, flags, invocation.id, 0.0, 0, payload)
        channel.send(frame, "reply", departure.undo)

    def send_copy(self, invocation: Invocation, value: Any) -> None:
        """Answer with a copy of a value that stays here already."""
        invocation.answered = True
        invocation.token = b""  # stands for the token of the value: only the copy may fail
        self._succeed(invocation, value, None)

    def _keep(self, invocation: Invocation, value: Any) -> None:
        store, peer = self._host.result_store, self._channel.peer
        assert store is not None
        if invocation.announced:
            store.keep(peer, invocation.token, value)
        else:
            store.made(peer, invocation.token, value)

    def _spans(
        self, invocation: Invocation, value: Any, error: BaseException | None
    ) -> dict[str, Any] | None:
        """End the recording of a call; what its caller wanted to know."""
        spans, invocation.visit = invocation.visit.end(value, error), None
        return {"spans": spans} if type(invocation.record) is bool else None

    # ── exceptions ──────────────────────────────────────────────────────────────────────────────

    def refuse(self, invocation: Invocation, error: BaseException) -> None:
        """Answer a message that takes no effect.

        The sender of a post hears of that, too: something may depend on it."""
        invocation.refused = True
        self.fail(invocation, error)

    def fail(self, invocation: Invocation, error: BaseException) -> None:
        """Answer with an exception, or let the result store have it."""
        if invocation.answered:
            return
        invocation.answered = True
        spans = None if invocation.visit is None else self._spans(invocation, None, error)
        if invocation.token is not None:
            self._keep_failure(invocation, error)
        if invocation.abandoned:
            return  # the caller has cancelled it, or its own clock ended it
        if invocation.token is None:
            self._fault(invocation, error, spans)
        elif spans is not None:
            departure = Departure(self._channel.peer, "reply")
            flags, payload = pack_value(self._host, self._channel, None, departure, "result", spans)
            self._send(REPLY, flags, invocation, payload, departure.undo)
        else:
            flags = EMPTY | KEEP if invocation.flags & PIGGYBACK else EMPTY
            self._send(REPLY, flags, invocation, _NOTHING)

    def _keep_failure(self, invocation: Invocation, error: BaseException) -> None:
        store, peer = self._host.result_store, self._channel.peer
        assert store is not None
        if isinstance(error, asyncio.CancelledError) and invocation.abandoned:
            error = DeadlineExceeded(self._host.name, invocation.target.name, 0.0)
        if not invocation.announced:
            store.expect(peer, invocation.token)
        store.fail(peer, invocation.token, error)

    def _fault(
        self, invocation: Invocation, error: BaseException, spans: dict[str, Any] | None
    ) -> None:
        host, peer = self._host, self._channel.peer
        name, text = invocation.target.name, remote_exceptions.traceback_text(error)
        noted = self._channel.restricted and self._noted_refusal(name, error)
        if invocation.kind == POST:
            if not self._channel.restricted:
                _log.error("%s: %s from %s failed\n%s", host.name, name, peer.name, text)
            elif not noted and self._channel.may_log():
                # A partner chooses the name and how often it fails.
                _log.error("%s: %r from %s failed: %r", host.name, name, peer.name, str(error))
            if not invocation.refused:
                return
        if invocation.kind == CALL:
            # The caller gets the traceback with the error, and logs it if nobody awaits the call.
            level = logging.WARNING if host.options.remote_tracebacks == "both" else logging.DEBUG
            if not self._channel.restricted:
                _log.log(
                    level, "%s: %s() called by %s failed\n%s", host.name, name, peer.name, text
                )
            elif not noted and self._channel.may_log():
                # Without the traceback of what was only refused, which is long and tells nothing.
                why = repr(str(error)) if invocation.refused else f"\n{text}"
                _log.log(level, "%s: %r called by %s failed: %s", host.name, name, peer.name, why)
        departure = Departure(peer, "reply")
        codec = self._channel.codec

        def encoded(what: BaseException) -> Payload:
            fault = remote_exceptions.describe(codec, what, departure)
            return codec.encode((fault, name, "" if codec.plain else text), departure)

        payload = encoded(error)
        try:
            check_size(payload, "error", self._channel.max_message)
        except SerializationError as large:
            short = RemoteError(type(error).__name__, f"({large.what})", worker=host.name)
            payload = encoded(short)
        flags = 0
        if spans is not None:
            flags, payload = METADATA, with_metadata(spans, payload, codec)
        self._send(FAULT, flags, invocation, payload)

    def _noted_refusal(self, name: str, error: BaseException) -> bool:
        """Count what a partner may not do, or asked for in a wrong form, and write a line of it."""
        if not isinstance(error, NotAllowed | ProtocolError):
            return False
        channel, host = self._channel, self._host
        host.limits.reached("refused")
        if channel.may_log():
            peer, where = channel.peer.name, channel.host or "no address"
            _security.warning(
                "%s: refused %.80r of %s (%s): %.200r", host.name, name, peer, where, str(error)
            )
        return True

    def _send(
        self,
        kind: int,
        flags: int,
        invocation: Invocation,
        payload: Payload,
        undo: list[Any] | None = None,
    ) -> None:
        target = int(kind == FAULT and invocation.kind == POST)
        frame = Frame(kind, flags, invocation.id, 0.0, target, payload)
        self._channel.send(frame, "reply", undo)
