"""Recordings as OpenTelemetry spans, for whoever collects those already. Needs `aiograd[otel]`.

    with profile() as prof:
        await rpc_async("worker1", train_step)
    prof.to_otel()                          # to the tracer that the program has set up

What was recorded becomes part of the trace that is current here, parents before their children.
Times come from a clock that knows no date; they are placed by what both clocks say now.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from aiograd.rpc.scope import current

if TYPE_CHECKING:
    from aiograd.rpc.observe.profile import Span

_KINDS: Final = {
    **dict.fromkeys(("call", "op", "remote", "fetch", "stream"), SpanKind.CLIENT),
    "run": SpanKind.SERVER,
}


def export(spans: Iterable[Span], tracer: Tracer | None = None) -> int:
    """Give spans to a tracer, the program's own if none is named; how many there were."""
    tracer = tracer if tracer is not None else trace.get_tracer("aiograd")
    offset = time.time_ns() - round(current().runtime.time() * 1e9)
    found = sorted(spans, key=lambda span: (span.start, span.id))
    known = {span.id for span in found}
    children: dict[int, list[Span]] = {}
    for span in found:  # one whose parent was dropped belongs to nobody
        children.setdefault(span.parent if span.parent in known else 0, []).append(span)
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
    told = {
        "rpc.system": "aiograd",
        "aiograd.key": span.key,
        "aiograd.kind": span.kind,
        "aiograd.worker": span.worker,
    }
    if span.error:
        told["error.type"] = span.error
    for name, value in (span.detail or {}).items():
        plain = isinstance(value, bool | int | float | str)
        told[f"aiograd.{name}"] = value if plain else str(value)
    return told
