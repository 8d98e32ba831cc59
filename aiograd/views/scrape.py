"""Snapshots for threads that scrape: exporters ask from threads of their own, and often.

A worker's tables are read on its loop, so a scrape lets the loop do it and waits, for a bounded
time. A loop that does not answer in time is itself the most important number, and is told as such.
Workers count calls from the first scrape on, and for `rpc.observe.tally.LEASE` after the last one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from typing import Final

from aiograd.observe import Part
from aiograd.observe.snapshot import BLOCKED, Data, WorkerRow
from aiograd.rpc.agent import Agent, current_agent
from aiograd.views.numbers import Family, families

TIMEOUT: Final = 3.0  # seconds: more than `inspect` takes for workers that do not answer
_FRESH: Final = 0.5  # seconds for which several instruments share the numbers


class Scraper:
    """Takes snapshots of one worker, or of its whole cluster, from any thread but the loop's."""

    def __init__(self, agent: Agent | None = None, *, cluster: bool = False) -> None:
        self._agent = current_agent() if agent is None else agent
        self._cluster = cluster
        self._part: Part = self._agent.parts[Part]
        self._lock = threading.Lock()
        self._last: tuple[float, list[Family]] | None = None

    def families(self) -> list[Family]:
        """Return the numbers of a snapshot that is at most half a second old."""
        with self._lock:
            now = time.monotonic()
            if self._last is None or now - self._last[0] > _FRESH:
                self._last = now, families(self.snapshot())
            return self._last[1]

    def snapshot(self) -> Data:
        """Take a snapshot, in bounded time."""
        agent, inspector = self._agent, self._part.inspector
        if threading.get_ident() == agent.thread:  # in tests, and where a program prints its own
            return inspector.here(counting=True)
        if agent.closed:
            return Data(time.time(), agent.name)

        async def take() -> Data:
            if self._cluster:
                return await inspector.ask(None, counting=True)
            return inspector.here(counting=True)

        future = asyncio.run_coroutine_threadsafe(take(), agent.loop)
        try:
            found: Data = future.result(TIMEOUT)
            return found
        except concurrent.futures.TimeoutError:
            future.cancel()
            why = f"its event loop did not answer within {TIMEOUT:g} s"
            return Data(time.time(), agent.name, workers=[_blocked(agent, why)])
        except concurrent.futures.CancelledError:  # the worker was closed meanwhile
            return Data(time.time(), agent.name)


def _blocked(agent: Agent, why: str) -> WorkerRow:
    return WorkerRow(agent.name, agent.rank, BLOCKED, why)
