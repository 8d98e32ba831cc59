"""A backward pass is part of the trace that is current where it is begun, on every worker."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import aiograd as ag
from aiograd.dist.registry import ContextRegistry
from aiograd.rpc.observe.otel import propagate
from aiograd.rpc.observe.profile import profile
from aiograd.rpc.scope import AGENT
from tests.security.conftest import workers_by_mode

SEEN: Counter[tuple[str, str, str]] = Counter()  # worker, where, trace


@pytest.fixture
def tracer():
    provider = TracerProvider()
    yield provider.get_tracer("test")
    provider.shutdown()


@pytest.fixture(autouse=True)
def fresh():
    SEEN.clear()


def note(where: str) -> None:
    found = trace.get_current_span().get_span_context().trace_id
    SEEN[ag.get_worker_info().name, where, format(found, "x")] += 1


def hook(gradient):
    note("hook")


def calling_hook(gradient):
    note("hook")
    ag.rpc_sync("worker0", note, args=("called by a hook",))


def last(x):
    y = x * 2
    y.register_hook(calling_hook)
    return y


@ag.expose
def doubled(x):
    return x * 2


async def middle(x):
    y = await ag.rpc_async("worker1", last, args=(x * 3,))
    z = y * 5
    z.register_hook(hook)
    return z.sum()


async def run_pass(crossed=None):
    w = ag.ones(3, requires_grad=True)
    first = w * 1
    first.register_hook(hook)  # runs last, in a step that a message begins
    async with ag.context() as ctx:
        if crossed is not None:
            ctx.on_crossing(crossed)
        loss = await ag.rpc_async("worker0", middle, args=(first,))
        await ctx.backward(loss)
        np.testing.assert_allclose(ctx.gradients[w].numpy(), np.full(3, 30.0))


async def test_hooks_and_the_calls_they_make_continue_the_trace_on_every_worker(tracer):
    async with ag.LocalCluster(2, processes=False):
        with tracer.start_as_current_span("step") as step, propagate():
            await run_pass()
    mine = format(step.get_span_context().trace_id, "x")
    assert SEEN == {
        ("driver", "hook", mine): 1,
        ("worker0", "hook", mine): 1,
        ("worker1", "hook", mine): 1,
        ("worker0", "called by a hook", mine): 1,
    }


async def test_hooks_of_the_boundary_continue_the_trace(tracer):
    def crossed(crossing, array):
        if crossing.way == "backward":
            note("boundary")

    async with ag.LocalCluster(2, processes=False):
        with tracer.start_as_current_span("step") as step, propagate():
            await run_pass(crossed)
    mine = format(step.get_span_context().trace_id, "x")
    assert {key[2] for key in SEEN} == {mine}
    assert ("driver", "boundary", mine) in SEEN


async def test_a_recording_of_a_pass_carries_the_trace_too(tracer):
    async with ag.LocalCluster(2, processes=False):
        with tracer.start_as_current_span("step") as step, profile() as recorded:
            await run_pass()
    assert {key[2] for key in SEEN} == {format(step.get_span_context().trace_id, "x")}
    assert "backward(driver)" in [each.name for each in recorded]


@contextlib.contextmanager
def traced_passes():
    """Collect what observes the passes of the current worker."""
    engine = AGENT.get().parts[ContextRegistry].engine
    found, add = [], engine.passes.add

    def seen(active):
        found.append(active)
        add(active)

    engine.passes.add = seen
    yield found


async def test_without_a_span_nothing_observes_a_pass():
    async with ag.LocalCluster(2, processes=False):
        with traced_passes() as found:
            await run_pass()
            with propagate():
                await run_pass()
    assert {key[2] for key in SEEN} == {"0"}
    plain, carried = found
    assert plain.trace is None
    assert (carried.trace.traceparent, carried.trace.variables) == ("", None)


async def test_partners_do_not_get_the_trace(tracer):
    async with workers_by_mode("trusted", "restricted") as (mine, partner):
        arrived = []
        service = partner.agent.services["gradients"]
        partner.agent.services["gradients"] = lambda sender, *message: (
            arrived.append(message[2]),
            service(sender, *message),
        )[1]
        with tracer.start_as_current_span("step"), propagate():
            w = ag.ones(3, requires_grad=True)
            async with ag.context() as ctx:
                y = await ag.rpc_async(partner.name, doubled, args=(w,))
                await ctx.backward(y.sum())
        assert [len(invitation) for invitation in arrived if invitation] == [6]
