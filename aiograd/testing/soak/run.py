"""Actors, a killer, and the end of a soak."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from aiograd.cluster.api import debug_info
from aiograd.cluster.local import LocalCluster
from aiograd.errors import AiogradError
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options
from aiograd.rref import RRef
from aiograd.testing.soak.jobs import JOBS, Wrong
from aiograd.testing.soak.report import LATE, Report, held

TIMEOUT = 10.0  # seconds for a call that says nothing else
HANG = 3 * TIMEOUT  # seconds after which something will not end by itself
AFTERMATH = 3.0  # seconds after a restart in which its loss may still be told
REST = 5.0  # seconds beyond the lease after which nothing may be left
SHELF = 50  # references kept for later
PULSE = 0.02  # seconds between two looks whether this thread is given a core
SAMPLE = 5.0  # seconds between two looks at memory


class Soak:
    """One run: the site of its jobs."""

    def __init__(self, cluster: LocalCluster, report: Report, actors: int, every: float) -> None:
        self.cluster, self.report = cluster, report
        self.names = [worker.name for worker in cluster.workers]
        self.shelf: list[tuple[RRef, float]] = []
        self._loop = asyncio.get_running_loop()
        self._actors, self._every = actors, every
        self._killing = False
        self._quiet_since = 0.0  # loop time of the last restart

    async def run(self) -> None:
        seed, end = self.report.seed, self._loop.time() + self.report.seconds
        before = self.cluster.driver.agent.started
        async with asyncio.TaskGroup() as group:
            for number in range(self._actors):
                group.create_task(self._act(random.Random(f"{seed} actor {number}"), end))
            group.create_task(self._kill(random.Random(f"{seed} killer"), end))
            group.create_task(self._look(end))
            group.create_task(self._feel_the_pulse(end))
        self.report.calls = self.cluster.driver.agent.started - before

    # ── doing jobs ──────────────────────────────────────────────────────────────────────────────

    async def _act(self, source: random.Random, end: float) -> None:
        jobs, weights = list(JOBS), list(JOBS.values())
        while self._loop.time() < end:
            (job,) = source.choices(jobs, weights)
            self.report.jobs[job.__name__] += 1
            began = self._loop.time()
            try:
                await job(self, source)
            except Wrong as error:
                self.report.wrong.append(str(error))
            except AiogradError as error:
                self._note(error, began)
            except Exception as error:
                self.report.wrong.append(f"{job.__name__} raised {error!r}")
            del self.shelf[:-SHELF]

    async def within(self, seconds: float | None, work: Awaitable[Any]) -> Any:
        """Await something that has so many seconds, and note if it took longer."""
        seconds = TIMEOUT if seconds is None else seconds
        began, starved = self._loop.time(), self.report.starved
        try:
            async with asyncio.timeout(HANG) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise Wrong(f"no end after {HANG:g} s: {work!r}") from None
            raise
        finally:
            await asyncio.sleep(0)  # the pulse comes first, if both were held up
            took = self._loop.time() - began - (self.report.starved - starved)
            if took > seconds + LATE:
                self.report.late.append(f"{took:.2f} s instead of {seconds:g}: {work!r:.100}")

    def _note(self, error: AiogradError, began: float) -> None:
        explained = self._killing or began <= self._quiet_since + AFTERMATH
        found = self.report.errors if explained else self.report.unexplained
        found[type(error).__name__] += 1

    # ── killing ─────────────────────────────────────────────────────────────────────────────────

    async def _kill(self, source: random.Random, end: float) -> None:
        """Kill one after the other, never the first: somebody's memory must be watched."""
        while True:
            pause = self._every * source.uniform(0.9, 1.1)
            if self._loop.time() + pause >= end:
                return
            await asyncio.sleep(pause)
            name = source.choice(self.names[1:])
            self._killing = True
            await self.cluster.kill(name)
            self.report.kills += 1
            await asyncio.sleep(source.uniform(0.0, 0.5))
            await self.cluster.restart(name)
            self._killing, self._quiet_since = False, self._loop.time()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────

    async def _look(self, end: float) -> None:
        first, memory = self.names[0], self.report.memory  # which is never killed
        while self._loop.time() < end:
            memory.setdefault("driver", []).append(held())
            memory.setdefault(first, []).append(await rpc_async(first, held))
            await asyncio.sleep(min(SAMPLE, max(0.0, end - self._loop.time())))

    async def _feel_the_pulse(self, end: float) -> None:
        """Note for how long the machine gave this thread no core: nobody can be in time then.

        Only what was neither slept nor worked counts, so a loop that we hold ourselves is late."""
        while self._loop.time() < end:
            due, worked = self._loop.time() + PULSE, time.thread_time()
            await asyncio.sleep(PULSE)
            held = self._loop.time() - due - (time.thread_time() - worked)
            self.report.starved += max(0.0, held)

    async def rest(self) -> None:
        """Let go of everything, and wait until every counter of every worker is 0."""
        self.shelf.clear()
        gc.collect()
        began = self._loop.time()
        patience = self.cluster.driver.options.lease + REST
        while True:
            self.report.left = await self._counters()
            self.report.resting = self._loop.time() - began
            if not self.report.left or self.report.resting > patience:
                return
            await asyncio.sleep(0.05)

    async def _counters(self) -> dict[str, dict[str, int]]:
        """The counters that are not 0, by worker."""
        everyone = {"driver": debug_info()}
        for name in self.names:
            everyone[name] = await rpc_async(name, debug_info)
        found = {
            name: {each: n for each, n in counters.items() if n and each != "workers"}
            for name, counters in everyone.items()
        }
        return {name: counters for name, counters in found.items() if counters}


async def soak(
    seconds: float,
    *,
    workers: int = 5,
    every: float = 12.0,
    actors: int = 8,
    seed: int = 0,
    options: Options | None = None,
) -> Report:
    """Let workers work for so long, kill one `every` so many seconds, and report."""
    if workers < 4:
        raise ValueError("a soak takes 4 workers or more: passes cross three, and one is killed")
    options = replace(options or Options(), timeout=TIMEOUT)
    report = Report(seconds, workers, seed)
    loop = asyncio.get_running_loop()
    cluster = LocalCluster(workers, options=options)
    async with cluster:
        site = Soak(cluster, report, actors, every)
        await site.run()
        await site.rest()
        ending = loop.time()
    report.closing = loop.time() - ending
    return report
