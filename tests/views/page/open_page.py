"""A page that is open while workers come and go: it stays right, and nothing grows.

    python -m tests.views.page.open_page --seconds 3600      (make open-page)

    calls, references and passes ──▶ worker0, which stays
    kill · restart · scale       ──▶ the others, a change every few seconds
    the page, in Chromium if there is one, else its events alone: shows each change within SOON

At the end: memory of the process that serves the page (and has Playwright's client in it, if there
is a browser), of worker0 and of the page itself, in ten steps. Growth is a fault in runs that are
long enough to say so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

import aiograd as ag
from aiograd.testing.soak.run import held
from tests.support.browser import MISSING, opened, show

SOON = 30.0  # seconds until the page must show a change, also on a busy machine
DRIFT = 0.05  # by how much memory may have grown, as a fraction
SLACK = 2_000_000  # and in bytes: five minutes of history are a good part of a page's memory
# Seconds: in a shorter run memory is still finding its level. Every worker remembers the latest 256
# that were lost, which takes some hundred changes.
SETTLED = 1200.0
MOST = 5  # workers
VIEWS = ("calls", "waits", "references", "contexts", "logs", "profile", "overview")


def squares(x: ag.Tensor) -> ag.Tensor:
    return (x * x).sum()


class Viewer(Protocol):
    """Somebody who looks at the page."""

    async def sees(self, workers: int, well: int) -> None:
        """Wait until the page shows so many workers, so many of them well."""

    async def look_around(self) -> None:
        """Go to another view."""

    async def heap(self) -> int:
        """Return the bytes that the page uses; 0 if there is none."""


class InBrowser:
    """The page in Chromium."""

    def __init__(self, page: Any, session: Any) -> None:
        self._page, self._session, self._turn = page, session, 0

    async def sees(self, workers: int, well: int) -> None:
        """Read the first number of the overview."""
        await show(self._page, "overview")
        tile = f'.tile b:text-is("{well} of {workers}")'
        await self._page.locator(tile).wait_for(timeout=SOON * 1e3)

    async def look_around(self) -> None:
        """Click on the next view."""
        self._turn += 1
        await show(self._page, VIEWS[self._turn % len(VIEWS)])

    async def heap(self) -> int:
        """Ask the engine of JavaScript, after a garbage collection."""
        await self._session.send("HeapProfiler.collectGarbage")
        found = await self._session.send("Runtime.getHeapUsage")
        return int(found["usedSize"])


class ByEvents:
    """The events that a page would get."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    async def follow(self, answer: aiohttp.ClientResponse) -> None:
        """Read events until the connection ends."""
        text = b""
        async for chunk in answer.content.iter_any():
            text += chunk
            *whole, text = text.split(b"\n\n")
            for event in whole:
                self._rows = json.loads(event.removeprefix(b"data: ")).get("workers", self._rows)
                self._news.set()

    async def sees(self, workers: int, well: int) -> None:
        """Wait for an event with these numbers."""
        async with asyncio.timeout(SOON):
            while [len(self._rows), sum(row["state"] == "running" for row in self._rows)] != [
                workers,
                well,
            ]:
                self._news.clear()
                await self._news.wait()

    async def look_around(self) -> None:
        """There is one view only."""

    async def heap(self) -> int:
        """There is no page."""
        return 0


@contextlib.asynccontextmanager
async def viewer(url: str, browser: bool) -> AsyncIterator[Viewer]:
    """Open the page, or its events."""
    if browser:
        async with opened(url) as page:
            yield InBrowser(page, await page.context.new_cdp_session(page))
        return
    # No timeout: events come for as long as the page is open.
    forever = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=forever) as client, client.get(url + "events") as got:
        events = ByEvents()
        reading = asyncio.create_task(events.follow(got))
        try:
            yield events
        finally:
            reading.cancel()


