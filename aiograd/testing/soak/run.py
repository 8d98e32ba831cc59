"""One soak: actors that do jobs, a killer, a look at memory, and the report of it all.

Soak.run    actors do one job after the other; one worker after the other is killed
Soak.rest   everything is released, and every counter of every worker becomes 0
Report      what was seen, and what of it breaks a promise
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any

from aiograd.cluster.api import debug_info
from aiograd.cluster.local import LocalCluster
from aiograd.errors import AiogradError
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options
from aiograd.rref import RRef
from aiograd.testing.soak.jobs import JOBS, Wrong

LATE = 4 * 0.25  # seconds past a deadline: four times what is promised, for a busy machine
DRIFT = 0.05  # by how much memory may have grown at the end
SETTLED = 300.0  # seconds; in a shorter run memory is still finding its level
TIMEOUT = 10.0  # seconds for a call that says nothing else
HANG = 3 * TIMEOUT  # seconds after which something will not end by itself
AFTERMATH = 3.0  # seconds after a restart in which its loss may still be told
REST = 5.0  # seconds beyond the lease after which nothing may be left
SHELF = 50  # references kept for later
PULSE = 0.02  # seconds between two looks whether this thread is given a core
SAMPLE = 5.0  # seconds between two looks at memory


def held() -> int:
    """Return the bytes of memory that this process uses; 0 where that cannot be known."""
    # Without what glibc keeps for the next arrays: how much that is depends on the order in which
    # arrays came and went, and hides a leak of some MiB.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # another system
        return 0


@dataclass
class Report:
    """The figures of one soak."""

    seconds: float
    workers: int
    seed: int
    jobs: Counter[str] = field(default_factory=Counter)
    calls: int = 0  # made by this process; workers make more of their own
    kills: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # typed, and explained by a kill
    unexplained: Counter[str] = field(default_factory=Counter)  # no worker was killed at that time
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    starved: float = 0.0  # seconds in which the machine had no core for us; no call is late in them
    memory: dict[str, list[int]] = field(default_factory=dict)  # of those that were never killed
    left: dict[str, dict[str, int]] = field(default_factory=dict)  # counters that are not 0
    resting: float = 0.0  # seconds until all counters were 0
    closing: float = 0.0  # seconds until all processes had ended

    def drift(self, name: str) -> float:
        """Return by how much memory has grown since the warm-up, as a fraction."""
        samples = [each for each in self.memory[name] if each]
        if len(samples) < 10:
            return 0.0
        # Medians of the second and the last fifth: the first is warm-up, and a single sample says
        # more about the arrays of that moment than about a leak.
        fifth = len(samples) // 5
        before, after = samples[fifth : 2 * fifth], samples[-fifth:]
        return statistics.median(after) / statistics.median(before) - 1.0

    def faults(self) -> list[str]:
        """List everything that breaks a promise; empty when all is well."""
        found = [f"wrong: {each}" for each in self.wrong]
        found += [f"late: {each}" for each in self.late]
        found += [
            f"{count} × {kind}, but no worker was killed"
            for kind, count in self.unexplained.items()
        ]
        found += [f"{name} is not at rest: {counters}" for name, counters in self.left.items()]
        if self.seconds >= SETTLED:
            found += [
                f"{name} has grown by {self.drift(name):.1%}"
                for name in self.memory
                if self.drift(name) > DRIFT
            ]
        return found

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            """The counts, largest first."""
            return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "none"

        def megabytes(name: str) -> str:
            """How the memory of one process went, in ten steps."""
            samples = self.memory[name]
            steps = [samples[(len(samples) - 1) * tenth // 10] for tenth in range(11)]
            levels = " ".join(f"{step / 2**20:.0f}" for step in steps)
            return f"{name} {levels} MiB ({self.drift(name):+.1%} after warm-up)"

        lines = {
            "soak": f"{self.seconds:g} s, {self.workers} workers, seed {self.seed}",
            "calls": f"{self.calls:,} ({self.calls / self.seconds:,.0f} per second)",
            "jobs": listed(self.jobs),
            "kills": f"{self.kills}",
            "errors": f"{listed(self.errors)}; without a kill: {listed(self.unexplained)}",
            "wrong": f"{len(self.wrong)}",
            "late": f"{len(self.late)} (without {self.starved:.1f} s in which there was no core)",
            "memory": "; ".join(map(megabytes, self.memory)),
            "at rest": f"after {self.resting:.1f} s" if not self.left else f"never: {self.left}",
            "closed": f"in {self.closing:.1f} s",
        }
        text = "\n".join(f"{name:<9}{value}" for name, value in lines.items())
        faults = self.faults()
        return text + "\n" + ("\n".join(f"FAULT    {each}" for each in faults[:20]) or "all well")


class Soak:
    """One soak under way: the `Site` of its jobs."""

    cluster: LocalCluster
    report: Report

    def __init__(self, cluster: LocalCluster, report: Report, actors: int, every: float) -> None:
        self.cluster, self.report = cluster, report
        self.names: list[str] = [worker.name for worker in cluster.workers]
        self.shelf: list[tuple[RRef[Any], float]] = []
        self._loop = asyncio.get_running_loop()
        self._actors, self._every = actors, every
        self._killing = False
        self._quiet_since = 0.0  # loop time of the last restart

    async def run(self) -> None:
        """Let actors, killer and observers work until the time is over."""
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
                # An untyped error breaks a promise, whatever was killed.
                self.report.wrong.append(f"{job.__name__} raised {error!r}")
            # The oldest go: memory has to stay level for hours.
            del self.shelf[:-SHELF]

    async def within(self, seconds: float | None, work: Awaitable[Any]) -> Any:
        """Await something that has so many seconds; note it as late if it takes longer."""
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
            # If the machine held up both, `_feel_the_pulse` has to note that before we judge.
            await asyncio.sleep(0)
            took = self._loop.time() - began - (self.report.starved - starved)
            if took > seconds + LATE:
                self.report.late.append(f"{took:.2f} s instead of {seconds:g}: {work!r:.100}")

    def _note(self, error: AiogradError, began: float) -> None:
        # A job that began before the restart may have met the killed worker.
        explained = self._killing or began <= self._quiet_since + AFTERMATH
        found = self.report.errors if explained else self.report.unexplained
        found[type(error).__name__] += 1

    # ── killing ─────────────────────────────────────────────────────────────────────────────────

    async def _kill(self, source: random.Random, end: float) -> None:
        """Kill one worker after the other, never the first, whose memory is watched."""
        while True:
            # Not in step with anything that the jobs do.
            pause = self._every * source.uniform(0.9, 1.1)
            if self._loop.time() + pause >= end:
                return
            await asyncio.sleep(pause)
            name = source.choice(self.names[1:])
            self._killing = True
            # Errors are explained from before the kill until some time after the restart.
            await self.cluster.kill(name)
            self.report.kills += 1
            await asyncio.sleep(source.uniform(0.0, 0.5))
            await self.cluster.restart(name)
            self._killing, self._quiet_since = False, self._loop.time()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────

    async def _look(self, end: float) -> None:
        first, memory = self.names[0], self.report.memory  # the first is never killed
        while self._loop.time() < end:
            memory.setdefault("driver", []).append(held())
            memory.setdefault(first, []).append(await rpc_async(first, held))
            await asyncio.sleep(min(SAMPLE, max(0.0, end - self._loop.time())))

    async def _feel_the_pulse(self, end: float) -> None:
        """Note for how long the machine gave this thread no core: no call can be in time then.

        Only time that was neither slept nor worked counts: if the library itself blocks the loop,
        calls are late.
        """
        while self._loop.time() < end:
            due, worked = self._loop.time() + PULSE, time.thread_time()
            await asyncio.sleep(PULSE)
            held = self._loop.time() - due - (time.thread_time() - worked)
            self.report.starved += max(0.0, held)

    async def rest(self) -> None:
        """Release everything, and wait until every counter of every worker is 0."""
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
        """Read the counters that are not 0, by worker."""
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
    """Let workers work for some seconds, kill one `every` so many seconds, and report.

    Raise ValueError for fewer than 4 workers.
    """
    if workers < 4:
        raise ValueError("a soak takes 4 workers or more: passes cross three, and one is killed")
    # A timeout of our own: `within` has to know when a call is late.
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
