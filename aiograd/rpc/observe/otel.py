"""Recordings as OpenTelemetry spans. Needs `aiograd[otel]`.

    with profile() as prof:
        await rpc_async("worker1", train_step)
    prof.to_otel()                          # to the tracer that the program has set up

    Profile.events ─▶ export ─▶ tracer.start_span(…).end(…), parents before their children

Recorded spans become part of the trace that is current here. Their times are of a monotonic clock;
the difference between that clock and the wall clock, taken now, makes them dates.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from aiograd.rpc.observe.profile import Profile, Scope, Span, under
from aiograd.rpc.scope import SCOPE, current

_KINDS: Final = {
    **dict.fromkeys(("call", "op", "remote", "fetch", "stream"), SpanKind.CLIENT),
    "run": SpanKind.SERVER,
}


@contextlib.contextmanager
def propagate() -> Iterator[None]:
    """Let calls made in this block belong to the trace that is current where each is made.

    The W3C `traceparent` goes with them, so spans that user code begins in a called function are
    children of the span in which the call was made, however deep. Nothing else is recorded. Under
    `ag.profile` it goes along anyway. Partners do not get it.

        with tracer.start_as_current_span("step"), propagate():
            await ag.rpc_async("worker1", work)
    """
    if SCOPE.get().recording is not None:
        yield
        return
    with under(Scope(Profile(limit=0, carries=True), 0)):
        yield


def export(spans: Iterable[Span], tracer: Tracer | None = None) -> int:
    """Export spans to a tracer, the program's own if none is given; return how many."""
    tracer = tracer if tracer is not None else trace.get_tracer("aiograd")
    offset = time.time_ns() - round(current().runtime.time() * 1e9)
    found = sorted(spans, key=lambda span: (span.start, span.id))
    known = {span.id for span in found}
    children: dict[int, list[Span]] = {}
    for span in found:
        # A span whose parent was dropped (`Profile.dropped`) becomes a root, not an orphan.
        children.setdefault(span.parent if span.parent in known else 0, []).append(span)
    # Parents first: a child needs the context of its parent's exported span.
    waiting: list[tuple[Span, Any]] = [(span, None) for span in children.pop(0, ())]
    count = 0
    while waiting:
        span, context = waiting.pop()
        made = tracer.start_span(
            span.name,
            context,
            _KINDS.get(span.kind, SpanKind.INTERNAL),
            _attributes(span),
            start_time=offset + round(span.start * 1e9),
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(offset + round(span.end * 1e9))
        inside = trace.set_span_in_context(made)
        waiting += [(child, inside) for child in children.pop(span.id, ())]
        count += 1
    return count


def _attributes(span: Span) -> dict[str, Any]:
    attributes = {
        "rpc.system": "aiograd",
        "aiograd.key": span.key,
        "aiograd.kind": span.kind,
        "aiograd.worker": span.worker,
    }
    if span.error:
        attributes["error.type"] = span.error
    for name, value in (span.detail or {}).items():
        plain = isinstance(value, bool | int | float | str)
        # OpenTelemetry takes scalars; it would drop shapes with a warning.
        attributes[f"aiograd.{name}"] = value if plain else str(value)
    return attributes