@dataclass
class Report:
    """What was seen."""

    seconds: float
    memory: dict[str, list[int]] = field(default_factory=dict)
    changes: int = 0
    calls: int = 0
    passes: int = 0

    def growth(self, name: str) -> tuple[float, float]:
        """Return by how much memory has grown since the second fifth: bytes, and a fraction."""
        samples = self.memory[name]
        fifth = len(samples) // 5
        if not fifth or not any(samples):
            return 0.0, 0.0
        before = statistics.median(samples[fifth : 2 * fifth])
        grown = statistics.median(samples[-fifth:]) - before
        return grown, grown / before

    def faults(self) -> list[str]:
        """Return what breaks a promise."""
        if self.seconds < SETTLED:
            return []
        grown = [(name, *self.growth(name)) for name in self.memory]
        return [
            f"{name} has grown by {size / 1e6:.1f} MB, {by:.1%}"
            for name, size, by in grown
            if by > DRIFT and size > SLACK
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.0f} s: {self.changes} changes, {self.calls:,} calls, "
            f"{self.passes:,} passes"
        ]
        for name, samples in self.memory.items():
            steps = samples[:: max(1, len(samples) // 10)]
            megabytes = " ".join(f"{each / 1e6:.1f}" for each in steps)
            lines.append(f"  {name:<8} {megabytes} MB; grown by {self.growth(name)[1]:+.1%}")
        return "\n".join(lines)


class OpenPage:
    """One run."""

    def __init__(self, cluster: ag.LocalCluster, looking: Viewer, seed: int) -> None:
        self._cluster, self._looking, self._random = cluster, looking, random.Random(seed)
        self.report: Report = Report(0.0)

    async def run(self, seconds: float, every: float) -> Report:
        """Work, change and look for so long."""
        began = time.monotonic()
        working = [asyncio.create_task(self._call()), asyncio.create_task(self._pass())]
        try:
            while time.monotonic() - began < seconds:
                await self._change()
                await self._looking.look_around()
                await self._sample()
                done, _ = await asyncio.wait(working, timeout=every)
                for task in done:
                    await task  # nothing that is done with worker0 may fail
        finally:
            for task in working:
                task.cancel()
            await asyncio.wait(working)
        self.report.seconds = time.monotonic() - began
        return self.report

    async def _call(self) -> None:
        while True:
            kept = [ag.remote("worker0", ag.zeros, args=(1000,)) for _ in range(10)]
            await asyncio.gather(*(ag.rpc_async("worker0", abs, args=(-i,)) for i in range(50)))
            await asyncio.gather(*kept)
            self.report.calls += 60
            await asyncio.sleep(0.1)

    async def _pass(self) -> None:
        w = ag.ones(100, requires_grad=True)
        while True:
            async with ag.context() as ctx:
                await ctx.backward(await ag.rpc_async("worker0", squares, args=(w,)))
            self.report.passes += 1
            await asyncio.sleep(0.05)

    async def _change(self) -> None:
        cluster, count = self._cluster, len(self._cluster)
        changes: list[Callable[[], Awaitable[None]]] = [self._kill_and_restart]
        if count > 2:
            changes.append(lambda: cluster.scale(count - 1))
        if count < MOST:
            changes.append(lambda: cluster.scale(count + 1))
        await self._random.choice(changes)()
        everybody = len(cluster) + 1
        await self._looking.sees(everybody, everybody)
        self.report.changes += 1

    async def _kill_and_restart(self) -> None:
        name = self._random.choice([each.name for each in self._cluster if each.rank])
        await self._cluster.kill(name)
        await self._looking.sees(len(self._cluster) + 1, len(self._cluster))
        await self._cluster.restart(name)

    async def _sample(self) -> None:
        found = {
            "server": held(),
            "worker0": await ag.rpc_async("worker0", held),
            "page": await self._looking.heap(),
        }
        for name, size in found.items():
            self.report.memory.setdefault(name, []).append(size)


async def keep_open(seconds: float, every: float, browser: bool, seed: int = 0) -> Report:
    """Keep a page open for some seconds; return what was seen."""
    async with (
        ag.LocalCluster(3, dashboard=True) as cluster,
        viewer(cluster.dashboard.url, browser) as looking,
    ):
        return await OpenPage(cluster, looking, seed).run(seconds, every)


def main(arguments: Sequence[str]) -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", action="store_true", help="without a browser")
    given = parser.parse_args(arguments)
    if MISSING:
        print(f"only the events are looked at, not the page: {MISSING}")
    browser = not (MISSING or given.events)
    report = asyncio.run(keep_open(given.seconds, given.every, browser, given.seed))
    print(report)
    faults = report.faults()
    print("\n".join(faults) if faults else "nothing has grown")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
