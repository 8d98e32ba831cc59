"""Calls and references whose arguments and values are tensors of both layouts.

Calls and references as such are tested beside their modules (`tests/rpc`, `tests/rref`).
"""

from __future__ import annotations

import asyncio
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.conformance.forms import FORMS, LAYOUTS, call, full, leaf, plus, same

pytestmark = pytest.mark.parametrize("layout", LAYOUTS)


def tensor(layout: str, seed: int = 0) -> ag.Tensor:
    return leaf(layout, seed, grad=False)


async def fetch_sum(*rrefs: ag.RRef) -> ag.Tensor:
    values = [await rref.to_here() for rref in rrefs]
    return sum(values[1:], values[0])


def check(found: ag.Tensor, *parts: ag.Tensor) -> None:
    same(found, sum(parts[1:], parts[0]))


async def test_rref_remote_value_is_a_tensor(workers, layout):
    async with workers(2):
        ops = [
            ag.remote("worker1", ag.add, args=(tensor(layout, n), tensor(layout, n + 1)))
            for n in range(10)
        ]
        functions = [
            ag.remote("worker1", plus, kwargs={"x": tensor(layout, n), "y": tensor(layout, n + 1)})
            for n in range(10)
        ]
        for n in range(10):
            for rref in (ops[n], functions[n]):
                check(await rref.to_here(), tensor(layout, n), tensor(layout, n + 1))


@pytest.mark.parametrize("func", [ag.add, plus], ids=["op", "function"])
async def test_rref_self_is_a_tensor(workers, layout, func):
    a, b = tensor(layout, 1), tensor(layout, 2)
    async with workers(1):
        rref = ag.remote("driver", func, args=(a, b))
        assert rref.is_owner()
        check(await rref.to_here(), a, b)
        assert rref.local_value() is await rref.to_here()


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("form", FORMS)
async def test_rref_self_as_arg_is_a_tensor(workers, layout, form, to):
    a, b = tensor(layout, 1), tensor(layout, 2)
    async with workers(2):
        rref = ag.remote("driver", plus, args=(a, b))  # may not be there yet
        check(await call(form, to, fetch_sum, rref, rref), a, b, a, b)


@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("form", FORMS)
async def test_rref_args_to_owner_and_to_user_are_tensors(workers, layout, form, to):
    parts = [tensor(layout, seed) for seed in range(4)]
    async with workers(2):
        first = ag.remote("worker1", plus, args=(parts[0], parts[1]))
        second = ag.remote("worker1", ag.add, args=(parts[2], parts[3]))
        check(await call(form, to, fetch_sum, first, second), *parts)


def make_inner(to: str, a: ag.Tensor, b: ag.Tensor) -> tuple[ag.RRef, ag.RRef]:
    return ag.remote(to, plus, args=(a, b)), ag.remote(to, ag.add, args=(a, a))


async def test_rref_nested_holds_tensors(workers, layout):
    a, b = tensor(layout, 1), tensor(layout, 2)
    async with workers(2):
        outer = [ag.remote("worker0", make_inner, args=("worker1", a, b)) for _ in range(20)]
        for rref in outer:
            first, second = await rref.to_here()
            assert first.owner_name() == second.owner_name() == "worker1"
            check(await first.to_here(), a, b)
            check(await second.to_here(), a, a)


async def back_and_forth(to: str, x: ag.Tensor) -> ag.Tensor:
    return await ag.rpc_async(to, ag.add, args=(x, x))


def back_and_forth_blocking(to: str, x: ag.Tensor) -> ag.Tensor:
    return ag.rpc_sync(to, ag.add, args=(x, x))


@pytest.mark.parametrize("func", [back_and_forth, back_and_forth_blocking])
async def test_call_nested_with_tensors(workers, layout, func):
    x = tensor(layout, 1)
    async with workers(1):
        check(await ag.rpc_async("worker0", func, args=("driver", x)), x, x)


Pair = namedtuple("Pair", "left right")


def look_inside(value: dict[str, Any], by_tensor: dict[ag.Tensor, int]) -> dict[str, Any]:
    pair = value["pair"]
    assert pair.left is value["list"][0]  # one tensor twice is one tensor
    (key,) = by_tensor
    return {"sum": pair.left + pair.right, "key": key, "number": by_tensor[key]}


@pytest.mark.parametrize("form", FORMS)
async def test_call_containers_of_tensors(workers, layout, form):
    a, b = tensor(layout, 1), tensor(layout, 2)
    async with workers(2):
        value = {"list": [a, [b]], "pair": Pair(a, b)}
        found = await call(form, "worker1", look_inside, value, {b: 7})
        check(found["sum"], a, b)
        same(found["key"], b)
        assert found["number"] == 7


@pytest.mark.parametrize("form", FORMS)
async def test_address_forms_with_tensors(workers, layout, form):
    x = tensor(layout, 1)
    async with workers(2) as cluster:
        for to in ("worker1", 1, ag.get_worker_info("worker1"), cluster["worker1"]):
            check(await call(form, to, plus, x, x), x, x)


@pytest.mark.parametrize("form", FORMS)
async def test_init_world_one_with_tensors(layout, form):
    x = tensor(layout, 1)
    async with ag.Worker("me", rank=0, world_size=1, options=ag.Options(strict_leaks=True)):
        check(await call(form, "me", ag.add, x, x), x, x)


async def busy(to: str, layout: str, times: int) -> None:
    for seed in range(times):
        x = tensor(layout, seed)
        check(await ag.rpc_async(to, heavier, args=(x,)), x, x)


def heavier(x: ag.Tensor) -> ag.Tensor:
    for _ in range(20):
        np.linalg.norm(full(x))
    return x + x


async def test_wait_all_workers_under_uneven_load_of_tensors(workers, layout):
    async with workers(3) as cluster:
        waiting = [cluster[name].call(ag.barrier) for name in ("worker1", "worker2")]
        await busy("worker1", layout, 30)
        await busy("worker2", layout, 30)
        assert not any(each.done() for each in waiting)
        await asyncio.gather(cluster["worker0"].call(ag.barrier), ag.barrier(), *waiting)
        await asyncio.gather(ag.barrier(), *[worker.call(ag.barrier) for worker in cluster])
