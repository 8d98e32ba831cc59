"""Tracing: what a recording adds to messages, at the caller and at the callee.

    caller                                           callee
    Trace ── call, METADATA {"record"} ───────────▶  Visit: runs it under a recording of its own
          ◀── reply or fault, METADATA {"spans"} ──  its span first, then what happened inside

A call keeps a `Trace`, and a call being served a `Visit`, while a recording is on, and None
otherwise. Partners (see `Options.mode`) are neither asked nor answered: spans name workers and
functions that a partner must not see.

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
        """The recordings of everything called here, innermost last."""

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


def visit(invocation: TracedInvocation, worker: TracedWorker) -> Visit | None:
    """Return what records a call that starts to run here; None for calls that are not recorded."""
    if invocation.target.quiet:
        return None
    # Not a recording of this worker: one that everything is called under counts as well.
    asked = type(invocation.record) is bool or worker.profiles is not None
    found = Visit(invocation, worker) if asked else None
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
    """A backward pass that is being recorded; `dist` notes what happens in it."""

    __slots__ = ("_id", "_key", "_scope", "_start", "_worker")

    def __init__(self, scope: Scope, worker: TracedWorker, key: str) -> None:
        self._scope, self._worker, self._key = scope, worker, key
        self._id = scope.profile.number()
        self._start = worker.runtime.time()

    def note(self, kind: str, key: str, seconds: float, detail: dict[str, Any] | None) -> None:
        """Add a span for something in the pass that has just ended."""
        recording, worker = self._scope.profile, self._worker
        end, id = worker.runtime.time(), recording.number()
        start = max(self._start, end - seconds)
        recording.add(Span(key, kind, worker.name, start, end, id, self._id, "", detail))

    def end(self, error: BaseException | None) -> None:
        """Add the span of the whole pass."""
        recording, worker = self._scope.profile, self._worker
        end, failure = worker.runtime.time(), "" if error is None else type(error).__name__
        start, parent = self._start, self._scope.parent
        whole = Span(self._key, "backward", worker.name, start, end, self._id, parent, failure)
        recording.add(whole)


def trace_pass(worker: TracedWorker) -> PassTrace | None:
    """Return what records a pass that starts, or is joined, here and now; None if nothing does."""
    scope = SCOPE.get().recording
    # A participant joins by a message, outside any recording block: only the whole worker's counts.
    if scope is None and worker.profiles:
        scope = Scope(worker.profiles[-1], 0)
    return None if scope is None else PassTrace(scope, worker, f"backward({worker.name})")
