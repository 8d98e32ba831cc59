"""Tracing: what a recording adds to messages, at the caller and at the callee.

    caller                                           callee
    Trace ── call, METADATA {"record"} ───────────▶  Visit: runs it under a recording of its own
          ◀── reply or fault, METADATA {"spans"} ──  its span first, then what happened inside

A call keeps a `Trace`, and a call being served a `Visit`, while a recording is on, and None
otherwise. The W3C `traceparent` goes along with calls, and with invitations to backward passes.
Partners (see `Options.mode`) are neither asked nor answered: spans name workers and functions that
a partner must not see.

The three protocols below are all that tracing knows of workers, calls and invocations.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.envelope import open_head
from aiograd.rpc.observe.profile import Profile, Scope, Span, key
from aiograd.rpc.observe.tally import CountedCall, Tally
from aiograd.rpc.scope import SCOPE, record
from aiograd.wire.messages import METADATA

SPANS: Final = 10_000  # in one reply: about a megabyte, less than most results worth timing


class Clock(Protocol):
    """What tracing needs of a runtime."""

    def time(self) -> float:
        """Return seconds of a clock that never goes back."""


class TracedWorker(Protocol):
    """What tracing needs of a worker."""

    @property
    def name(self) -> str:
        """The name of the worker."""

    @property
    def profiles(self) -> list[Profile] | None:
        """The recordings of everything called here, innermost last; None: calls go unobserved."""

    @property
    def tally(self) -> Tally | None:
        """What counts calls and passes, if anything does."""

    @property
    def runtime(self) -> Clock:
        """The clock of the worker."""

    def restricts(self, peer: PeerInfo) -> bool:
        """Whether only plain data crosses the connection to a peer."""

    def codec_for(self, peer: PeerInfo) -> Any:
        """Return the codec of messages to and from a peer."""


class TracedInfo(Protocol):
    """What tracing needs of the facts of a call (`CallInfo`)."""

    name: str  # of what is called
    trace: Any


class TracedCall(Protocol):
    """What tracing needs of a call in flight (`Future`)."""

    @property
    def info(self) -> TracedInfo:
        """The facts of the call."""


class TracedTarget(Protocol):
    """What tracing needs of the function that was called."""

    name: str
    quiet: bool  # its calls are not recorded


class TracedInvocation(Protocol):
    """What tracing needs of a call being served."""

    func: Any  # replaced by `Visit.run`
    context: contextvars.Context | None  # in which the function runs
    record: Any  # what the caller asked for: whether with details
    traceparent: str  # of the trace that the call is part of; "" for none
    stream: Any  # not None: the function makes items instead of a result

    @property
    def target(self) -> TracedTarget:
        """The function that was called."""


# ── at the caller ───────────────────────────────────────────────────────────────────────────────


class Trace:
    """A call in flight that is being recorded."""

    __slots__ = ("_kind", "_peer", "_scope", "_start", "_worker")

    def __init__(self, scope: Scope, worker: TracedWorker, peer: PeerInfo, kind: str) -> None:
        self._scope, self._worker, self._peer, self._kind = scope, worker, peer, kind
        self._start = worker.runtime.time()

    def ask(self, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the metadata of the call, with the wish that the callee records it."""
        if self._worker.restricts(self._peer):
            return extra
        recording = self._scope.profile
        found = dict(extra or ())
        if not recording.carries:
            found["record"] = recording.details
        if (parent := traceparent()) is not None:
            found["traceparent"] = parent
        return found or None

    def answered(self, call: TracedCall, flags: int, body: Any) -> None:
        """End with the reply or fault that came; take the callee's spans from it."""
        spans: list[Span] = []
        if flags & METADATA and not self._worker.restricts(self._peer):
            # A malformed message raises its error when it is unpacked as a whole, not here.
            with contextlib.suppress(Exception):
                head = open_head(self._worker.codec_for(self._peer), flags, body)
                spans = [Span(*each) for each in head.metadata.get("spans", ())]
        self._end(call, spans[0].error if spans else "", spans)

    def end(self, call: TracedCall, error: BaseException | None = None) -> None:
        """End without an answer of the callee."""
        self._end(call, "" if error is None else type(error).__name__, ())

    def _end(self, call: TracedCall, error: str, spans: Iterable[Span]) -> None:
        call.info.trace = None
        worker, (recording, parent) = self._worker, self._scope
        name = key(self._kind, call.info.name, worker.name, self._peer.name)
        start, end, id = self._start, worker.runtime.time(), recording.number()
        whole = Span(name, self._kind, worker.name, start, end, id, parent, error)
        recording.add(whole)
        for each in adopt(spans, whole, recording.number):
            recording.add(each)


