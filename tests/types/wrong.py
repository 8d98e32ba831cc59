"""Mistakes that checkers must notice, one per line; `make types` checks this file.

A checker that does not notice one complains of the `type: ignore` that it does not need.
"""

from __future__ import annotations

from right import Counter, Model, count, defaults, dense, nothing, scaled

import aiograd as ag


async def calls(x: ag.Tensor) -> None:
    ag.rpc_async("w", dense, (x, x, "more"))  # type: ignore
    ag.rpc_async("w", dense, (x,))  # type: ignore
    ag.rpc_async("w", dense)  # type: ignore
    ag.rpc_async("w", dense, x)  # type: ignore
    ag.rpc_async("w", scaled, (x, "three"))  # type: ignore
    ag.rpc_async("w", defaults, ("a",))  # type: ignore
    ag.rpc_async("w", nothing, (1,))  # type: ignore
    ag.rpc_async(3.5, nothing)  # type: ignore
    ag.rpc_sync("w", dense, (x, 3))  # type: ignore
    ag.remote("w", Counter, ("a",))  # type: ignore
    ag.rpc_stream("w", dense, (x, x))  # type: ignore
    ag.rpc_stream("w", count, ("a",))  # type: ignore
    (await ag.rpc_async("w", defaults, (1,))).no_method()  # type: ignore
    ag.rpc_async("w", defaults, (1,)).upper()  # type: ignore


async def handles(cluster: ag.LocalCluster, x: ag.Tensor) -> None:
    worker, group = cluster["w"], ag.Group(cluster)
    worker.call(dense, x)  # type: ignore
    worker.call(scaled, x, "three")  # type: ignore
    worker.call(scaled, x, 3, scal=2.0)  # type: ignore
    worker.call(defaults, 1, timeout=3)  # type: ignore
    worker.stream(dense, x, x)  # type: ignore
    worker.within("3")  # type: ignore
    group.call(dense, x)  # type: ignore
    group.call(defaults, 1, return_exceptions=True)  # type: ignore
    (await group.within(return_exceptions=True).call(defaults, 1))[0].upper()  # type: ignore


async def references() -> None:
    counter = ag.remote("w", Counter, (1,))
    counter.call(Counter.add, "x")  # type: ignore
    counter.call(Counter.add)  # type: ignore
    counter.call(str.upper)  # type: ignore
    counter.add(2)  # type: ignore
    (await counter).missing()  # type: ignore


async def modules(x: ag.Tensor) -> None:
    Model("3")  # type: ignore
    Model(3)("x")  # type: ignore
    there = ag.nn.RemoteModule("w", Model, args=(3,))
    there("x")  # type: ignore
    there.forward_async()  # type: ignore
    ag.nn.RemoteModule("w", Model, args=("x",))  # type: ignore
    ag.nn.RemoteModule("w", Counter, args=(1,))  # type: ignore


def tensors(x: ag.Tensor) -> None:
    ag.nonsense(3)  # type: ignore
    ag.tahn(x)  # type: ignore
    ag.autograd.tahn(x)  # type: ignore
    ag.linalg.inverse(x)  # type: ignore
    ag.nn.functional.reluu(x)  # type: ignore
    ag.zeros(3, dtyp="f4")  # type: ignore
    ag.sum(x, axes=1)  # type: ignore
    x.summ()  # type: ignore
    x.sum(keepdim_=True)  # type: ignore
    x = x.missing  # type: ignore
    ag.tanh()  # type: ignore
    x = x + None  # type: ignore
    ag.max(x, dim=1)  # type: ignore
    ag.sort(x, dim=1)  # type: ignore
    ag.split(x, 2, dim=1)  # type: ignore
    x.std(dim=0)  # type: ignore
    x.var(dim=0, keepdim=True)  # type: ignore
    x.sum(dims=0)  # type: ignore
    x.sum(keepdim="no")  # type: ignore
    ag.flip(x, dim=0)  # type: ignore
    x.unsqueeze()  # type: ignore
    ag.softmax(x, keepdim=True)  # type: ignore
    ag.tanh(x, dim=0)  # type: ignore
