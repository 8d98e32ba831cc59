"""Where a worker of a `LocalCluster` lives: in a process of its own, or in this loop.

Both kinds look the same to the cluster: started at once, ended in `ended`, killed without a word.
"""

from __future__ import annotations

import asyncio
import contextvars
import marshal
import os
import pickle
import sys
from functools import partial
from typing import Protocol

from aiograd.cluster.children import Child, Log, forward, python, worker_environment
from aiograd.cluster.plan import Plan
from aiograd.cluster.worker import Worker


class Host(Protocol):
    """One run of one worker."""

    plan: Plan
    log: Log
    pid: int | None
    ended: asyncio.Future[int]  # with the exit code, when nothing of it is left

    def kill(self) -> None:
        """End it without giving it a chance to say anything."""


# The path comes first, and by the one format that needs no import: without it there is no aiograd.
BOOT = (
    "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from aiograd.cluster.process import main; main()"
)


class ProcessHost:
    """A worker in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._child = Child(
            plan.name,
            python("-c", BOOT, f"aiograd-{plan.name}"),
            worker_environment(os.environ),
            partial(forward, plan.name),
            told=marshal.dumps(sys.path) + pickle.dumps(plan),
        )
        self.log, self.ended = self._child.log, self._child.exited
        self.pid: int | None = self._child.pid

    def kill(self) -> None:
        self._child.signal()


class LoopHost:
    """A worker in this loop; what it prints, this process prints."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log = Log()
        self.pid: int | None = None
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        # A context of its own: the driver is current in this one, not this worker.
        self._task = loop.create_task(self._serve(), context=contextvars.Context())
        self._task.add_done_callback(self._done)

    async def _serve(self) -> None:
        worker = Worker.planned(self.plan)
        await worker.start()
        await worker.serve()

    def _done(self, task: asyncio.Task[None]) -> None:
        code = 0
        if task.cancelled():
            code = 1
        elif (error := task.exception()) is not None:
            self.log.add(f"{type(error).__name__}: {error}")
            code = 1
        if not self.ended.done():
            self.ended.set_result(code)

    def kill(self) -> None:
        self._task.cancel()