def trace(worker: TracedWorker, peer: PeerInfo, kind: str) -> Trace | None:
    """Return what records a call made here and now; None outside a recording."""
    scope = SCOPE.get().recording
    return None if scope is None else Trace(scope, worker, peer, kind)


def adopt(spans: Iterable[Span], call: Span, number: Callable[[], int]) -> list[Span]:
    """Return the callee's spans as the caller's: new ids, after the call's key, inside its time.

    The first one is the callee's whole part. If it does not lie inside the call, it was another
    clock's time: all are moved so that it lies in the middle.
    """
    spans = list(spans)
    if not spans:
        return []
    first, shift = spans[0], 0.0
    # Processes of one host share the monotonic clock, so spans that fit are left as they are: the
    # gaps before and after then are real.
    if not call.start <= first.start <= first.end <= call.end:
        shift = (call.start + call.end - first.start - first.end) / 2
    ids = {each.id: number() for each in spans}
    return [
        each._replace(
            key=f"{call.key}/{each.key}",
            start=each.start + shift,
            end=each.end + shift,
            id=ids[each.id],
            parent=ids.get(each.parent, call.id),
        )
        for each in spans
    ]


# ── at the callee ───────────────────────────────────────────────────────────────────────────────


class Visit:
    """A call being served that is recorded: by its caller, or by this worker as a whole."""

    __slots__ = ("_func", "_id", "_inputs", "_name", "_recording", "_stream", "_times", "_worker")

    def __init__(self, invocation: TracedInvocation, worker: TracedWorker) -> None:
        assert invocation.context is not None
        self._worker, self._name, self._func = worker, invocation.target.name, invocation.func
        self._stream = invocation.stream is not None
        whole = worker.profiles[-1] if worker.profiles else None
        # Its own, also within one of the whole worker: the caller gets the spans of this call only.
        self._recording = Profile(bool(invocation.record), whole, SPANS)
        self._id = self._recording.number()
        self._inputs: list[tuple[int, ...]] = []
        self._times: list[float] = []  # when the function began and, if that is known, ended
        invocation.context.run(record, Scope(self._recording, self._id))
        invocation.func = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in its stead, in whatever thread it runs, and note the times."""
        clock = self._worker.runtime.time
        if self._recording.details:
            self._inputs = [each.shape for each in (*args, *kwargs.values()) if _is_array(each)]
        self._times.append(clock())
        value = self._func(*args, **kwargs)
        # A coroutine, future or generator has only begun; it ends when it is answered.
        if not self._stream and not inspect.iscoroutine(value) and not asyncio.isfuture(value):
            self._times.append(clock())
        return value

    def end(self, value: Any, error: BaseException | None) -> list[tuple[Any, ...]]:
        """Return the spans for the caller; the call is about to be answered."""
        worker, recording = self._worker, self._recording
        now = worker.runtime.time()
        start, end, *_ = (*self._times, now, now)  # without times it never began
        detail: dict[str, Any] | None = None
        if recording.details:
            detail = {"inputs": [tuple(map(int, shape)) for shape in self._inputs]}
            detail["bytes"] = int(value.nbytes) if _is_array(value) else 0
        failure = "" if error is None else type(error).__name__
        span = Span(self._name, "run", worker.name, start, end, self._id, 0, failure, detail)
        inside = [tuple(each) for each in recording.events]
        recording.add(span)
        return [tuple(span), *inside]


def visit(invocation: TracedInvocation, worker: TracedWorker) -> Visit | CountedCall | None:
    """Return what records or counts a call that starts to run here; None if nothing does."""
    if invocation.target.quiet:
        return None
    # The caller asks for it, or this worker as a whole is recorded.
    asked = type(invocation.record) is bool or worker.profiles
    found: Visit | CountedCall | None = Visit(invocation, worker) if asked else None
    if worker.tally is not None:
        clock = worker.runtime.time
        found = CountedCall(worker.tally, invocation.target.name, clock, found)
    if invocation.traceparent and invocation.context is not None:
        invocation.context.run(follow, invocation.traceparent)
    return found


# ── the trace of OpenTelemetry that a call is part of ───────────────────────────────────────────


def traceparent() -> str | None:
    """Return the current span of OpenTelemetry as W3C writes it; None if there is none."""
    if "opentelemetry.trace" not in sys.modules:  # then nobody has one
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


def follow(parent: str) -> None:
    """Continue a trace in this context, and in the calls that are made in it."""
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:  # this worker has no OpenTelemetry: the trace passes through in no case
        return
    context.attach(TraceContextTextMapPropagator().extract({"traceparent": parent}))
    if SCOPE.get().recording is None:
        record(Scope(Profile(limit=0, carries=True), 0))


def _is_array(value: Any) -> bool:
    """Whether it is an array of numpy's, or similar to one."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "nbytes")


