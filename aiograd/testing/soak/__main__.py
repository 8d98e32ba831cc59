"""`python -m aiograd.testing.soak SECONDS`: let workers work while they are killed, and report."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any

from aiograd._progress import Progress
from aiograd.cluster.processes.worker_main import new_event_loop
from aiograd.rpc.options import Options
from aiograd.testing.soak import Report, soak


def main() -> int:
    """Parse the arguments, run the soak and print its report; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="aiograd.testing.soak", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--every", type=float, default=12.0, help="seconds between two kills")
    parser.add_argument("--actors", type=int, default=8, help="jobs under way at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop", default="auto", choices=["auto", "asyncio", "uvloop"])
    given = parser.parse_args()
    running = soak(
        given.seconds,
        workers=given.workers,
        every=given.every,
        actors=given.actors,
        seed=given.seed,
        options=Options(loop=given.loop),
    )
    with asyncio.Runner(loop_factory=partial(new_event_loop, given.loop)) as runner:
        report = runner.run(_watched(running, given.seconds))
    sys.stdout.write(f"{report}\n")
    return 1 if report.faults() else 0


async def _watched(running: Coroutine[Any, Any, Report], seconds: float) -> Report:
    """Show a progress bar beside the soak."""

    async def tick() -> None:
        """Advance the bar once a second."""
        for _ in Progress(range(math.ceil(seconds)), "soaking, s"):
            await asyncio.sleep(1)

    ticking = asyncio.create_task(tick())
    try:
        return await running
    finally:
        ticking.cancel()


if __name__ == "__main__":
    sys.exit(main())
