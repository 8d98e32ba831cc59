"""Many worker processes for the price of one: a nursery loads the library once and forks them.

Loading numpy and the library takes most of a worker's start. So one fresh process does it, before
it has threads, loops or connections that would not survive a fork, and then makes the workers:

    driver ──exec──▶ nursery ──fork──▶ worker0, worker1, …

The driver makes the pipes of all workers. What a worker must know, and with it the secret, goes
through the worker's own input, which stays open as its lifeline. The nursery only reports who
started and who ended, and ends after the last of them. Its other end is `process.nurse`.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from functools import partial

from aiograd.cluster.children import (
    ONE_THREAD,
    Child,
    Log,
    Output,
    forward,
    python,
    worker_environment,
)
from aiograd.cluster.plan import Plan

__all__ = ["ForkedHost", "Nursery", "can_fork"]

BOOT = (
    "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from aiograd.cluster.process import nurse; nurse()"
)


def can_fork() -> bool:
    """Whether a nursery is safe here: array libraries with threads of their own are not forked."""
    environment = worker_environment(os.environ)
    return sys.platform == "linux" and all(environment[name] == "1" for name in ONE_THREAD)


class Nursery:
    """The driver's end of a nursery, with one host per worker."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.hosts = [ForkedHost(plan, self) for plan in plans]
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._codes: dict[int, int] = {}  # of those that have ended
        pipes = [each for host in self.hosts for each in host.pipes]
        ours, theirs = os.pipe()
        try:
            self._child = Child(
                "nursery",
                python("-c", BOOT, "aiograd-nursery", *map(str, (theirs, *pipes))),
                worker_environment(os.environ),
                self._heard,
                told=marshal.dumps(sys.path),
                pass_fds=(theirs, *pipes),
            )
        finally:
            for each in (theirs, *pipes):
                os.close(each)
        self._reports = Output(os.fdopen(ours, "rb", buffering=0), self._report)
        for host in self.hosts:
            host.tell(pickle.dumps(host.plan))
        self._child.exited.add_done_callback(self._over)

    def give_up(self) -> None:
        """End the nursery if nobody wants what it has yet to make."""
        if all(host.doomed for host in self.hosts) and not self.started.done():
            self._child.signal()

    def _heard(self, stream: str, line: str) -> None:
        # It has something to say only when it fails, and then that is why no worker starts.
        for host in self.hosts:
            host.log.add(line)
        forward("nursery", stream, line)

    def _report(self, line: str) -> None:
        what, host, number = line.split()
        if what == "start":
            self.hosts[int(host)].started(int(number))
            if all(host.pid is not None for host in self.hosts):
                self.started.set_result(None)
        else:
            self._codes[int(host)] = int(number)
            if len(self._codes) < len(self.hosts):
                self.hosts[int(host)].finished(int(number))

    def _over(self, exited: asyncio.Future[int]) -> None:
        self._reports.finish()
        for number, host in enumerate(self.hosts):
            if number in self._codes:
                host.finished(self._codes[number])  # the last one, whose end is the nursery's, too
            else:
                host.orphaned(exited.result())
        if not self.started.done():
            self.started.cancel()


class ForkedHost:
    """A worker in a process that a nursery forks."""

    def __init__(self, plan: Plan, nursery: Nursery) -> None:
        self.plan = plan
        self.log = Log()
        self.pid: int | None = None  # known when the nursery has made it
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.doomed = False  # killed, maybe before it was made
        self._nursery = nursery
        self._handle: int | None = None  # a pidfd: unlike a number, it never means another process
        self._lifeline: int | None
        read, self._lifeline = os.pipe()
        self.pipes = [read]  # the worker's ends
        self._outputs = []
        for stream in ("stdout", "stderr"):
            ours, theirs = os.pipe()
            self.pipes.append(theirs)
            pipe = os.fdopen(ours, "rb", buffering=0)
            self._outputs.append(Output(pipe, partial(self._heard, stream)))

    def tell(self, data: bytes) -> None:
        """Give the worker its plan, which is small: the pipe takes it at once."""
        assert self._lifeline is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, which is reported
            os.write(self._lifeline, data)

    def kill(self) -> None:
        self.doomed = True
        if self._handle is None:
            self._nursery.give_up()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    # ── what the nursery reports ────────────────────────────────────────────────────────────────

    def started(self, pid: int) -> None:
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)
        if self.doomed:
            self.kill()

    def finished(self, code: int) -> None:
        if self.ended.done():
            return
        for output in self._outputs:
            output.finish()
        self._cut_lifeline()
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None
        self.ended.set_result(code)

    def orphaned(self, code: int) -> None:
        """The nursery is gone without a word about this worker: if it was made, end it."""
        if self.ended.done():
            return
        self.kill()
        self._cut_lifeline()
        if self._handle is None:
            outputs = asyncio.gather(*(output.ended for output in self._outputs))
            outputs.add_done_callback(lambda _: self.finished(code))
        else:
            asyncio.get_running_loop().add_reader(self._handle, self.finished, code)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _heard(self, stream: str, line: str) -> None:
        self.log.add(line)
        forward(self.plan.name, stream, line)
