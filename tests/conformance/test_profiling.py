"""Profiles of calls and backward passes, metrics, debug information."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import aiograd as ag
from aiograd.rpc.observe.metrics import measure_lag, metrics
from aiograd.rpc.observe.profile import (
    Profile,
    Span,
    key,
    profile,
    span,
    start_profile,
    stop_profile,
)
from tests.support.waiting import until

from .forms import FORMS, call, leaf, plus, total


def only(prof: Profile, full: str) -> Span:
    (found,) = [each for each in prof.events if each.key == full]
    return found


def inside(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start <= inner.end <= outer.end


async def wait_and_add(x: Any, y: Any) -> Any:
    await asyncio.sleep(0)
    return x + y


def scoped(x: Any, y: Any) -> Any:
    with span("outer scope"):
        with span("first"):
            x = x + y
        with span("second"):
            return x * y


async def through(to: str, x: Any, y: Any) -> Any:
    with span("on the way"):
        return await ag.rpc_async(to, scoped, (x, y))


def through_thread(to: str, x: Any, y: Any) -> Any:
    return ag.rpc_sync(to, ag.add, (x, y))


def fail() -> None:
    raise ValueError("on purpose")


class Adder:
    def add(self, x: int) -> int:
        return x + 1


# ── the metric ──────────────────────────────────────────────────────────────────────────────────


async def test_dbg_gil(workers):
    async with workers(2):
        before = await ag.rpc_async("worker1", metrics)
        await ag.rpc_async("worker1", measure_lag)
        found = await ag.rpc_async("worker1", metrics)
        added = found.keys() - before.keys() | {"loop_lag_max"}
        assert added == {"loop_lag_mean", "loop_lag_max", "loop_lag_samples"}

        async def samples() -> int:
            return (await ag.rpc_async("worker1", metrics))["loop_lag_samples"]

        await until(samples)
        found = await ag.rpc_async("worker1", metrics)
        assert 0 <= found["loop_lag_mean"] <= found["loop_lag_max"]
        assert "loop_lag_samples" not in metrics()
        await ag.rpc_async("worker1", measure_lag, (False,))
        assert (await ag.rpc_async("worker1", metrics)).keys() == before.keys()


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


async def test_prof_key(workers):
    assert key("call", "f", "here", "there") == "rpc_call#f(here -> there)"
    async with workers(2):
        with profile() as prof:
            await ag.rpc_async("worker1", plus, (1, 2))
            await ag.rpc_async("worker0", ag.add, (1, 2))
            await ag.remote("worker1", plus, (1, 2)).future()
        keys = [each.key for each in prof.events if each.worker == "driver"]
        assert keys[:2] == ["rpc_call#plus(driver -> worker1)", "rpc_op#add(driver -> worker0)"]
        assert "rpc_remote#plus(driver -> worker1)" in keys


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("func", [plus, wait_and_add, ag.add], ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FORMS)
async def test_prof_calls(workers, form, func, to):
    kind = {"remote": "remote"}.get(form, "op" if func is ag.add else "call")
    x, y = leaf(grad=False), leaf(seed=1, grad=False)
    async with workers(2):
        with profile() as prof, span("a scope of the user's"):
            found = await call(form, to, func, x, y)
            # A reference's value may arrive before the acknowledgement of its creation.
            await until(lambda: [each for each in prof.events if each.kind == kind])
        assert (found.numpy() == x.numpy() + y.numpy()).all()
        made = only(prof, key(kind, func.__name__, "driver", to))
        run = only(prof, f"{made.key}/{func.__name__}")
        scope = only(prof, "a scope of the user's")
        assert (made.worker, made.kind, made.error) == ("driver", kind, "")
        assert (run.worker, run.parent) == (to, made.id)
        assert made.parent == scope.id
        assert inside(run, made)
        assert inside(made, scope)
        fetches = [each for each in prof.events if each.kind == "fetch"]
        assert len(fetches) == (form == "remote" and to != "driver")
        assert len(prof.events) == 3 + len(fetches)


async def test_prof_calls_of_methods_by_proxy(workers):
    async with workers(2):
        rref = ag.remote("worker1", Adder)
        with profile() as prof:
            assert await rref.rpc_async().add(1) == 2
        made = only(prof, key("call", "add", "driver", "worker1"))
        assert [each.worker for each in prof.children(made)] == ["worker1"]
        await rref.release()


async def test_prof_calls_that_fail(workers):
    async with workers(2):
        with profile() as prof, pytest.raises(ValueError, match="on purpose"):
            await ag.rpc_async("worker1", fail)
        assert [each.error for each in prof.events] == ["ValueError", "ValueError"]
        with profile() as prof:
            rref = ag.remote("worker1", fail)
            with pytest.raises(ValueError, match="on purpose"):
                await rref
        made = only(prof, key("remote", "fail", "driver", "worker1"))
        assert [each.error for each in (made, *prof.children(made))] == ["ValueError"] * 2
        await rref.release()


async def test_prof_calls_between_processes(workers):
    async with workers(1, processes=True):
        with profile() as prof:
            await asyncio.gather(*(ag.rpc_async("worker0", plus, (i, 1)) for i in range(2)))
        calls = [each for each in prof.events if each.kind == "call"]
        assert len(calls) == 2
        for made in calls:
            (run,) = prof.children(made)
            assert run.worker == "worker0"
            assert inside(run, made)


# ── what happened over there ────────────────────────────────────────────────────────────────────


async def test_prof_remote_events(workers):
    x, y = leaf(grad=False), leaf(seed=1, grad=False)
    async with workers(2):
        with profile() as prof:
            await ag.rpc_async("worker1", scoped, (x, y))
        made = only(prof, key("call", "scoped", "driver", "worker1"))
        there = [each for each in prof.events if each.worker == "worker1"]
        assert all(each.key.startswith(f"{made.key}/") for each in there)
        assert {each.name for each in there} == {"scoped", "outer scope", "first", "second"}
        (run,) = prof.children(made)
        (outer,) = prof.children(run)
        assert [each.name for each in prof.children(outer)] == ["first", "second"]
        assert all(inside(each, outer) for each in prof.children(outer))


async def test_prof_remote_events_with_shapes_and_sizes(workers):
    x, y = leaf(grad=False), leaf(seed=1, grad=False)
    async with workers(2):
        for asked in (False, True):
            with profile(details=asked) as prof:
                await ag.rpc_async("worker1", ag.add, (x, y))
            run = only(prof, f"{key('op', 'add', 'driver', 'worker1')}/add")
            assert run.detail == ({"inputs": [(3, 3), (3, 3)], "bytes": 72} if asked else None)


async def test_prof_remote_events_of_parallel_calls(workers):
    async with workers(3):
        with profile() as prof:
            calls = [ag.rpc_async(f"worker{i % 3}", scoped, (i, 1)) for i in range(12)]
            assert await asyncio.gather(*calls) == [i + 1 for i in range(12)]
        made = [each for each in prof.events if each.kind == "call"]
        assert len(made) == 12
        for each in made:
            (run,) = prof.children(each)
            (outer,) = prof.children(run)
            assert [part.name for part in prof.children(outer)] == ["first", "second"]
            assert each.key.endswith(f"-> {run.worker})")


async def test_prof_remote_events_do_not_mix_in_parallel_recordings(workers):
    async def recorded(number: int) -> list[Any]:
        to = f"worker{number % 2}"
        with profile(details=True) as prof:
            await ag.rpc_async(to, scoped, (ag.ones(number), 1))
        run = only(prof, f"{key('call', 'scoped', 'driver', to)}/scoped")
        return [len(prof), run.worker, run.detail["inputs"]]

    async with workers(2):
        found = await asyncio.gather(*[recorded(number) for number in range(10)])
        assert found == [[5, f"worker{n % 2}", [(n,)]] for n in range(10)]


@pytest.mark.parametrize("form", FORMS)
async def test_prof_async_nested(workers, form):
    async with workers(3):
        with profile() as prof:
            assert await call(form, "worker1", through, "worker2", 1, 2) == 6
        first = key("remote" if form == "remote" else "call", "through", "driver", "worker1")
        second = key("call", "scoped", "worker1", "worker2")
        assert only(prof, first).worker == "driver"
        assert only(prof, f"{first}/through").worker == "worker1"
        way = only(prof, f"{first}/on the way")
        hop = only(prof, f"{first}/{second}")
        assert (hop.worker, hop.parent) == ("worker1", way.id)
        assert only(prof, f"{first}/{second}/scoped").worker == "worker2"
        assert only(prof, f"{first}/{second}/outer scope").worker == "worker2"


async def test_prof_async_nested_in_threads(workers):
    async with workers(3):
        with profile() as prof:
            await ag.rpc_async("worker1", through_thread, ("worker2", 1, 2))
        first = key("call", "through_thread", "driver", "worker1")
        second = key("op", "add", "worker1", "worker2")
        assert only(prof, f"{first}/{second}").worker == "worker1"
        assert only(prof, f"{first}/{second}/add").worker == "worker2"


# ── together with gradients ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("func", [plus, wait_and_add, ag.add], ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ["profile outside", "context outside"])
async def test_prof_with_autograd(workers, order, func):
    x, y = leaf(), leaf(seed=1)
    kind = "op" if func is ag.add else "call"

    async def work(ctx: ag.Context) -> None:
        found = await ag.rpc_async("worker1", func, (x, y))
        assert found.grad_fn.name == "Recv"
        await ctx.backward(total(found * found))
        expected = 2 * (x.numpy() + y.numpy())
        assert (ctx.gradients[x].numpy() == expected).all()
        assert (ctx.gradients[y].numpy() == expected).all()

    async with workers(2):
        if order == "profile outside":
            with profile() as prof:
                async with ag.context() as ctx:
                    await work(ctx)
        else:
            async with ag.context() as ctx:
                with profile() as prof:
                    await work(ctx)
        made = only(prof, key(kind, func.__name__, "driver", "worker1"))
        assert only(prof, f"{made.key}/{func.__name__}").worker == "worker1"


async def test_obs_profile_bwd(workers):
    x, y = leaf(), leaf(seed=1)
    async with workers(2), ag.context() as ctx:
        loss = total(await ag.rpc_async("worker1", ag.mul, (x, y)))
        with profile() as prof:
            await ctx.backward(loss)
        (whole,) = [each for each in prof.events if each.kind == "backward"]
        (send,) = [each for each in prof.events if each.kind == "send"]
        (recv,) = [each for each in prof.events if each.kind == "recv"]
        assert (whole.key, whole.error) == ("backward(driver)", "")
        assert send.key == "Send(driver -> worker1)"
        assert recv.key == "Recv(worker1 -> driver)"
        assert send.parent == recv.parent == whole.id
        assert all(inside(part, whole) for part in prof.children(whole))
        assert max(send.seconds, recv.seconds) < whole.seconds


async def test_obs_profile_bwd_that_fails(workers):
    x = leaf()
    async with workers(2), ag.context() as ctx:
        found = await ag.rpc_async("worker1", breaking, (x,))
        with profile() as prof, pytest.raises(ag.errors.BackwardFailed):
            await ctx.backward(total(found))
        (whole,) = [each for each in prof.events if each.kind == "backward"]
        assert whole.error == "BackwardFailed"


class Breaking(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        raise ValueError("on purpose")


def breaking(x: Any) -> Any:
    return Breaking.apply(x)


# ── looking at it ───────────────────────────────────────────────────────────────────────────────


async def test_prof_export(workers, tmp_path):
    async with workers(2):
        with profile() as prof:
            await ag.rpc_async("worker1", ag.add, (1.0, 2.0))
            await ag.rpc_async("worker1", scoped, (1, 2))
    prof.to_chrome(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {each["name"] for each in trace["traceEvents"] if each["ph"] == "X"}
    made = key("op", "add", "driver", "worker1")
    assert {made, f"{made}/add"} < names
    assert any(name.endswith("/second") for name in names)
    pids = {each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"}
    assert pids == {"driver", "worker1"}
    assert made in prof.table()
    picture = ag.viz.timeline(prof.events)
    assert picture.rows().keys() == {"driver", "worker1"}
    assert "scoped" in picture.svg


async def test_prof_server_global(workers):
    async with workers(2):
        for processwide in ("worker1", "driver"):
            await ag.rpc_async(processwide, start_profile)
            await ag.rpc_async(processwide, ag.add, (1.0, 2.0))
            await ag.rpc_async(processwide, start_profile)
            await ag.rpc_async(processwide, ag.sub, (1.0, 2.0))
            inner = await ag.rpc_async(processwide, stop_profile)
            outer = await ag.rpc_async(processwide, stop_profile)
            await ag.rpc_async(processwide, ag.mul, (1.0, 2.0))
            assert [each.key for each in inner.events] == ["subtract"]
            assert [each.key for each in outer.events] == ["add", "subtract"]
            assert {each.worker for each in outer.events} == {processwide}


async def test_prof_server_global_sees_calls_of_others(workers):
    async with workers(2):
        await ag.rpc_async("worker1", start_profile)
        await ag.rpc_async("worker0", through, ("worker1", 1, 2))
        prof = await ag.rpc_async("worker1", stop_profile)
        assert prof.events[-1].key == "scoped"
        assert {each.worker for each in prof.events} == {"worker1"}
        with pytest.raises(ag.errors.RpcError, match="no profile"):
            await ag.rpc_async("worker1", stop_profile)


async def test_prof_server_global_sees_passes_of_others(workers):
    x = leaf()
    async with workers(2), ag.context() as ctx:
        loss = total(await ag.rpc_async("worker1", ag.mul, (x, x)))
        await ag.rpc_async("worker1", start_profile)
        await ctx.backward(loss)
        prof = await ag.rpc_async("worker1", stop_profile)
        kinds = [each.kind for each in prof.events]
        assert kinds.count("send") == kinds.count("recv") == 1
        assert "Send(worker1 -> driver)" in {each.key for each in prof.events}