# ── backward passes ─────────────────────────────────────────────────────────────────────────────


class PassTrace:
    """A backward pass that is recorded, counted, or part of a trace; `dist` tells what happens.

    `traceparent` goes along with invitations to the pass. What the pass runs of the user's own,
    hooks and backward functions, runs in `variables`: there the trace is current, and calls
    made there continue it.
    """

    __slots__ = ("_id", "_key", "_scope", "_start", "_worker", "traceparent", "variables")

    def __init__(self, scope: Scope | None, worker: TracedWorker) -> None:
        self._scope, self._worker, self._key = scope, worker, f"backward({worker.name})"
        self._id = 0 if scope is None else scope.profile.number()
        self._start = worker.runtime.time()
        self.traceparent: str = ""
        self.variables: contextvars.Context | None = None  # None: those of the task or message

    def note(self, kind: str, key: str, seconds: float, detail: dict[str, Any] | None) -> None:
        """Add a span for something in the pass that has just ended."""
        if self._scope is None:
            return
        recording, worker = self._scope.profile, self._worker
        end, id = worker.runtime.time(), recording.number()
        start = max(self._start, end - seconds)
        recording.add(Span(key, kind, worker.name, start, end, id, self._id, "", detail))

    def end(self, error: BaseException | None) -> None:
        """Add the span of the whole pass, and count it; at its originator."""
        worker = self._worker
        start, end, tally = self._start, worker.runtime.time(), worker.tally
        if tally is not None:
            tally.passes.add(end - start, error)
        if self._scope is not None:
            recording, parent = self._scope
            failure = "" if error is None else type(error).__name__
            key, id = self._key, self._id
            recording.add(Span(key, "backward", worker.name, start, end, id, parent, failure))


def trace_pass(worker: TracedWorker) -> PassTrace | None:
    """Return what observes a pass that starts here and now; None if nothing does."""
    scope = SCOPE.get().recording
    if scope is None:
        return None if worker.profiles is None else PassTrace(_whole(worker), worker)
    made = PassTrace(scope, worker)
    made.traceparent = traceparent() or ""
    if made.traceparent:
        # Later steps of the pass begin with messages, outside of the task that has begun it.
        made.variables = contextvars.copy_context()
    return made


def trace_joined_pass(worker: TracedWorker, parent: str) -> PassTrace | None:
    """Return what observes this worker's part of a pass of another one; None if nothing does.

    `parent` is the trace that it is part of, as W3C writes it; empty: of none.
    """
    # It joins by a message, outside any recording block: only that of the whole worker counts.
    if not (parent or worker.profiles):
        return None
    made = PassTrace(_whole(worker), worker)
    if parent:
        # Told on to others even if this worker has no OpenTelemetry itself.
        made.traceparent, made.variables = parent, contextvars.copy_context()
        made.variables.run(follow, parent)
    return made


def _whole(worker: TracedWorker) -> Scope | None:
    return Scope(worker.profiles[-1], 0) if worker.profiles else None
