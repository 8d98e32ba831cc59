"""The cost of exactness: real passes against passes that assume that every edge is used.

The second kind lists no expected edges and answers no unreached ones, so it would hang whenever a
result goes unused; here every result is used, and both give the same gradients. All workers share
one process, and its CPU time is measured, so that a busy machine matters little.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from unittest import mock

import numpy as np

import aiograd as ag
from aiograd.dist.backward import state

ROUNDS, PASSES = 60, 40


class Trusting(state.Pass):
    """A pass that assumes that every edge will be answered."""

    def _begin(self):
        for node in self.topology.unreached:
            if node in self.topology.loops:  # used, though not here
                self._answer(node, None)


async def one_round(worker, x, w):
    async with ag.context() as ctx:
        y = x
        for _ in range(4):
            y = await ag.rpc_async(worker, ag.multiply, args=(y, w))
        root = y.sum()
        start = time.process_time()
        for _ in range(PASSES):
            await ctx.backward(root, retain_graph=True)
        return (time.process_time() - start) / PASSES * 1e6


async def main():
    x = ag.tensor(np.ones((3, 3), np.float32), requires_grad=True)
    w = ag.tensor(np.ones((3, 3), np.float32), requires_grad=True)
    async with ag.LocalCluster(1, processes=False):
        exact, trusting = [], []
        for _ in range(ROUNDS):
            exact.append(await one_round("worker0", x, w))
            with mock.patch("aiograd.dist.backward.engine.Pass", Trusting):
                trusting.append(await one_round("worker0", x, w))
    for name, times in (("exact", exact), ("trusting", trusting)):
        print(
            f"{name:9s} {min(times):7.1f} us a pass at best, {statistics.median(times):.1f} median"
        )
    ratio = statistics.median(a / b for a, b in zip(exact, trusting, strict=True))
    print(f"exactness costs {(ratio - 1) * 100:+.1f} % (median of neighbouring rounds)")


if __name__ == "__main__":
    asyncio.run(main())
