"""Many worker processes for the price of one: a nursery loads the library once and forks them.

Loading numpy and the library takes most of a worker's start. So one fresh process does it, before
it has threads, loops or connections that would not survive a fork, and then makes the workers:

    driver ──exec──▶ nursery ──fork──▶ worker0, worker1, …

It stays, so that later workers start in a moment, too. The driver makes the pipes of each worker
and sends them along. What a worker must know, and with it the secret, goes through the worker's own
input, which stays open as its lifeline. The nursery only reports who started and who ended, and
ends after the last of them. Its other end is `nurse.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import marshal
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

from aiograd.cluster.config import Plan
from aiograd.cluster.processes.spawn import (
    ONE_THREAD,
    Child,
    Log,
    Output,
    forward,
    python,
    worker_environment,
)
from aiograd.rpc.affinity import close_in_children

__all__ = ["ForkedHost", "Nursery", "can_fork"]

LAST_WORDS = 1.0  # seconds to end in, once its workers have

BOOT = (
    "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from aiograd.cluster.processes.forkserver_main import nurse; nurse()"
)


def can_fork() -> bool:
    """Whether a nursery is safe here: array libraries with threads of their own are not forked."""
    environment = worker_environment(os.environ)
    if sys.platform != "linux" or any(environment[name] != "1" for name in ONE_THREAD):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False  # an old kernel, or one that hides it
    return True


class Nursery:
    """The driver's end of a nursery: starts it, asks it for workers, hears what becomes of them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hosts: dict[int, ForkedHost] = {}  # those that have not ended, by number
        self._numbers = itertools.count()
        self._environment = worker_environment(os.environ)
        # Packets: one message each, with the pipes of a worker as their freight.
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            self._child = Child(
                "nursery",
                python("-c", BOOT, "aiograd-nursery", str(theirs.fileno())),
                self._environment,
                self._heard,
                told=marshal.dumps(sys.path),
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        close_in_children(self)
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._read)
        self._child.exited.add_done_callback(self._over)

    @property
    def open(self) -> bool:
        """Whether it can make more workers."""
        return self._control.fileno() >= 0 and not self._child.exited.done()

    def descriptors(self) -> list[int]:
        """What is open here for the nursery, besides the pipes of its process."""
        return [self._control.fileno()]

    def make(self, plans: Sequence[Plan]) -> list[ForkedHost]:
        """Ask for workers; they start in the surroundings that this process has now."""
        environment: dict[str, str] | None = worker_environment(os.environ)
        if environment == self._environment:
            environment = None  # the nursery's own
        surroundings = marshal.dumps((sys.path, os.getcwd(), environment))
        made = []
        for plan in plans:
            host = ForkedHost(plan, self)
            number = next(self._numbers)
            self._hosts[number] = host
            socket.send_fds(self._control, [str(number).encode()], host.pipes)
            for each in host.pipes:
                os.close(each)
            host.tell(surroundings + pickle.dumps(plan))
            made.append(host)
        return made

    def give_up(self) -> None:
        """End the nursery if nobody wants what it has yet to make."""
        left = [host for host in self._hosts.values() if not host.ended.done()]
        if all(host.doomed for host in left) and any(host.pid is None for host in left):
            self._child.signal()

    async def close(self) -> None:
        """Let it end; it does so after its workers."""
        self._hang_up()
        if not self._child.exited.done():
            await asyncio.wait([self._child.exited], timeout=LAST_WORDS)
            self._child.signal()
            await self._child.wait()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _heard(self, stream: str, line: str) -> None:
        # It has something to say only when it fails, and then that is why no worker starts.
        for host in self._hosts.values():
            if host.pid is None:
                host.log.add(line)
        forward("nursery", stream, line)

    def _read(self) -> None:
        try:
            while message := self._control.recv(64):
                what, host, number = message.split()
                if what == b"start":
                    self._hosts[int(host)].started(int(number))
                else:
                    self._hosts.pop(int(host)).finished(int(number))
        except BlockingIOError:
            return
        except OSError:
            pass  # it was killed; its exit is noticed
        self._hang_up()

    def _hang_up(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()

    def _over(self, exited: asyncio.Future[int]) -> None:
        if self._control.fileno() >= 0:
            self._read()
            self._hang_up()
        for host in self._hosts.values():
            host.orphaned(exited.result())


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
        close_in_children(self)  # a fork that keeps the lifeline would keep the worker alive

    def descriptors(self) -> list[int]:
        """What is open here for the worker."""
        handles = [each for each in (self._lifeline, self._handle) if each is not None]
        return [*handles, *(output.descriptor for output in self._outputs)]

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
