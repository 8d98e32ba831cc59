"""The callee's half of a link: takes what the peer calls, decodes it, and gets it to run.

    `receive` ─▶ accept ─▶ [held back] ─▶ admit ─▶ decode ─▶ `execution` ─▶ `responses`

A call runs at most once, and never after its budget is spent. Back-pressure: while the peer does
not read its answers, its calls are held back, within the memory for what comes in.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from typing import Any, Final, Protocol

from aiograd.errors import DeadlineExceeded, NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.callee.execution import Execution, ExecutionHost, StreamSource
from aiograd.rpc.callee.functions import INLINE, LIGHT, Target, function_name
from aiograd.rpc.callee.invocation import CARRIED, Invocation
from aiograd.rpc.callee.responses import REPLY_HEAD, Responses
from aiograd.rpc.channel import Channel
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.envelope import Head, hear_of_box, open_head, take_label, unpack_call
from aiograd.rpc.extension import BOX, Arrival, loaded
from aiograd.rpc.link.ledger import Calls
from aiograd.rpc.remote_exceptions import explain_import
from aiograd.rpc.scope import SCOPE, CallScope
from aiograd.wire.codec import Promise
from aiograd.wire.fastcodec import (
    NOT_BATCHABLE,
    decode_call,
    decode_call_entry,
    encode_value_entry,
)
from aiograd.wire.framing import Frame, Transfer
from aiograd.wire.messages import (
    BAGGAGE,
    BATCH,
    CALL,
    FAST,
    KEEP,
    METADATA,
    NESTED,
    PIGGYBACK,
    STREAM,
    TRAVELLED,
)
from aiograd.wire.safecodec import DECODED

_REQUESTS: Final = 64  # of the library itself, for each call that may be under way
_PARTNERS_REQUESTS: Final = 4  # the same for a partner
_HELD: Final = 256  # bytes that a message takes besides its body
NO_TIME: Final = 0.0  # the budget of a call that was cancelled before it could begin
# The flags that say how a message is decoded. With FAST alone of them, its body is nothing but
# arguments of the fast codec; with FAST and BAGGAGE, a label comes before these.
_ENCODING: Final = FAST | BAGGAGE | METADATA | KEEP | STREAM | BATCH


class CalleeHost(ExecutionHost, Protocol):
    """What being called needs of the worker."""

    @property
    def context(self) -> contextvars.Context:
        """In which called functions run."""

    @property
    def inside(self) -> Target:
        """Stands for functions that come inside their call."""

    def trusts(self, peer: PeerInfo) -> bool:
        """Whether a peer may call any function."""


class Callee:
    """Everything one peer has called here."""

    def __init__(self, channel: Channel, host: CalleeHost) -> None:
        self._channel, self._host, self._outbox = channel, host, channel.outbox
        guest = None if host.trusts(channel.peer) else channel.peer
        self._context = _context_for(host, guest)
        self.responses: Responses = Responses(channel, host)
        self.execution: Execution = Execution(channel, host, self.responses, guest)
        self._running = self.execution.running
        self._limit = host.options.outbound_buffer
        self._most = host.options.max_inflight
        self._share = channel.account  # None for a trusted peer
        if self._share is not None:
            # One name may have several links, and none of them may be read.
            self._limit //= host.options.partner_links
            self._share.calls.add(self.execution)
        # Messages that wait until the peer has read its answers, with the memory they take.
        self.held: deque[tuple[int, Invocation]] = deque()

    def reserve(self, size: int) -> None:
        """Take `size` bytes off the outbound limit: the shared-memory arena uses them."""
        self._limit -= size

    # ── back-pressure ───────────────────────────────────────────────────────────────────────────

    def accept(self, invocation: Invocation) -> None:
        """Take a call, request or post that is complete."""
        outbox = self._outbox
        if self.held or ((outbox.paused or outbox.waiting) and outbox.over(self._limit)):
            return self._hold(invocation)
        self.dispatch(invocation)

    def accept_batch(self, frame: Frame, target: Target, entries: list[Any]) -> None:
        """Take calls of one function that came in one frame.

        Fast path for ops and `@inline` functions with small results: they are answered before the
        next one is looked at, so nothing of them has to be remembered, and no `Invocation` is made.
        Other functions start with what is known here. Batches of inline functions take 14 % less
        time by it, caller and callee together (`benchmarks/peers`, rpc.inline.tput.256).
        """
        kind, flags, first, budget, body = (
            frame.kind,
            frame.flags,
            frame.id,
            frame.budget,
            frame.body,
        )
        channel, host, outbox, running = self._channel, self._host, self._outbox, self._running
        keep, is_op = flags & KEEP, target.kind == "op"
        simple = (
            target.error is None
            and budget > 0
            # The result store wants to know of other functions before they run (`_announce`).
            and (not keep or is_op)
            and host.profiles is None  # a recording wants to know when each began and ended
            and host.fault_injector is None  # wants to see replies one by one
            and (host.wrapper is None or is_op)
        )
        light = LIGHT.get(target.func) if target.builtin else None
        here = target.mode == INLINE or light is not None
        # Ops make no calls, so nothing asks for their deadline.
        deadline = math.inf if is_op else self.execution.deadline(budget)
        boxes, func = host.travellers.boxes, target.func
        token = None
        for id, entry in enumerate(entries, first):
            try:
                if (
                    not simple
                    or self.held
                    or channel.error is not None  # a function has ended the link
                    or len(running) >= self._most
                    or ((outbox.paused or outbox.waiting) and outbox.over(self._limit))
                ):
                    invocation = Invocation(kind, flags, id, budget, target, entry)
                    invocation.size = len(body) // len(entries)
                    self.accept(invocation)
                    continue
                if keep:
                    token, entry = entry
                context = self._context.copy()
                try:
                    args = entry if entry.__class__ is tuple else decode_call_entry(entry, boxes)
                except Exception as error:
                    error = channel.budget.undecodable(host.name, "its arguments", error)
                    what = f"something in the arguments of {target.name}()"
                    explain_import(error, what, host.name)
                    self._fail(frame, id, target, token, error)
                    continue
                if not here or (light is not None and not light(args)):
                    invocation = Invocation(kind, flags, id, budget, target, None)
                    invocation.context, invocation.args = context, args
                    self.execution.start(invocation)
                    continue
                try:
                    if not is_op:
                        self.execution.enter_scope(context, deadline)
                    value = context.run(func, *args)
                    if token is not None:
                        assert host.result_store is not None
                        host.result_store.made(channel.peer, token, value)
                        value = value if flags & PIGGYBACK else None
                except BaseException as error:
                    self._fail(frame, id, target, token, error)
                    continue
                reply = encode_value_entry(value, channel.boxes)
                if reply is not NOT_BATCHABLE:
                    outbox.put_batched(REPLY_HEAD, id, reply)
                elif token is None:
                    invocation = Invocation(kind, flags, id, budget, target, None)
                    invocation.context = context
                    self.execution.returned_here(invocation, value)
                else:
                    invocation = Invocation(kind, flags, id, budget, target, None)
                    self.responses.send_copy(invocation, value)
            except MemoryError as error:
                # Of this worker, not of the function: the other calls are unharmed.
                self._channel.budget.unavailable()
                self._refuse_entry(frame, id, target, error)

    def _refuse_entry(self, frame: Frame, id: int, target: Target, error: Exception) -> None:
        # A fresh invocation: the first one may count as answered.
        invocation = Invocation(frame.kind, frame.flags, id, frame.budget, target, None)
        self.responses.refuse(invocation, error)

    def _fail(
        self, frame: Frame, id: int, target: Target, token: bytes | None, error: BaseException
    ) -> None:
        invocation = Invocation(frame.kind, frame.flags, id, frame.budget, target, None)
        invocation.token = token
        self.responses.fail(invocation, error)

    def _hold(self, invocation: Invocation) -> None:
        """Let an invocation wait for a peer that does not read."""
        body, size = invocation.body, _HELD + invocation.size
        if isinstance(body, Transfer):
            size += 0 if body.refused else body.size
        elif not invocation.flags & BATCH:
            size += len(body)
            invocation.body = bytes(body)  # the view is valid only while its batch is read
        self._host.limits.reached("outbound_buffer")
        if not self._channel.budget.reserve(size):
            peer = self._channel.peer.name
            raise ProtocolError(f"{peer} calls on and on, and reads no answers")
        self.held.append((size, invocation))

    def proceed(self) -> None:
        """Go on with what was held back: the peer has read something."""
        while self.held and not self._outbox.over(self._limit):
            size, invocation = self.held.popleft()
            self._channel.budget.release(size)
            self.dispatch(invocation)

    def cancel(self, id: int) -> None:
        """Abandon an invocation whose caller has cancelled it."""
        self.execution.cancel(id)
        for _, invocation in self.held:
            if invocation.id == id:
                invocation.budget = NO_TIME

    def refuse(self, invocation: Invocation, error: Exception) -> None:
        """Answer an invocation that takes no effect, or none that its sender will hear of."""
        self.responses.refuse(invocation, error)

    def close(self) -> None:
        """Abandon everything: the peer is gone, and nobody waits for what still runs."""
        while self.held:
            self._channel.budget.release(self.held.popleft()[0])
        self.execution.abandon_all()

    # ── admission ───────────────────────────────────────────────────────────────────────────────

    def dispatch(self, invocation: Invocation) -> None:
        """Decode an invocation and let it run, or refuse it."""
        if (
            invocation.target.error is not None
            or not invocation.budget > 0  # spent, or no number
            or len(self._running) >= self._most
            or (self._share is not None and self._share.crowded(self._most))
            or type(invocation.body) is Transfer
        ):
            refusal = self._refusal(invocation)
            if refusal is not None:
                return self.responses.refuse(invocation, refusal)
        invocation.context = self._context.copy()
        waits: list[asyncio.Future[Any]] | None = None
        body, flags = invocation.body, invocation.flags
        try:
            if flags & _ENCODING == FAST and body.__class__ is memoryview:
                boxes = self._host.travellers.boxes
                invocation.args, invocation.kwargs = decode_call(body, boxes)
            elif flags & _ENCODING == FAST | BAGGAGE and body.__class__ is memoryview:
                self._decode_carried(invocation)
            else:
                waits = self._decode(invocation)
        except Exception as error:
            name = self._host.name
            error = self._channel.budget.undecodable(name, "its arguments", error)
            explain_import(error, f"something in the arguments of {invocation.target.name}()", name)
            self.execution.discharge(invocation)
            return self.responses.refuse(invocation, error)
        if invocation.target.error is not None:
            self.execution.discharge(invocation)
            return self.responses.refuse(invocation, invocation.target.error)
        # A view of the reader's buffer, or memory of a large message: both are needed elsewhere.
        invocation.body = None
        if waits:
            self.execution.start_after(invocation, waits)
        else:
            self.execution.start(invocation)
        if invocation.charged and invocation.execution is None:  # it ran right here
            self.execution.discharge(invocation)

    def _refusal(self, invocation: Invocation) -> BaseException | None:
        """Why an invocation is refused before anything of it is decoded."""
        host, target, body = self._host, invocation.target, invocation.body
        if type(body) is Transfer and body.refused:
            return self._channel.budget.refusal(host.name, "its arguments", body.size, body.refused)
        if not invocation.budget > 0:
            return DeadlineExceeded(host.name, target.name, 0.0)
        if self._crowded(invocation):
            host.limits.reached("max_inflight")
            return Overloaded(host.name, f"{self._most} of its calls are under way")
        if target.error is not None and isinstance(target.error, NotAllowed):
            return target.error
        return None

    def _crowded(self, invocation: Invocation) -> bool:
        """Whether the peer has more under way than was agreed on, or than anybody needs."""
        share = self._share
        executions: list[Calls] = [self.execution] if share is None else list(share.calls)
        running = sum(len(each.running) for each in executions)
        abandoned = sum(each.abandoned for each in executions)
        if running < self._most and (abandoned < self._most or share is None):
            return False
        if invocation.kind != CALL:
            return running >= self._most * (_REQUESTS if share is None else _PARTNERS_REQUESTS)
        if share is not None:
            # A partner only says that a call is nested, and what it has abandoned still runs. It
            # may have as many of these as it may have other calls.
            if abandoned >= self._most:
                return True
            if invocation.flags & NESTED:
                return running >= 2 * self._most
        elif invocation.flags & NESTED:
            return running >= self._most * _REQUESTS
        wanted: int = sum(
            call.kind == CALL and not call.abandoned
            for each in executions
            for call in each.running.values()
        )
        return wanted >= self._most

    # ── decoding ────────────────────────────────────────────────────────────────────────────────

    def _decode(self, invocation: Invocation) -> list[asyncio.Future[Any]] | None:
        """Decode the arguments; what has to be waited for before they may be used."""
        flags, body, boxes = invocation.flags, invocation.body, self._host.travellers.boxes
        if flags & BATCH:
            if flags & KEEP:
                token, body = body
                self._announce(invocation, token)
            invocation.args = decode_call_entry(body, boxes)
            return None
        if flags & _ENCODING == FAST:
            data, *buffers = body.segments if type(body) is Transfer else (body,)
            invocation.args, invocation.kwargs = decode_call(data, boxes, None, buffers)
            waits = None
        else:
            waits = self._decode_envelope(invocation)
        if flags & STREAM:
            invocation.stream = StreamSource(self._channel, self._host, self.execution, invocation)
        return waits

    def _decode_carried(self, invocation: Invocation) -> None:
        """Decode arguments of the fast codec that came with baggage, and nothing else."""
        host, channel, context = self._host, self._channel, invocation.context
        arrival = Arrival(channel.peer, invocation.target.kind, channel.restricted)
        payload = take_label(host, invocation.body, arrival)
        value = decode_call(payload, host.travellers.boxes, arrival)
        invocation.args, invocation.kwargs = value
        invocation.carried = arrival.carried
        # An op makes no calls, so nothing asks for the context in which it runs.
        if arrival.carried is not None and invocation.target.kind != "op" and host.baggage:
            assert context is not None
            context.run(host.baggage.enter, arrival.carried)

    def _decode_envelope(self, invocation: Invocation) -> list[asyncio.Future[Any]]:
        host, channel, flags = self._host, self._channel, invocation.flags
        head = open_head(channel.codec, flags, invocation.body)
        self._read_head(invocation, head)
        # Only of calls: services rely on their order, and load what they need right here.
        if flags & TRAVELLED and host.travellers.promises and invocation.kind == CALL:
            promise = host.travellers.promised(head.data)
            if promise is not None:
                # The view is valid only while its batch is read.
                head = head._replace(data=bytes(head.data))
                return [host.spawn(self._load_and_decode(invocation, head, promise))]
        return self._decode_payload(invocation, head)

    async def _load_and_decode(self, invocation: Invocation, head: Head, promise: Promise) -> None:
        """Decode arguments that need a library which is not loaded yet."""
        try:
            await loaded(promise)
            waits = self._decode_payload(invocation, head)
        except Exception as error:
            raise self._undecodable(error) from error
        while waits:
            await waits.pop(0)

    def _decode_payload(self, invocation: Invocation, head: Head) -> list[asyncio.Future[Any]]:
        host, channel, target = self._host, self._channel, invocation.target
        flags = invocation.flags
        kind = target.kind if invocation.token is None else "remote"
        arrival = Arrival(channel.peer, kind, channel.restricted)
        value = unpack_call(host, channel.codec, flags, head, arrival)
        if BOX in arrival.scratch:
            hear_of_box(channel, arrival)
        invocation.carried = arrival.carried
        if channel.restricted:
            size = arrival.scratch.get(DECODED, 0)
            baggage = host.baggage if arrival.carried is not None else None
            if baggage is None or not baggage.keep(arrival, size):
                self._charge(invocation, size)
        if invocation.kind != CALL:
            invocation.args = value[0] if flags & FAST else value
        elif target is host.inside:
            invocation.func, invocation.args, invocation.kwargs = value
            invocation.target = Target(invocation.func, function_name(invocation.func))
        else:
            invocation.args, invocation.kwargs = value
        if arrival.carried is not None and host.baggage is not None:
            assert invocation.context is not None
            invocation.context.run(host.baggage.enter, arrival.carried)
        return arrival.waits

    def _undecodable(self, error: Exception) -> Exception:
        return self._channel.budget.undecodable(self._host.name, "its arguments", error)

    def _charge(self, invocation: Invocation, size: int) -> None:
        """Let a partner's arguments count for as long as its call has not ended."""
        budget, store = self._channel.budget, self._host.result_store
        if invocation.token is not None and store is not None:  # they may live on in the result
            return store.charge(self._channel.peer, invocation.token, size)
        if not budget.reserve(size):
            what = "its decoded arguments"
            raise budget.refusal(self._host.name, what, size, "inbound_budget")
        invocation.charged = size

    def _read_head(self, invocation: Invocation, head: Head) -> None:
        # Before the arguments are decoded: a value that cannot be made because they cannot be read
        # must be known as failed to those who already refer to it.
        if head.token is not None:
            self._announce(invocation, head.token)
        if "record" in head.metadata and not self._host.restricts(self._channel.peer):
            invocation.record = head.metadata["record"] is True
        if "traceparent" in head.metadata and not self._host.restricts(self._channel.peer):
            invocation.traceparent = str(head.metadata["traceparent"])
            if invocation.record is None:
                invocation.record = CARRIED

    def _announce(self, invocation: Invocation, token: bytes) -> None:
        """Tell the result store of a result that will stay here, before anything waits or runs."""
        # An op with plain arguments runs right here, so nothing can ask for its value before it is
        # there: the store takes both in one step (`ResultStore.made`).
        if invocation.target.kind != "op" or not invocation.flags & FAST:
            store = self._host.result_store
            assert store is not None
            store.expect(self._channel.peer, token)  # raises if the peer may not keep it here
            invocation.announced = True
        invocation.token = token


def _context_for(host: CalleeHost, guest: PeerInfo | None) -> contextvars.Context:
    """Return the context in which the calls of a peer run; in it a guest is known as one."""
    if guest is None:
        return host.context
    context = host.context.copy()
    context.run(SCOPE.set, CallScope(guest=guest))
    return context
