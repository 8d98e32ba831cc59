"""Recordings as OpenTelemetry spans."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from aiograd.rpc.api import rpc_async
from aiograd.rpc.observe.otel import export, propagate
from aiograd.rpc.observe.profile import Profile, Span, profile, span


async def hop(x):
    with span("thinking"):
        await asyncio.sleep(0)
    return await rpc_async("worker2", total, (x,))


def total(x):
    return float(x.sum())


def fail():
    raise KeyError("k")


@pytest.fixture
def collected():
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    yield provider.get_tracer("test"), memory
    provider.shutdown()


async def test_a_recording_becomes_one_trace_over_all_workers(agents, collected):
    tracer, memory = collected
    before = time.time_ns()
    async with agents(3):
        with profile(details=True) as prof:
            assert await rpc_async("worker1", hop, (np.ones(3),)) == 3.0
        with tracer.start_as_current_span("mine") as mine:
            assert prof.to_otel(tracer) == len(prof)
    spans = {each.name: each for each in memory.get_finished_spans()}
    assert len(spans) == len(prof) + 1
    assert {each.context.trace_id for each in spans.values()} == {mine.get_span_context().trace_id}

    def parent(name):
        (found,) = [k for k, v in spans.items() if v.context.span_id == spans[name].parent.span_id]
        return found

    first = "rpc_call#hop(worker0 -> worker1)"
    second = "rpc_call#total(worker1 -> worker2)"
    assert [parent(name) for name in (first, "hop", "thinking", second, "total")] == [
        "mine",
        first,
        "hop",
        "hop",
        second,
    ]
    assert spans[first].kind is SpanKind.CLIENT
    assert spans["total"].kind is SpanKind.SERVER
    assert spans["thinking"].kind is SpanKind.INTERNAL
    assert spans["total"].attributes["aiograd.worker"] == "worker2"
    for each in spans.values():
        assert before - 10**9 <= each.start_time <= each.end_time <= time.time_ns() + 10**9
    for one, other in ((first, "hop"), ("hop", second), (second, "total")):
        assert spans[one].start_time <= spans[other].start_time
        assert spans[other].end_time <= spans[one].end_time


async def test_errors_are_marked(agents, collected):
    tracer, memory = collected
    async with agents(2):
        with profile() as prof, pytest.raises(KeyError):
            await rpc_async("worker1", fail)
        prof.to_otel(tracer)
    for each in memory.get_finished_spans():
        assert each.status.status_code is StatusCode.ERROR
        assert each.attributes["error.type"] == "KeyError"


async def test_spans_without_their_parents_and_odd_details_are_told_too(agents, collected):
    tracer, memory = collected
    async with agents(1):
        lost = Span("a/b", "run", "worker0", 1.0, 2.0, id=5, parent=4, detail={"shapes": [(2, 3)]})
        assert export([lost], tracer) == 1
    (told,) = memory.get_finished_spans()
    assert (told.name, told.parent) == ("b", None)
    assert told.attributes["aiograd.shapes"] == "[(2, 3)]"
    assert told.end_time - told.start_time == 10**9


async def test_the_programs_own_tracer_is_the_default(agents, collected, monkeypatch):
    tracer, memory = collected
    monkeypatch.setattr(trace, "get_tracer", lambda name: tracer)
    async with agents(1):
        recorded = Profile()
        recorded.add(Span("a", "scope", "worker0", 1.0, 2.0, id=1))
        recorded.to_otel()
    assert [each.name for each in memory.get_finished_spans()] == ["a"]


# ── traces of the user's own ────────────────────────────────────────────────────────────────────


def current_trace() -> str:
    return format(trace.get_current_span().get_span_context().trace_id, "x")


async def traces(names):
    if not names:
        return [current_trace()]
    return [current_trace(), *await rpc_async(names[0], traces, (names[1:],))]


async def test_the_trace_of_the_caller_goes_on_in_called_functions_however_deep(agents, collected):
    tracer, _ = collected
    async with agents(3):
        with tracer.start_as_current_span("step") as step, propagate():
            found = await rpc_async("worker1", traces, (["worker2", "worker1"],))
            in_thread = await rpc_async("worker1", current_trace)
        mine = format(step.get_span_context().trace_id, "x")
        assert found == [mine] * 3
        assert in_thread == mine
        assert await rpc_async("worker1", traces, ([],)) == ["0"]


async def test_a_recording_carries_the_trace_too_and_keeps_its_spans(agents, collected):
    tracer, _ = collected
    async with agents(2):
        with tracer.start_as_current_span("step") as step, profile() as prof, propagate():
            found = await rpc_async("worker1", traces, ([],))
        assert found == [format(step.get_span_context().trace_id, "x")]
        assert [each.name for each in prof] == ["rpc_call#traces(worker0 -> worker1)", "traces"]


async def test_without_a_span_nothing_is_carried(agents):
    async with agents(2):
        with propagate():
            assert await rpc_async("worker1", traces, ([],)) == ["0"]
