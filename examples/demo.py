"""aiograd in half a minute: calls, an error, a cancelled call, and training across workers."""

import asyncio
import os
import time

import numpy as np

import aiograd as ag


def slow_square(x):
    time.sleep(0.3)
    return x * x


def stumble():
    return 1 / 0


async def wait_for_ever():
    await asyncio.Event().wait()


class Layer(ag.nn.Module):
    """One layer of the network; each lives on a worker of its own."""

    def __init__(self, inputs, outputs, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.w = ag.nn.Parameter(rng.standard_normal((inputs, outputs)) / inputs**0.5)
        self.b = ag.nn.Parameter(np.zeros(outputs))

    def forward(self, x):
        return ag.tanh(x @ self.w + self.b)


async def calls():
    print("1. Calls: four plain functions of 0.3 s each, on two workers, at once")
    start = time.perf_counter()
    jobs = [ag.rpc_async(f"worker{i % 2}", slow_square, args=(i,)) for i in range(4)]
    print("   ", await asyncio.gather(*jobs), f"in {time.perf_counter() - start:.2f} s")

    print("2. A remote error arrives as itself, and says where it happened")
    try:
        await ag.rpc_async("worker1", stumble)
    except ZeroDivisionError as error:
        print(f"    ZeroDivisionError: {error}; {error.__notes__[0].splitlines()[0]}")

    print("3. A cancelled call stops on the other side, too")
    call = ag.rpc_async("worker1", wait_for_ever)
    while not (await ag.rpc_async("worker1", ag.debug_info))["running_calls"]:
        await asyncio.sleep(0.01)
    call.cancel()
    while (await ag.rpc_async("worker1", ag.debug_info))["running_calls"]:
        await asyncio.sleep(0.01)
    print("    worker1 is running 0 calls again")


async def training():
    print("4. A two-layer network, one layer per worker; gradients flow back through the calls")
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (128, 2))
    y = np.sin(3 * x[:, :1]) * x[:, 1:]
    first = ag.nn.RemoteModule("worker0", Layer, args=(2, 32, 1))
    second = ag.nn.RemoteModule("worker1", Layer, args=(32, 1, 2))
    params = await first.remote_parameters() + await second.remote_parameters()
    optimizer = await ag.optim.DistributedOptimizer(ag.optim.Adam, params, lr=0.02)
    for step in (bar := ag.progress(range(1, 201), "    training")):
        async with ag.context() as ctx:
            loss = ((await second(await first(x)) - y) ** 2).mean()
            await ctx.backward(loss)
            await optimizer.step(ctx)
        if step in (1, 10, 50, 100, 200):
            bar.say(f"    step {step:3d}   loss {float(loss):.5f}")


async def check():
    print("5. The same gradient, computed locally")
    x, w = ag.randn(8, 5), ag.randn(5, 3, requires_grad=True)
    model = Layer(3, 2, 3)
    async with ag.context() as ctx:
        await ctx.backward((await ag.rpc_async("worker0", model, args=(x @ w,))).sum())
        remote = ctx.gradients[w].numpy()
    model(x @ w).sum().backward()
    print(f"    largest difference: {np.abs(remote - w.grad.numpy()).max():.1e}")


async def main():
    start = time.perf_counter()
    async with ag.LocalCluster(2) as cluster:
        print(
            f"{cluster} is up in {time.perf_counter() - start:.2f} s; I am process {os.getpid()}\n"
        )
        await calls()
        await training()
        await check()
    print("\nEvery worker has ended. Next: examples/01_first_call.py")


if __name__ == "__main__":
    asyncio.run(main())
