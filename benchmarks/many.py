"""Many workers on one machine: how long until all can be called, and until all have ended.

python benchmarks/many.py [64]
"""

from __future__ import annotations

import sys
import time

import uvloop

import aiograd as ag


async def main(count: int) -> None:
    began = time.perf_counter()
    async with ag.LocalCluster(count) as cluster:
        infos = await ag.Group(cluster).call(ag.get_worker_info)
        called = time.perf_counter() - began
        assert sorted(info.rank for info in infos) == list(range(count))
    ended = time.perf_counter() - began
    print(f"{count} workers: all called after {called:.2f} s, all ended after {ended:.2f} s")


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 64))
