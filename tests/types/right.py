"""What a user writes, with the types that checkers must see; `make types` checks this file.

Nothing here runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import numpy as np

import aiograd as ag


def dense(x: ag.Tensor, w: ag.Tensor) -> ag.Tensor:
    return x


async def scaled(x: ag.Tensor, n: int, *, scale: float = 1.0) -> ag.Tensor:
    return x


async def count(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


def letters(text: str) -> Iterator[str]:
    yield from text


def defaults(x: int, y: int = 3) -> str:
    return ""


def keyword(x: int, *, flag: bool = False) -> bool:
    return flag


def variadic(*xs: int) -> int:
    return 0


def nothing() -> None: ...


class Counter:
    def __init__(self, start: int) -> None:
        self.n = start

    def add(self, k: int) -> int:
        return self.n

    async def later(self, k: int) -> str:
        return ""


class Model(ag.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = ag.nn.Linear(width, width)

    def forward(self, x: ag.Tensor, training: bool = False) -> ag.Tensor:
        return self.inner(x)


async def calls(x: ag.Tensor, w: ag.Tensor) -> None:
    assert_type(await ag.rpc_async("w", dense, args=(x, w)), ag.Tensor)
    assert_type(await ag.rpc_async(0, dense, (x, w), timeout=3), ag.Tensor)
    assert_type(await ag.rpc_async(ag.WorkerInfo("w", 1), scaled, (x, 3)), ag.Tensor)
    assert_type(await ag.rpc_async("w", scaled, (x, 3), {"scale": 2.0}), ag.Tensor)
    assert_type(await ag.rpc_async("w", scaled, (x, 3), kwargs={"scale": 2.0}), ag.Tensor)
    assert_type(await ag.rpc_async("w", scaled, kwargs={"x": x, "n": 1}), ag.Tensor)
    assert_type(await ag.rpc_async("w", defaults, (1,)), str)
    assert_type(await ag.rpc_async("w", defaults, (1, 2)), str)
    assert_type(await ag.rpc_async("w", keyword, (1,), kwargs={"flag": True}), bool)
    assert_type(await ag.rpc_async("w", variadic, (1, 2, 3)), int)
    assert_type(await ag.rpc_async("w", nothing), None)
    assert_type(await ag.rpc_async("w", lambda: "hello"), str)
    assert_type(await ag.rpc_async("w", len, ([1],)), int)
    assert_type(ag.rpc_sync("w", dense, (x, w)), ag.Tensor)
    assert_type(ag.rpc_sync("w", scaled, (x, 1)), ag.Tensor)
    assert_type(ag.rpc_async("w", defaults, (1,)), ag.Future[str])
    assert_type(ag.rpc_async("w", defaults, (1,)).result(), str)
    async for i in ag.rpc_stream("w", count, (3,)):
        assert_type(i, int)
    async for s in ag.rpc_stream("w", letters, ("abc",), timeout=2):
        assert_type(s, str)
    any_arguments: Any = (1, 2)
    assert_type(await ag.rpc_async("w", defaults, any_arguments), str)


async def handles(x: ag.Tensor, w: ag.Tensor) -> None:
    async with ag.LocalCluster(2) as cluster:
        worker = cluster["worker0"]
        assert_type(await worker.call(dense, x, w), ag.Tensor)
        assert_type(await worker.call(scaled, x, 3, scale=2.0), ag.Tensor)
        assert_type(await worker.call(defaults, 1), str)
        assert_type(await worker.within(3).call(scaled, x, n=3), ag.Tensor)
        assert_type(await ag.rpc_async(worker, dense, (x, w)), ag.Tensor)
        assert_type(worker.remote(Counter, 1), ag.RRef[Counter])
        assert_type(worker.remote(scaled, x, 1), ag.RRef[ag.Tensor])
        async for i in worker.stream(count, 3):
            assert_type(i, int)
        group = ag.Group(cluster.workers)
        assert_type(await group.call(dense, x, w), list[ag.Tensor])
        assert_type(await group.call(scaled, x, 1, scale=2), list[ag.Tensor])
        assert_type(await group.within(3).call(defaults, 1, y=2), list[str])
        tolerant = group.within(return_exceptions=True)
        assert_type(await tolerant.call(defaults, 1), list[str | BaseException])
        assert_type(await group.map(defaults, range(10)), list[str])


async def references() -> None:
    counter = ag.remote("w", Counter, args=(1,))
    assert_type(counter, ag.RRef[Counter])
    assert_type(await counter, Counter)
    assert_type(await counter.to_here(), Counter)
    assert_type(counter.local_value().add(1), int)
    assert_type(await counter.call(Counter.add, 2), int)
    assert_type(await counter.call(Counter.later, k=2), str)
    assert_type(counter.rpc_sync().add(3), int)
    assert_type(ag.RRef(3), ag.RRef[int])
    assert_type(ag.remote("w", nothing), ag.RRef[None])
    async with counter as same:
        assert_type(same, ag.RRef[Counter])


async def modules(x: ag.Tensor) -> None:
    model = Model(3)
    assert_type(model(x), ag.Tensor)
    assert_type(model(x, training=True), ag.Tensor)
    there = ag.nn.RemoteModule("w", Model, args=(3,))
    assert_type(there, ag.nn.RemoteModule[Model])
    assert_type(await there(x), ag.Tensor)
    assert_type(await there.forward_async(x, training=True), ag.Tensor)
    assert_type(there.module_rref, ag.RRef[Model])
    assert_type(await there.remote_parameters(), list[ag.RRef[ag.nn.Parameter]])
    opt = ag.optim.DistributedOptimizer(ag.optim.SGD, await there.remote_parameters(), lr=0.1)
    async with ag.context() as ctx:
        await ctx.backward(await there(x))
        assert_type(ctx.gradients[x], ag.Tensor)
        await opt.step(ctx)


def tensors(x: ag.Tensor) -> ag.Tensor:
    assert_type(ag.randn(64, 784), ag.Tensor)
    assert_type(ag.zeros((2, 3), dtype="f4", requires_grad=True), ag.Tensor)
    assert_type(ag.tanh(x @ x.T), ag.Tensor)
    assert_type(x.sum(), ag.Tensor)
    assert_type(x.sum(axis=0, keepdims=True).mean(dim=1), ag.Tensor)
    assert_type(-x + 1 - 2 * x / 3**x, ag.Tensor)
    assert_type(x == 3, ag.Tensor)
    assert_type(x[0, ..., None], ag.Tensor)
    assert_type(ag.where(x > 0, x, 0.0), ag.Tensor)
    assert_type(ag.concatenate([x, x], axis=1), ag.Tensor)
    assert_type(ag.stack((x, x), dim=0), ag.Tensor)
    assert_type(ag.sum(x, dim=(0, 1), keepdim=True), ag.Tensor)
    assert_type(x.mean(dim=-1, keepdim=True).squeeze(dim=-1), ag.Tensor)
    assert_type(x.unsqueeze(dim=0), ag.Tensor)
    assert_type(ag.unsqueeze(x, 0), ag.Tensor)
    assert_type(x.argmax(dim=1), ag.Tensor)
    assert_type(ag.softmax(x, dim=-1), ag.Tensor)
    assert_type(ag.nn.functional.log_softmax(x, dim=1), ag.Tensor)
    assert_type(ag.flip(x, dims=(0, 1)), ag.Tensor)
    assert_type(ag.roll(x, 1, dims=0), ag.Tensor)
    assert_type(ag.tensordot(x, x, dims=1), ag.Tensor)
    assert_type(ag.split(x, 3), tuple[ag.Tensor, ...])
    assert_type(ag.linalg.inv(x), ag.Tensor)
    assert_type(ag.linalg.eigh(x).eigenvalues, ag.Tensor)
    assert_type(ag.svd(x).S, ag.Tensor)
    assert_type(ag.fft.rfft(x), ag.Tensor)
    assert_type(ag.nn.functional.relu(x), ag.Tensor)
    assert_type(ag.nn.functional.cross_entropy(x, [1, 2]), ag.Tensor)
    assert_type(x.reshape(2, -1).transpose(1, 0).view(4), ag.Tensor)
    assert_type(x.float().shape, tuple[int, ...])
    assert_type(x.numpy(), np.ndarray[Any, np.dtype[Any]])
    assert_type(list(x), list[ag.Tensor])
    assert_type(ag.sum([1, 2, 3]), ag.Tensor)
    with ag.no_grad():
        x += 1
    return ag.softmax(x, axis=-1) * 2
