"""What becomes of the outcome of a call: a reply, a fault, or a value that stays here.

Every call is answered once at most; nobody answers one that its caller has given up.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, RemoteError, SerializationError
from aiograd.rpc import remote_exceptions
from aiograd.rpc.callee.invocation import Invocation
from aiograd.rpc.envelope import FITS, check_size, in_front, labelled, pack
from aiograd.rpc.extension import Departure
from aiograd.wire.codec import Payload
from aiograd.wire.fastcodec import ALONE, encode_value, value_entry
from aiograd.wire.messages import CALL, EMPTY, FAST, FAULT, KEEP, METADATA, POST, REPLY

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link

_log = logging.getLogger("aiograd")
NOTHING = Payload(b"")


class Answering:
    """The calls of one peer that run here, as far as their answers go."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._agent = link.agent
        self._outbox = link.outbox
        self.running: dict[int, Invocation] = {}

    def succeed(self, invocation: Invocation, value: Any) -> None:
        self.running.pop(invocation.id, None)
        bucket, invocation.bucket = invocation.bucket, None
        if bucket is not None:
            bucket.pop(invocation, None)
        if invocation.kind == POST or invocation.answered:
            return
        invocation.answered = True
        peer, agent, link = self._link.peer, self._agent, self._link
        extra = None if invocation.visit is None else self._seen(invocation, value, None)
        if invocation.kept:
            assert agent.result_store is not None
            agent.result_store.keep(peer, invocation.token, value)
            if invocation.along:
                return self._send_along(invocation, value)
            value = None
        elif invocation.carried is not None:
            return self._answer(invocation, value, extra)
        if extra is not None:
            return self._answer(invocation, value, extra)
        if self._reply_batched(invocation.id, value):
            return
        data: bytes | None = b""
        if value is not None:
            data = None if link.restricted else encode_value(value, agent.travellers.boxes)
        if data is None or len(data) > link.max_message:  # there it is refused
            return self._answer(invocation, value)
        flags = FAST if data else EMPTY
        link.send(REPLY, flags, invocation.id, 0.0, 0, Payload(data), "reply")

    def _reply_batched(self, id: int, value: Any) -> bool:
        """Answer with a value that is plain and small, in one frame with others if there are any.

        False if it has to travel alone."""
        link, agent = self._link, self._agent
        if link.restricted or agent.fault_injector is not None or link.error is not None:
            return False
        entry = value_entry(value, agent.travellers.boxes)
        if entry is ALONE:
            return False
        self._outbox.put_batched(REPLY, FAST, id, 0.0, 0, entry)
        return True

    def _send_along(self, invocation: Invocation, value: Any) -> None:
        """Answer a call whose result stays with a copy of it; without one if it cannot travel."""
        departure = Departure(self._link.peer, "reply", invocation.carried)
        try:
            most = self._link.max_message
            flags, payload = pack(self._agent, value, departure, "result", most)
        except Exception:  # who asks for it once more is told why
            flags, payload = EMPTY | KEEP, NOTHING
            departure.cancel()
        self._link.send(REPLY, flags, invocation.id, 0.0, 0, payload, "reply", departure.undo)

    def _seen(
        self, invocation: Invocation, value: Any, error: BaseException | None
    ) -> dict[str, Any] | None:
        """A recorded call has ended: what the caller wanted to know of it."""
        assert invocation.visit is not None
        spans, invocation.visit = invocation.visit.end(value, error), None
        return None if invocation.record is None else {"spans": spans}

    def _answer(
        self, invocation: Invocation, value: Any, extra: dict[str, Any] | None = None
    ) -> None:
        departure = Departure(self._link.peer, "reply", invocation.carried)
        try:
            most = self._link.max_message
            flags, payload = pack(self._agent, value, departure, "result", most, extra)
        except Exception as error:
            if isinstance(error, SerializationError):
                error = SerializationError(error.path, error.what, self._agent.name)
            return self._answer_fault(invocation, error, extra)
        self._link.send(REPLY, flags, invocation.id, 0.0, 0, payload, "reply", departure.undo)

    def _fail(self, invocation: Invocation, error: BaseException) -> None:
        self._forget(invocation)
        if invocation.answered:
            return
        invocation.answered = True
        peer, agent = self._link.peer, self._agent
        extra = None if invocation.visit is None else self._seen(invocation, None, error)
        if invocation.kept:
            assert agent.result_store is not None
            if isinstance(error, asyncio.CancelledError) and invocation.abandoned:
                error = DeadlineExceeded(agent.name, invocation.target.name, 0.0)
            agent.result_store.fail(peer, invocation.token, error)
        if invocation.abandoned:
            return  # the caller has given up, or its own clock tells it
        if invocation.kept and extra is not None:
            self._answer(invocation, None, extra)
        elif invocation.kept:
            flags = EMPTY | KEEP if invocation.along else EMPTY
            self._link.send(REPLY, flags, invocation.id, 0.0, 0, NOTHING, "reply")
        else:
            self._answer_fault(invocation, error, extra)

    def _refuse(self, invocation: Invocation, error: BaseException) -> None:
        """A message takes no effect. Of a post, too, the sender is told: it may depend on it."""
        invocation.refused = True
        self._fail(invocation, error)

    def _answer_fault(
        self, invocation: Invocation, error: BaseException, extra: dict[str, Any] | None = None
    ) -> None:
        name, sender = invocation.target.name, self._link.peer.name
        text = remote_exceptions.traceback_text(error)
        if invocation.kind == POST:
            _log.error("%s: %s from %s failed\n%s", self._agent.name, name, sender, text)
            if not invocation.refused:
                return
        if invocation.kind == CALL:
            _log.warning("%s: %s() called by %s failed\n%s", self._agent.name, name, sender, text)
        departure = Departure(self._link.peer, "reply")
        codec = self._agent.codec_for(self._link.peer)
        fault = remote_exceptions.describe(codec, error, departure)
        payload = codec.encode((fault, name, "" if codec.plain else text), departure)
        try:
            check_size(payload, "error", self._link.max_message)
        except SerializationError as large:
            short = RemoteError(type(error).__name__, f"({large.what})", worker=self._agent.name)
            fault = remote_exceptions.describe(codec, short, departure)
            payload = codec.encode((fault, name, "" if codec.plain else text), departure)
        flags = 0
        if extra is not None:
            payload = Payload(in_front(extra, payload.data, codec), payload.buffers)
            flags = METADATA
        post = int(invocation.kind == POST)
        self._link.send(FAULT, flags, invocation.id, 0.0, post, payload, "reply")

    def fail(self, invocation: Invocation, error: BaseException) -> None:
        self._fail(invocation, error)

    def _forget(self, invocation: Invocation) -> None:
        self.running.pop(invocation.id, None)
        bucket = invocation.bucket
        if bucket is not None:
            bucket.pop(invocation, None)
            invocation.bucket = None

    def _reply_at_once(self, id: int, value: Any, carried: Any, lazy: int = 0) -> bool:
        """Answer with a value that is plain and small; False if it is not."""
        agent = self._agent
        if agent.fault_injector is not None or self._link.error is not None:
            return False
        if value is None and lazy:
            self._outbox.put_lazy(REPLY, EMPTY, id, 0.0, 0, b"")
            return True
        if carried is None and self._reply_batched(id, value):
            return True
        if value is None:
            self._outbox.put(REPLY, EMPTY, id, 0.0, 0, b"")
            return True
        departure = None if carried is None else Departure(self._link.peer, "reply", carried)
        data = encode_value(value, agent.travellers.boxes, departure)
        if data is None or len(data) > FITS:
            return False
        flags = FAST
        if departure is not None:
            flags, data = labelled(agent, data, departure)
        self._outbox.put(REPLY, flags, id, 0.0, 0, data)
        return True
