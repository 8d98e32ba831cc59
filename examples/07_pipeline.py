"""A model in uneven stages, kept busy with micro-batches: the same gradients, far less waiting."""

import asyncio
import time

import numpy as np
from slow_stages import WIDTH, Stage, draw, report

import aiograd as ag

ROWS, PARTS = 64, 16
PACES = (0.01, 0.01, 0.03, 0.01, 0.01)  # seconds per micro-batch: one stage is 3× slower


def loss(y, target):
    return ((y - target) ** 2).mean()


async def train(stages, batches, parts):
    """One step over all batches, each cut into `parts`: time, gradients, when stages were busy."""
    pipe = ag.nn.Pipeline(stages, schedule="1f1b", microbatches=parts, recompute=True)
    start = time.perf_counter()
    async with ag.context() as ctx:
        for x, target in batches:
            await pipe.train_step(x, target, lambda y, t: loss(y, t) / len(batches))
        seconds = time.perf_counter() - start
        calls = [ag.rpc_async(s.on, report, args=(s.module_rref, ctx.id)) for s in stages]
        grads, busy = zip(*await asyncio.gather(*calls), strict=True)
    return seconds, [g for stage in grads for g in stage], busy


async def main():
    x, target = np.random.default_rng(0).standard_normal((2, ROWS, WIDTH))
    async with ag.LocalCluster(len(PACES)):
        stages = [
            await ag.nn.RemoteModule(f"worker{i}", Stage, args=(i, pace))
            for i, pace in enumerate(PACES)
        ]
        small = list(zip(np.split(x, PARTS), np.split(target, PARTS), strict=True))
        await train(stages, small[:1], 1)  # the first call of everything is slower
        slow, _, _ = await train(stages, small, 1)
        fast, grads, busy = await train(stages, [(x, target)], PARTS)
        start = time.perf_counter()
        y = await ag.nn.Pipeline(stages, microbatches=PARTS)(x)  # no context: inference only
        forward = time.perf_counter() - start

    local = ag.nn.Sequential(*[Stage(i, 0) for i in range(len(PACES))])
    loss(local(x), target).backward()
    pairs = zip(grads, local.parameters(), strict=True)
    error = max(np.abs(g - p.grad.numpy()).max() for g, p in pairs)
    print(f"{PARTS} micro-batches through {len(PACES)} stages, the middle one 3× slower:")
    draw(busy)
    print(f"one after another {slow:.2f} s, as a pipeline {fast:.2f} s: {slow / fast:.2f}× faster")
    print(f"(the pauses alone would give {sum(PACES) / max(PACES):.2f}×)")
    print(f"largest difference from the same model in one process: {error:.0e}")
    print(f"inference alone: {forward:.2f} s, the same result: {np.allclose(y, local(x))}")
    assert error < 1e-12


if __name__ == "__main__":
    asyncio.run(main())
