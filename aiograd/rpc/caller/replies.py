"""What comes back from one peer: results, items of streams, and exceptions.

A result that brought a reference which its owner has not confirmed yet waits for that, within the
deadline of its call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from aiograd.errors import DeadlineExceeded, Overloaded, ProtocolError, WorkerClosed
from aiograd.rpc import remote_exceptions
from aiograd.rpc.caller.calls import Caller
from aiograd.rpc.channel import Channel, Host
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.envelope import hear_of_box, open_head, take_label, unpack_value
from aiograd.rpc.extension import BOX, Arrival, loaded
from aiograd.rpc.future import CallInfo, Future, fail
from aiograd.wire.codec import Promise
from aiograd.wire.fastcodec import decode_value, decode_value_entry
from aiograd.wire.framing import Frame, Transfer
from aiograd.wire.messages import BAGGAGE, EMPTY, FAST, ITEM, KEEP, METADATA, TRAVELLED

_log = logging.getLogger("aiograd")
NO_VALUE: Final = object()  # the answer to a call whose result could not be copied into the reply
# Of these a reply has FAST alone if its body is the payload: no envelope, so nothing arrives first.
_ENCODING: Final = FAST | BAGGAGE | METADATA | EMPTY


class RefusedPosts(Protocol):
    """Who wants to know that a peer could not take a post."""

    def report_refused_post(self, peer: PeerInfo, service: str, error: Exception) -> None:
        """Tell the layer whose post it was."""


class Replies:
    """Settles the calls to one peer with its answers."""

    def __init__(
        self, channel: Channel, host: Host, caller: Caller, refused_posts: RefusedPosts
    ) -> None:
        self._channel, self._host, self._caller = channel, host, caller
        self._refused_posts = refused_posts

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def reply(self, frame: Frame) -> None:
        """Settle a call with its result."""
        caller = self._caller
        future = caller.pending.pop(frame.id, None)
        if future is None:
            return self._drop(frame)
        info, flags, body = future.info, frame.flags, frame.body
        info.caller = None
        bucket, info.bucket = info.bucket, None
        if info.trace is not None:
            info.trace.answered(future, flags, body)
        if caller.window:
            caller.proceed()
        try:
            if flags & _ENCODING == FAST and type(body) is not Transfer:
                value = decode_value(body, self._host.travellers.boxes, info)
            elif flags & EMPTY:
                value = NO_VALUE if flags & KEEP else None
            elif flags & _ENCODING == FAST | BAGGAGE and type(body) is not Transfer:
                channel = self._channel
                arrival = Arrival(channel.peer, "reply", channel.restricted, info)
                payload = take_label(self._host, body, arrival)
                value = decode_value(payload, self._host.travellers.boxes, arrival)
            else:
                promise = self._promised(flags, body)
                if promise is not None:
                    if type(body) is memoryview:
                        body = bytes(body)  # the view is valid only while its batch is read
                    self._settle_later(future, self._load(future, flags, body, promise), bucket)
                    return
                arrival = self._arrival(info)
                value = self._unpack(flags, body, arrival)
                if arrival.waits:
                    self._settle_later(future, _settle(future, value, arrival.waits), bucket)
                    return
        except Exception as error:
            self._undecodable(future, error)
            return
        finally:
            if bucket is not None:  # not earlier: an empty bucket may be dropped
                bucket.pop(future, None)
        if info.stream is not None:
            info.stream.ended(None)
        if not future.done():
            future.set_result(value)

    def reply_entries(self, first: int, entries: list[Any]) -> None:
        """Settle calls of consecutive numbers with their results, which came in a batch."""
        caller, boxes = self._caller, self._host.travellers.boxes
        pending = caller.pending
        for id, entry in enumerate(entries, first):
            future = pending.pop(id, None)
            if future is None:
                continue
            info = future.info
            info.caller = None
            bucket = info.bucket
            if bucket is not None:
                info.bucket = None
                bucket.pop(future, None)
            if info.trace is not None:
                info.trace.answered(future, 0, b"")
            if entry.__class__ is tuple:
                try:
                    entry = decode_value_entry(entry, boxes, info)
                except Exception as error:
                    self._undecodable(future, error)
                    continue
            if info.stream is not None:
                info.stream.ended(None)
            if not future.done():
                future.set_result(entry)
        if caller.window:  # once for all: those that start now share frames, too
            caller.proceed()

    def _settle_later(
        self, future: Future[Any], settling: Coroutine[Any, Any, None], bucket: Any
    ) -> None:
        """Settle a call when everything that its result brought may be used."""
        task = self._host.spawn(settling)
        if bucket is not None:
            late = _Deadline(self._channel.peer.name, future, task)
            bucket[late] = None
            task.add_done_callback(lambda _: bucket.pop(late, None))

    def _promised(self, flags: int, body: Any) -> Promise | None:
        """Return the traveller that must be loaded to decode a reply, if there is one."""
        if not flags & TRAVELLED or not self._host.travellers.promises:
            return None
        if type(body) is not Transfer:
            return self._host.travellers.promised(body)
        return None if body.refused else self._host.travellers.promised(body.segments[0])

    async def _load(self, future: Future[Any], flags: int, body: Any, promise: Promise) -> None:
        """Settle a call whose result needs a library which is not loaded yet."""
        try:
            await loaded(promise)
            arrival = self._arrival(future.info)
            value = self._unpack(flags, body, arrival)
        except asyncio.CancelledError:
            fail(future, WorkerClosed("closed while a result was arriving"))
            raise
        except Exception as error:
            self._undecodable(future, error)
        else:
            if future.info.stream is not None:
                future.info.stream.ended(None)
            await _settle(future, value, arrival.waits)

    def _undecodable(self, future: Future[Any], error: Exception) -> None:
        """Fail a call whose result cannot be decoded here."""
        error = self._host.budget.undecodable(self._host.name, "the result", error)
        name, peer = future.info.name, self._channel.peer.name
        remote_exceptions.explain_import(
            error, f"something in the result of {name}()", self._host.name
        )
        fail(future, remote_exceptions.annotate(error, name, peer, ""))

    def item(self, frame: Frame) -> None:
        """Hand the next value of a stream to its reader."""
        future = self._caller.pending.get(frame.id)
        if future is None or future.info.stream is None:
            return self._drop(frame)
        arrival = self._arrival(future.info)
        stream = future.info.stream
        try:
            value = self._unpack(frame.flags, frame.body, arrival)
        except Exception as error:
            error = self._host.budget.undecodable(self._host.name, "an item", error)
            stream.item(None, arrival.waits, error)
        else:
            stream.item(value, arrival.waits, None)

    def _arrival(self, call: CallInfo | None = None) -> Arrival:
        return Arrival(self._channel.peer, "reply", self._channel.restricted, call)

    def _unpack(self, flags: int, body: Any, arrival: Arrival) -> Any:
        host, codec = self._host, self._channel.codec
        if isinstance(body, Transfer) and body.refused:
            raise host.budget.refusal(host.name, "the result", body.size, body.refused)
        head = open_head(codec, flags, body)
        value = unpack_value(host, codec, flags, head, arrival)
        if BOX in arrival.scratch:
            hear_of_box(self._channel, arrival)
        return value

    def _drop(self, frame: Frame) -> None:
        """Drop an answer that nobody waits for.

        Its travellers must arrive nevertheless: a reference in it is released only where it is
        known."""
        if frame.flags & (TRAVELLED | BAGGAGE | METADATA) and not frame.flags & EMPTY:
            try:
                self._unpack(
                    frame.flags,
                    frame.body,
                    self._arrival(),
                )
            except Exception as error:
                _log.debug("a late reply from %s: %r", self._channel.peer.name, error)

    # ── exceptions ──────────────────────────────────────────────────────────────────────────────

    def fault(self, frame: Frame) -> None:
        """Fail a call with the exception that it raised."""
        caller, peer = self._caller, self._channel.peer
        future = caller.pending.get(frame.id)
        if future is None:
            if frame.target:  # of a post, which has no future
                self._post_refused(frame)
            return
        error: Exception
        if future.info.trace is not None and frame.flags & METADATA:
            future.info.trace.answered(future, frame.flags, frame.body)
        try:
            arrival = self._arrival()
            fault, function, text = self._unpack(frame.flags & METADATA, frame.body, arrival)
            error = remote_exceptions.rebuild(self._channel.codec, fault, peer.name)
            error = remote_exceptions.annotate(error, function, peer.name, text)
        except Exception as trouble:
            error = self._unreadable(trouble)
        caller.end(future, error)
        caller.proceed()

    def _unreadable(self, trouble: Exception) -> Exception:
        """Return the error of a call whose own error cannot be read here."""
        host = self._host
        if isinstance(trouble, Overloaded | MemoryError):
            return host.budget.undecodable(host.name, "the error it raised", trouble)
        peer = self._channel.peer.name
        return ProtocolError(f"a fault that cannot be read: {trouble!r}", peer)

    def _post_refused(self, frame: Frame) -> None:
        """Tell the service whose post the peer could not take."""
        peer = self._channel.peer
        error: Exception
        service = ""
        try:
            fault, service, _ = self._unpack(0, frame.body, self._arrival())
            error = remote_exceptions.rebuild(self._channel.codec, fault, peer.name)
        except Exception as trouble:
            error = self._unreadable(trouble)
        self._refused_posts.report_refused_post(peer, service, error)

    def refuse(self, kind: int, id: int, error: Exception) -> None:
        """Fail a call whose answer found no memory here."""
        future = self._caller.pending.get(id)
        if future is None:
            return
        if kind == ITEM and future.info.stream is not None:
            # Its reader gets the error and leaves, which ends the generator over there.
            future.info.stream.item(None, [], error)
        else:
            self._caller.end(future, error)
            self._caller.proceed()


class _Deadline:
    """The deadline of a call to `name` whose result is here, but waits for a reference in it."""

    def __init__(self, name: str, future: Future[Any], task: asyncio.Task[None]) -> None:
        self._name, self._future, self._task = name, future, task

    def expire(self) -> None:
        """Fail the call."""
        info = self._future.info
        fail(self._future, DeadlineExceeded(self._name, info.name, info.seconds))
        self._task.cancel()


async def _settle(future: Future[Any], value: Any, waits: list[asyncio.Future[Any]]) -> None:
    """End a reply when everything it brought may be used."""
    try:
        while waits:
            await waits.pop(0)
    except asyncio.CancelledError:
        fail(future, WorkerClosed("closed while a result was arriving"))
        raise
    except Exception as error:
        fail(future, error)
    else:
        if not future.done():
            future.set_result(value)
