"""What it costs to look: calls per processor second without a page, with a closed and an open one.

    python benchmarks/looking.py --pairs 20        # make looking ARGS="--pairs 20"

    slices of SECONDS, one kind after the other: none, closed, open, none, closed, open, …
    in each: two tasks per worker call a function of WORK seconds of processor time, so that about a
    thousand calls a second are under way on two cores
    counted: calls, and the processor time of the driver (which serves the page) and of all workers

Processor time, not the clock: on a busy machine the clock says how busy it is. The page is read by
a process of its own, as a browser is. Each figure is the median over all rounds of what a slice
costs per call beside the slice without a page in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import aiograd as ag

SECONDS = 3.0
WORK = 0.002  # seconds of processor time per call: two cores do a thousand of them in a second
GOALS = {"closed": 0.01, "open": 0.03}
_READER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "events") as answer:
    for line in answer:
        if line.startswith(b"data"):
            print("read", flush=True)
"""


def loops_for(seconds: float) -> int:
    """Return how many turns of `work` take so long on this machine."""
    count = 10_000
    best = min(_timed(count) for _ in range(20))
    return max(1, round(count * seconds / best))


def _timed(count: int) -> float:
    began = time.process_time()
    work(count)
    return time.process_time() - began


@ag.inline
def work(count: int) -> int:
    """Use the processor."""
    total = 0
    for i in range(count):
        total += i
    return total


@ag.inline
def processor_time() -> float:
    """Return the processor time that this process has used."""
    return time.process_time()


async def load(names: list[str], count: int, seconds: float) -> int:
    """Call for so long; return how often."""
    end, calls = time.perf_counter() + seconds, 0

    async def one(name: str) -> None:
        nonlocal calls
        while time.perf_counter() < end:
            await ag.rpc_async(name, work, args=(count,))
            calls += 1

    await asyncio.gather(*(one(name) for name in names for _ in range(2)))
    return calls


async def used(names: list[str]) -> float:
    """Return the processor time of the driver and all workers."""
    return time.process_time() + sum([await ag.rpc_async(name, processor_time) for name in names])


@asynccontextmanager
async def looked_at(cluster: ag.LocalCluster) -> AsyncIterator[None]:
    """Have a page open, in another process."""
    async with ag.Dashboard(cluster) as page:
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _READER, page.url, stdout=subprocess.PIPE
        )
        try:
            assert reader.stdout is not None
            await reader.stdout.readline()
            yield
        finally:
            reader.terminate()
            await reader.wait()


async def slice_of(kind: str, cluster: ag.LocalCluster, count: int, seconds: float) -> float:
    """Return the seconds of processor time per call in one slice."""
    names = [worker.name for worker in cluster]
    pages = {"none": nullcontext(), "closed": ag.Dashboard(cluster), "open": looked_at(cluster)}
    async with pages[kind]:
        began = await used(names)
        calls = await load(names, count, seconds)
        return (await used(names) - began) / calls


async def measure(rounds: int, workers: int, seconds: float) -> dict[str, list[float]]:
    """Return by kind what each slice cost beside the one without a page, as a share of that."""
    costs: dict[str, list[float]] = {kind: [] for kind in GOALS}
    async with ag.LocalCluster(workers) as cluster:
        count = loops_for(WORK)
        calls = await load([worker.name for worker in cluster], count, seconds)  # warm-up
        print(f"{workers} workers, {calls / seconds:.0f} calls per second on this machine, now")
        for number in range(rounds):
            # In another order each time: the machine may get slower or faster while it is measured.
            kinds = ["none", "closed", "open"]
            kinds = kinds[number % 3 :] + kinds[: number % 3]
            found = {kind: await slice_of(kind, cluster, count, seconds) for kind in kinds}
            for kind, shares in costs.items():
                shares.append(found[kind] / found["none"] - 1.0)
    return costs


def main() -> int:
    """Measure, and print the figures beside the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10, help="rounds of slices")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a slice")
    given = parser.parse_args()
    costs = asyncio.run(measure(given.pairs, given.workers, given.seconds))
    missed = False
    for kind, shares in costs.items():
        low, middle, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
        missed |= middle > GOALS[kind]
        print(
            f"{kind:<7} {middle:+.2%} of calls per processor second "
            f"(quartiles {low:+.2%} … {high:+.2%}), goal {GOALS[kind]:.0%}"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
