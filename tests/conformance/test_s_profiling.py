"""Theme S: recordings of calls, through everything a call can be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import aiograd as ag
from aiograd.rpc.spans import Profile, Span, profile, span, start_profile, stop_profile
from tests.conformance.forms import FORMS, call, leaf, plus

KINDS = {"async": "call", "sync": "call", "remote": "remote"}


def inside(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start <= inner.end <= outer.end


def only(found: Profile, key: str) -> Span:
    (event,) = [each for each in found if each.key == key]
    return event


async def test_prof_key_has_the_kind_the_function_and_both_workers(workers):
    async with workers(2):
        with profile() as found:
            await ag.rpc_async("worker1", plus, args=(1, 2))
            await ag.rpc_async("worker0", ag.add, args=(1, 2))
            await ag.remote("worker1", plus, args=(1, 2)).future()
        keys = [each.key for each in found if each.worker == "driver"]
        assert keys[:2] == ["rpc_call#plus(driver -> worker1)", "rpc_op#add(driver -> worker0)"]
        assert "rpc_remote#plus(driver -> worker1)" in keys


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("func", [ag.add, plus], ids=["op", "function"])
@pytest.mark.parametrize("form", FORMS)
async def test_prof_calls(workers, form, func, to):
    name = "add" if func is ag.add else "plus"
    async with workers(2):
        with profile() as found, span("outer"):
            if form == "remote":  # a creation is noted when it is answered
                await ag.remote(to, func, args=(1, 2)).future()
            else:
                await call(form, to, func, 1, 2)
        outer = only(found, "outer")
        assert (outer.worker, outer.kind) == ("driver", "scope")
        kind = "op" if form != "remote" and func is ag.add else KINDS[form]
        made = only(found, f"rpc_{kind}#{name}(driver -> {to})")
        assert made.worker == "driver"
        assert made.parent == outer.id
        ran = only(found, f"{made.key}/{name}")
        assert (ran.worker, ran.kind, ran.parent) == (to, "run", made.id)
        assert inside(ran, made)
        assert outer.start <= made.start <= outer.end
        with profile() as nothing:
            await asyncio.sleep(0)
        assert len(nothing) == 0


async def two_at_once() -> None:
    await asyncio.gather(
        ag.rpc_async("worker0", plus, args=(1, 2)), ag.rpc_async("worker1", plus, args=(3, 4))
    )


async def test_prof_calls_outside_of_a_recording_leave_nothing(workers):
    async with workers(2):
        with profile() as found:
            pass
        await two_at_once()
        assert len(found) == 0


def in_scopes(x: ag.Tensor) -> ag.Tensor:
    with span("first"):
        y = x + x
        with span("second"):
            y = y * y
    return y


async def test_prof_remote_events_keep_their_scopes(workers):
    async with workers(2):
        with profile() as found:
            await ag.rpc_async("worker1", in_scopes, args=(ag.ones(3),))
        key = "rpc_call#in_scopes(driver -> worker1)"
        made, ran = only(found, key), only(found, f"{key}/in_scopes")
        first, second = only(found, f"{key}/first"), only(found, f"{key}/second")
        assert {each.worker for each in (ran, first, second)} == {"worker1"}
        assert found.children(made) == [ran]
        assert found.children(ran) == [first]
        assert found.children(first) == [second]
        assert inside(second, first)
        assert inside(first, ran)


async def test_prof_remote_events_tell_shapes_and_bytes_when_asked(workers):
    async with workers(2):
        for details in (False, True):
            with profile(details=details) as found:
                await ag.rpc_async("worker1", plus, args=(ag.ones(4, 5), ag.ones(5)))
            ran = only(found, "rpc_call#plus(driver -> worker1)/plus")
            if details:
                assert ran.detail == {"inputs": [(4, 5), (5,)], "bytes": 160}
            else:
                assert ran.detail is None


async def test_prof_remote_events_do_not_mix_in_parallel_calls(workers):
    async def recorded(number: int) -> list[Any]:
        with profile(details=True) as found:
            name = f"worker{number % 2}"
            await ag.rpc_async(name, in_scopes, args=(ag.ones(number),))
        ran = only(found, f"rpc_call#in_scopes(driver -> {name})/in_scopes")
        return [len(found), ran.worker, ran.detail["inputs"]]

    async with workers(2):
        results = await asyncio.gather(*[recorded(number) for number in range(10)])
        assert results == [[4, f"worker{n % 2}", [(n,)]] for n in range(10)]


async def onwards(to: str, x: int) -> int:
    return await ag.rpc_async(to, plus, args=(x, 1))


@pytest.mark.parametrize("form", FORMS)
async def test_prof_async_nested(workers, form):
    async with workers(2):
        with profile() as found:
            if form == "remote":
                await ag.remote("worker0", onwards, args=("worker1", 1)).future()
            else:
                assert await call(form, "worker0", onwards, "worker1", 1) == 2
        first = f"rpc_{KINDS[form]}#onwards(driver -> worker0)"
        second = f"{first}/rpc_call#plus(worker0 -> worker1)"
        assert only(found, first).worker == "driver"
        assert only(found, f"{first}/onwards").worker == "worker0"
        assert only(found, second).worker == "worker0"
        assert only(found, f"{second}/plus").worker == "worker1"


@pytest.mark.parametrize("outer", ["profile", "context"])
async def test_prof_with_autograd(workers, outer):
    t = leaf()

    async def forward_and_back(ctx: ag.Context) -> None:
        y = await ag.rpc_async("worker1", plus, args=(t, t))
        await ctx.backward(y.sum())
        assert ctx.gradients[t].tolist() == [[2.0] * 3] * 3

    async with workers(2):
        if outer == "profile":
            with profile() as found:
                async with ag.context() as ctx:
                    await forward_and_back(ctx)
        else:
            async with ag.context() as ctx:
                with profile() as found:
                    await forward_and_back(ctx)
        made = only(found, "rpc_call#plus(driver -> worker1)")
        assert only(found, f"{made.key}/plus").worker == "worker1"


async def test_prof_export(workers, tmp_path):
    file = tmp_path / "trace.json"
    async with workers(2):
        with profile() as found:
            await ag.rpc_async("worker1", ag.add, args=(1, 2))
        found.to_chrome(file)
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("rpc_op#add(driver -> worker1)") == 1
    assert names.count("rpc_op#add(driver -> worker1)/add") == 1
    processes = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert processes == ["driver", "worker1"]


async def test_prof_server_global(workers):
    async with workers(2) as cluster:
        worker = cluster["worker1"]
        await worker.call(start_profile)
        await cluster["worker0"].call(onwards, "worker1", 1)  # somebody else's call
        await worker.call(start_profile)
        await worker.call(ag.subtract, 1, 2)
        inner = await worker.call(stop_profile)
        await worker.call(ag.add, 1, 2)
        outer = await worker.call(stop_profile)
        assert [each.name for each in inner] == ["subtract"]
        assert [each.name for each in outer] == ["plus", "subtract", "add"]
        assert {each.worker for each in outer} == {"worker1"}
        with pytest.raises(ag.errors.RpcError, match="no profile"):
            await worker.call(stop_profile)
