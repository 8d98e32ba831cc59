"""Gradients through two hops, checked against one process; then a worker dies in between."""

import asyncio
import time

import numpy as np

import aiograd as ag


def hidden(x, w1):
    """Runs on worker0, which passes the result on to worker1 before it answers."""
    return ag.tanh(x @ w1)


async def model(x, w1, w2):
    """Runs on worker0: one layer here, the next one on worker1."""
    return await ag.rpc_async("worker1", output, args=(hidden(x, w1), w2))


def output(h, w2):
    return ag.exp(-((h @ w2) ** 2)).mean()


async def main():
    rng = np.random.default_rng(0)
    x = ag.tensor(rng.standard_normal((32, 8)))
    w1 = ag.tensor(rng.standard_normal((8, 16)) / 4, requires_grad=True)
    w2 = ag.tensor(rng.standard_normal((16, 4)) / 4, requires_grad=True)

    async with ag.LocalCluster(2) as cluster:
        async with ag.context() as ctx:
            loss = await ag.rpc_async("worker0", model, args=(x, w1, w2))
            await ctx.backward(loss)
            graph = await ctx.graph()
            distributed = [ctx.gradients[w].numpy() for w in (w1, w2)]
        print(f"driver → worker0 → worker1 → worker0 → driver: loss {float(loss):.6f}")
        print(f"The graph of this context: {graph}")

        local = ag.autograd.grad(output(hidden(x, w1), w2), [w1, w2])
        error = max(np.abs(a - b.numpy()).max() for a, b in zip(distributed, local, strict=True))
        print(f"Largest difference from the same model in one process: {error:.1e}")
        assert error <= 1e-12

        print("\nNow worker1 is killed between the forward and the backward pass:")
        async with ag.context() as ctx:
            loss = await ag.rpc_async("worker0", model, args=(x, w1, w2))
            await cluster.kill("worker1")
            start = time.perf_counter()
            try:
                await ctx.backward(loss)
            except ag.errors.BackwardFailed as failure:
                print(f"  after {time.perf_counter() - start:.3f} s, {failure.worker=}: {failure}")
                print(f"  cause: {failure.__cause__!r}")
            try:
                print(ctx.gradients[w1])
            except ag.errors.BackwardFailed:
                print("  and no half-summed gradient can be read")

        await cluster.restart("worker1")
        async with ag.context() as ctx:
            await ctx.backward(await ag.rpc_async("worker0", model, args=(x, w1, w2)))
            same = np.array_equal(ctx.gradients[w1].numpy(), distributed[0])
        print(f"After a restart the same call works again; same gradient to the last bit: {same}")


if __name__ == "__main__":
    asyncio.run(main())
