"""What exactness costs: passes as they are, against passes that assume every edge is used.

The second kind lists no expected edges and answers no unreached ones, so it would hang whenever a
result goes unused; here every result is used, and both give the same gradients.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from unittest import mock

import numpy as np

import aiograd as ag
from aiograd.dist import passes

ROUNDS, PASSES = 15, 40


class Trusting(passes.Pass):
    """Takes it for granted that every edge will be answered."""

    def collect(self, sinks):
        self._first = False
        return super().collect(sinks)


async def one_round(worker, x, w):
    async with ag.context() as ctx:
        y = x
        for _ in range(4):
            y = await ag.rpc_async(worker, ag.multiply, args=(y, w))
        root = y.sum()
        start = time.perf_counter()
        for _ in range(PASSES):
            await ctx.backward(root, retain_graph=True)
        return (time.perf_counter() - start) / PASSES * 1e6


async def main():
    x = ag.tensor(np.ones((3, 3), np.float32), requires_grad=True)
    w = ag.tensor(np.ones((3, 3), np.float32), requires_grad=True)
    async with ag.LocalCluster(1, processes=False):
        exact, trusting = [], []
        for _ in range(ROUNDS):
            exact.append(await one_round("worker0", x, w))
            with mock.patch("aiograd.dist.engine.Pass", Trusting):
                trusting.append(await one_round("worker0", x, w))
    for name, times in (("exact", exact), ("trusting", trusting)):
        print(
            f"{name:9s} {min(times):7.1f} us a pass at best, {statistics.median(times):.1f} median"
        )
    print(f"exactness costs {(min(exact) / min(trusting) - 1) * 100:+.1f} % (best against best)")


if __name__ == "__main__":
    asyncio.run(main())
