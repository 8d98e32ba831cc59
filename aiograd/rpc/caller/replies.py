"""What becomes of the answers of one peer: results, several in a row, items of streams, and faults.

A result is decoded on the road that it came by. One that brought something along which its owner
has not confirmed yet waits for that, within the deadline of its call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, Overloaded, ProtocolError, WorkerClosed
from aiograd.rpc import remote_exceptions
from aiograd.rpc.caller.copies import NO_VALUE, Copies
from aiograd.rpc.caller.window import Waiting
from aiograd.rpc.envelope import unlabelled, unpack
from aiograd.rpc.extension import Arrival
from aiograd.rpc.future import Future, fail
from aiograd.wire.fastcodec import decode_batch, decode_value, value_alone, value_of
from aiograd.wire.framing import Transfer
from aiograd.wire.messages import BAGGAGE, BATCH, EMPTY, FAST, ITEM, KEEP, METADATA, TRAVELLED

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link

_log = logging.getLogger("aiograd")


class Replies:
    """The calls that one peer was sent, as far as their answers go."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.agent = link.agent
        self.pending: dict[int, Future[Any]] = {}
        self.waiting = Waiting()
        self.copies = Copies(link.outbox)  # of results that stay

    def proceed(self) -> None:
        """Start calls that waited, as far as there is room."""
        raise NotImplementedError

    def _end(self, future: Future[Any], error: BaseException) -> None:
        """A call has failed."""
        raise NotImplementedError

    def reply(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        if flags & BATCH:
            return self._replies(id, body)
        future = self.pending.pop(id, None)
        if future is None:
            return self._drop(flags, body)
        future._caller = None
        bucket, future._bucket = future._bucket, None
        if future._trace is not None:
            future._trace.answered(future, flags, body)
        if self.waiting:
            self.proceed()
        try:
            if flags & EMPTY:
                value = None
                if flags & KEEP:
                    value, self.copies.eager = NO_VALUE, False
            elif future._kind == "remote" and self.copies.unasked(future):
                value = None
            elif flags & (FAST | BAGGAGE | METADATA) == FAST and type(body) is not Transfer:
                value = decode_value(body, self.agent.travellers.boxes)
            elif flags & (FAST | METADATA) == FAST and not (
                type(body) is Transfer and body.refused
            ):
                lent: Sequence[Any] = ()
                if type(body) is Transfer:
                    body, *lent = body.segments
                arrival = None
                if flags & BAGGAGE:
                    arrival = Arrival(self._link.peer, "reply")
                    body = unlabelled(self.agent, body, arrival)
                value = decode_value(body, self.agent.travellers.boxes, arrival, lent)
            else:
                arrival = Arrival(self._link.peer, "reply")
                value = self._unpack(flags, body, arrival)
                if arrival.waits:
                    task = self.agent.spawn(_settle(future, value, arrival.waits))
                    if bucket is not None:
                        bucket[late := _Late(self._link.peer.name, future, task)] = None
                        task.add_done_callback(lambda _: bucket.pop(late, None))
                    return
        except Exception as error:
            self._undecoded(future, error)
            return
        finally:
            if bucket is not None:  # not earlier: an empty bucket may be dropped
                bucket.pop(future, None)
        if future._stream is not None:
            future._stream.ended(None)
        if not future.done():
            future.set_result(value)

    def _replies(self, first: int, body: Any) -> None:
        """The answers to several calls, in a row."""
        pending, boxes = self.pending, self.agent.travellers.boxes
        for id, entry in enumerate(decode_batch(body), first):
            future = pending.pop(id, None)
            if future is None:
                continue
            if future._trace is not None or future._stream is not None:
                pending[id] = future
                self.reply(FAST, id, 0.0, 0, value_alone(entry))
                continue
            future._caller = None
            bucket = future._bucket
            if bucket is not None:
                future._bucket = None
                bucket.pop(future, None)
            if self.waiting:
                self.proceed()
            try:
                value = value_of(entry, boxes) if entry.__class__ is tuple else entry
            except Exception as error:
                self._undecoded(future, error)
                continue
            if future._kind == "remote" and self.copies.unasked(future):
                value = None
            if not future.done():
                future.set_result(value)

    def _undecoded(self, future: Future[Any], error: Exception) -> None:
        """A result came that cannot be decoded here."""
        error = self.agent.budget.undecodable(self.agent.name, "the result", error)
        fail(future, remote_exceptions.annotate(error, future._function, self._link.peer.name, ""))

    def fault(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        future = self.pending.get(id)
        if future is None:
            if target:  # of a post, which has no future
                self._post_refused(body)
            return
        error: Exception
        if future._trace is not None and flags & METADATA:
            future._trace.answered(future, flags, body)
        try:
            arrival = Arrival(self._link.peer, "reply")
            fault, function, text = self._unpack(flags & METADATA, body, arrival)
            codec = self.agent.codec_for(self._link.peer)
            error = remote_exceptions.rebuild(codec, fault, self._link.peer.name)
            error = remote_exceptions.annotate(error, function, self._link.peer.name, text)
        except Exception as trouble:
            error = self._unreadable(trouble)
        self._end(future, error)
        self.proceed()

    def _unreadable(self, trouble: Exception) -> Exception:
        """The error of a call whose own error cannot be read here."""
        if isinstance(trouble, Overloaded | MemoryError):
            return self.agent.budget.undecodable(self.agent.name, "the error it raised", trouble)
        return ProtocolError(f"a fault that cannot be read: {trouble!r}", self._link.peer.name)

    def _post_refused(self, body: Any) -> None:
        """The peer could not take a post of ours: tell whoever depends on it."""
        peer, agent = self._link.peer, self.agent
        error: Exception
        service = ""
        try:
            fault, service, _ = self._unpack(0, body, Arrival(peer, "reply"))
            error = remote_exceptions.rebuild(agent.codec_for(peer), fault, peer.name)
        except Exception as trouble:
            error = self._unreadable(trouble)
        callback = agent.post_refused.get(service) if type(service) is str else None
        if callback is None:
            _log.error("%s: %s refused %.80r: %.500r", agent.name, peer.name, service, error)
            return
        try:
            callback(peer, error)
        except Exception:
            _log.exception("%s: a callback for a refused %.80r failed", agent.name, service)

    def refuse(self, kind: int, id: int, error: Exception) -> None:
        """An answer found no memory here."""
        future = self.pending.get(id)
        if future is None:
            return
        if kind == ITEM and future._stream is not None:
            # Its reader gets the error and leaves, which ends the generator over there.
            future._stream.item(None, [], error)
        else:
            self._end(future, error)
            self.proceed()

    def item(self, flags: int, id: int, budget: float, target: int, body: Any) -> None:
        """The next value of a stream."""
        future = self.pending.get(id)
        if future is None or future._stream is None:
            return self._drop(flags, body)
        arrival = Arrival(self._link.peer, "reply")
        try:
            value = self._unpack(flags, body, arrival)
        except Exception as error:
            error = self.agent.budget.undecodable(self.agent.name, "an item", error)
            future._stream.item(None, arrival.waits, error)
        else:
            future._stream.item(value, arrival.waits, None)

    def _unpack(self, flags: int, body: Any, arrival: Arrival) -> Any:
        if isinstance(body, Transfer) and body.refused:
            agent = self.agent
            raise agent.budget.refusal(agent.name, "the result", body.size, body.refused)
        return unpack(self.agent, flags, body, arrival)[0]

    def _drop(self, flags: int, body: Any) -> None:
        """Nobody waits for it, but its travellers must still arrive to be let go properly."""
        if flags & (TRAVELLED | BAGGAGE | METADATA) and not flags & EMPTY:
            try:
                self._unpack(flags, body, Arrival(self._link.peer, "reply"))
            except Exception as error:
                _log.debug("a late reply from %s: %r", self._link.peer.name, error)


class _Late:
    """The deadline of a call to `name` whose result has come, but waits for somebody else."""

    def __init__(self, name: str, future: Future[Any], task: asyncio.Task[None]) -> None:
        self._name, self._future, self._task = name, future, task

    def expire(self) -> None:
        future = self._future
        fail(future, DeadlineExceeded(self._name, future._function, future._seconds))
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
