"""Coroutine functions as callees: `async def` where torch needs `async_execution`."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from tests.conformance.forms import FORMS, call, full, leaf, plus

TWO = [[2.0, 2.0], [2.0, 2.0]]


async def add_elsewhere(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    return await ag.rpc_async(to, ag.add, args=(x, y))


def add_by_a_call(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Future:
    """A plain function whose answer is that of the call it makes."""
    return ag.rpc_async(to, ag.add, args=(x, y))


async def add_by_a_future_of_its_own(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    answer = asyncio.get_running_loop().create_future()
    ag.rpc_async(to, ag.add, args=(x, y)).add_done_callback(
        lambda done: answer.set_result(done.result())
    )
    return await answer


async def add_in_a_chain(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    first = await ag.rpc_async(to, ag.add, args=(x, y))
    return await ag.rpc_async(to, ag.sub, args=(first, first)) + first


async def add_nested(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    return await ag.rpc_async(to, add_elsewhere, args=("worker0", x, y))


@pytest.mark.parametrize(
    "func",
    [add_elsewhere, add_by_a_call, add_by_a_future_of_its_own, add_in_a_chain, add_nested],
)
@pytest.mark.parametrize("form", FORMS)
async def test_async_simple(workers, form, func):
    async with workers(2):
        result = await call(form, "worker1", func, "worker0", ag.ones(2, 2), ag.ones(2, 2))
        assert result.tolist() == TWO


class Adder:
    @staticmethod
    async def static_add(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
        return await ag.rpc_async(to, ag.add, args=(x, y))

    @classmethod
    async def class_add(cls, to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
        assert cls is Adder
        return await ag.rpc_async(to, ag.add, args=(x, y))

    async def bound_add(self, to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
        return await ag.rpc_async(to, ag.add, args=(x, y))


@pytest.mark.parametrize("func", [Adder.static_add, Adder.class_add], ids=["static", "class"])
@pytest.mark.parametrize("form", FORMS)
async def test_async_methods(workers, form, func):
    async with workers(2):
        result = await call(form, "worker1", func, "worker0", ag.ones(2, 2), ag.ones(2, 2))
        assert result.tolist() == TWO


def _sums_by_proxy(rref: ag.RRef, form: str) -> list[ag.Tensor]:
    proxy = {"sync": rref.rpc_sync, "async": rref.rpc_async, "remote": rref.remote}[form]()
    arguments = ("worker0", ag.ones(2, 2), ag.ones(2, 2))
    methods = (proxy.static_add, proxy.class_add, proxy.bound_add)
    return [method(*arguments) for method in methods]


@pytest.mark.parametrize("form", FORMS)
async def test_async_rref_proxy(workers, form):
    async with workers(2):
        rref = ag.remote("worker1", Adder)
        if form == "sync":
            results = await asyncio.to_thread(_sums_by_proxy, rref, form)
        else:
            results = [await each for each in _sums_by_proxy(rref, form)]
        assert [each.tolist() for each in results] == [TWO] * 3


NUMBER, STEP = 20, 3.0


async def chained(to: str, x: ag.Tensor) -> ag.Tensor:
    for _ in range(NUMBER):
        x = await ag.rpc_async(to, plus, args=(x, STEP))
    return x


async def fanned_out(to: str, x: ag.Tensor) -> ag.Tensor:
    calls = [ag.rpc_async(to, plus, args=(x, STEP)) for _ in range(NUMBER)]
    return sum(await asyncio.gather(*calls)) - (NUMBER - 1) * x


@pytest.mark.parametrize("func", [chained, fanned_out])
@pytest.mark.parametrize("form", FORMS)
async def test_async_multi(workers, form, func):
    async with workers(2):
        result = await call(form, "worker1", func, "worker0", ag.ones(2, 2))
        assert result.tolist() == (np.ones((2, 2)) + 60).tolist()


async def fails_at_once() -> None:
    raise RuntimeError("Expected error")


async def fails_later(to: str = "worker0") -> None:
    await ag.rpc_async(to, plus, args=(1, 1))
    raise RuntimeError("Expected error")


@pytest.mark.parametrize("func", [fails_at_once, fails_later])
@pytest.mark.parametrize("form", FORMS)
async def test_async_raise(workers, form, func):
    async with workers(2):
        with pytest.raises(RuntimeError, match="Expected error"):
            await call(form, "worker1", func)


async def does_not_wait() -> ag.Tensor:
    return ag.ones(2, 2)


@pytest.mark.parametrize("form", FORMS)
async def test_async_wrong_type_an_async_function_needs_nothing_to_wait_for(workers, form):
    async with workers(2):
        result = await call(form, "worker1", does_not_wait)
        assert result.tolist() == [[1.0, 1.0], [1.0, 1.0]]


class ParameterServer:
    """Answers all trainers of a round when the last gradient of the round is in."""

    def __init__(self, trainers: int, layout: str) -> None:
        self.trainers, self.layout = trainers, layout
        self.round: asyncio.Future[ag.Tensor] | None = None
        self.gradients: list[ag.Tensor] = []
        self.averages: list[ag.Tensor] = []

    async def average(self, gradient: ag.Tensor) -> ag.Tensor:
        if self.round is None:
            self.round = asyncio.get_running_loop().create_future()
        this = self.round
        self.gradients.append(gradient)
        if len(self.gradients) == self.trainers:
            total = sum(self.gradients[1:], self.gradients[0])
            self.averages.append(total * (1.0 / self.trainers))
            self.gradients, self.round = [], None
            this.set_result(self.averages[-1])
        return await this

    def all_averages(self) -> list[ag.Tensor]:
        return self.averages


async def train(server: ag.RRef, seed: int, layout: str) -> list[ag.Tensor]:
    return [
        await server.rpc_async().average(leaf(layout, 100 * seed + number, False))
        for number in range(10)
    ]


@pytest.mark.parametrize("layout", ["dense", "sparse"])
async def test_async_parameter_server(workers, layout):
    async with workers(3) as cluster:
        server = ag.RRef(ParameterServer(3, layout))
        found = await asyncio.gather(
            *[worker.call(train, server, worker.rank, layout) for worker in cluster]
        )
        kept = [full(each).tolist() for each in server.local_value().averages]
        assert len(kept) == 10
        for averages in found:
            assert [full(each).tolist() for each in averages] == kept
        first = sum(full(leaf(layout, 100 * seed, False)) for seed in range(3)) / 3
        np.testing.assert_allclose(np.array(kept[0]), first, rtol=1e-12)
