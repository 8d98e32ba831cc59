"""A fork server: loads numpy and the library once, then forks worker processes on request.

Imports take most of a worker's start. So one fresh process does them, before it has threads, loops
or connections that would not survive a fork, and then makes the workers:

    driver ──exec──▶ fork server ──fork──▶ worker0, worker1, …
       │                  ▲
       └── control ───────┘   SOCK_SEQPACKET: one packet, one message

    packet                      direction              carries
    number                      driver → fork server   the worker's ends of its three pipes
    start number pid            fork server → driver   the worker was forked
    exit number code            fork server → driver   the worker has ended

The fork server stays, so that later workers start quickly as well; it exits after the last of them.
The plan of a worker, and with it the secret, goes through the worker's own standard input, which
then stays open as its lifeline (`spawn.py`). The driver runs `ForkServer`; the child process runs
`serve_forks`, which has no loop, no thread and no user code, so that a fork of it is as good as a
fresh process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import marshal
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from aiograd.cluster.config import THREAD_VARIABLES, WorkerPlan
from aiograd.cluster.processes.spawn import (
    Child,
    OutputLog,
    OutputPipe,
    forward_lines,
    python_command,
    worker_environment,
)
from aiograd.cluster.processes.worker_main import main
from aiograd.rpc.affinity import close_in_children

__all__ = ["ForkServer", "ForkedWorker", "can_fork", "preloaded", "serve_forks"]

# Seconds for the fork server to exit after its last worker, before it is killed.
EXIT_GRACE = 1.0
MAX_PACKET = 64  # bytes; a word and two numbers

BOOT = (
    "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from aiograd.cluster.processes.forkserver import serve_forks; serve_forks()"
)
# Libraries that take long to import, and what of ours knows them: loaded once, before the fork, if
# the driver has loaded them. Else a worker loads one in a thread when its first tensor comes.
PRELOAD = {"torch": "aiograd.torch"}


# ── in the driver ───────────────────────────────────────────────────────────────────────────────


def can_fork() -> bool:
    """Tell whether a fork server is safe here.

    Not if an array library starts threads of its own on import: a fork would lose them.
    """
    environment = worker_environment(os.environ)
    if sys.platform != "linux" or any(environment[name] != "1" for name in THREAD_VARIABLES):
        return False
    # Both ends rely on pidfds: the server to wait for its workers, the driver to kill them.
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False  # an old kernel, or a sandbox that hides it
    return True


def preloaded() -> list[str]:
    """Return the modules that workers of this driver will probably need."""
    return [module for library, module in PRELOAD.items() if library in sys.modules]


class ForkServer:
    """The driver's end of a fork server: starts it, asks it for workers, reads their exits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, ForkedWorker] = {}  # those that have not ended, by number
        self._numbers = itertools.count()
        # The server keeps the environment of its start; workers that need another one are sent it.
        self._environment = worker_environment(os.environ)
        # Packets keep the boundaries of messages, and the descriptors that came with each.
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            self._child = Child(
                "forkserver",
                python_command(
                    "-c", BOOT, "aiograd-forkserver", str(theirs.fileno()), *preloaded()
                ),
                self._environment,
                self._take_lines,
                stdin=marshal.dumps(sys.path),
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        close_in_children(self)  # a fork that keeps the socket would keep the server waiting
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._read)
        self._child.exited.add_done_callback(self._exited)

    @property
    def open(self) -> bool:
        """Tell whether it can make more workers."""
        return self._control.fileno() >= 0 and not self._child.exited.done()

    def descriptors(self) -> list[int]:
        """List the descriptors that a fork of this process has to close, besides the child's."""
        return [self._control.fileno()]

    def fork_workers(self, plans: Sequence[WorkerPlan]) -> list[ForkedWorker]:
        """Request workers; they get the path, folder and environment that this process has now."""
        environment: dict[str, str] | None = worker_environment(os.environ)
        if environment == self._environment:
            environment = None  # the fork server's own
        surroundings = marshal.dumps((sys.path, os.getcwd(), environment))
        workers = []
        for plan in plans:
            worker = ForkedWorker(plan, self)
            number = next(self._numbers)
            self._workers[number] = worker
            socket.send_fds(self._control, [str(number).encode()], worker.pipes)
            # Ours are copies: an end that stays open here would hide the exit of the worker.
            for each in worker.pipes:
                os.close(each)
            # Written before the worker exists; the pipe holds it until it reads.
            worker.write(surroundings + pickle.dumps(plan))
            workers.append(worker)
        return workers

    def kill_if_unwanted(self) -> None:
        """Kill the fork server if all workers that it has yet to fork were killed already.

        They have no process to send a signal to, and it may be stuck before it forks them.
        """
        left = [worker for worker in self._workers.values() if not worker.ended.done()]
        if all(worker.killed for worker in left) and any(worker.pid is None for worker in left):
            self._child.kill()

    async def close(self) -> None:
        """Wait until it has exited, which it does after its workers; kill it after a second."""
        self._close_control()
        if not self._child.exited.done():
            # The closed socket is the request to exit.
            await asyncio.wait([self._child.exited], timeout=EXIT_GRACE)
            self._child.kill()
            await self._child.wait()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _take_lines(self, stream: str, lines: list[str]) -> None:
        # It writes only when it fails, which is then the reason why no worker starts.
        for worker in self._workers.values():
            if worker.pid is None:
                for line in lines:
                    worker.log.add(line)
        forward_lines("forkserver", stream, lines)

    def _read(self) -> None:
        try:
            while message := self._control.recv(MAX_PACKET):
                kind, worker, number = message.split()
                if kind == b"start":
                    self._workers[int(worker)].started(int(number))
                else:
                    self._workers.pop(int(worker)).finished(int(number))
        except BlockingIOError:
            return
        except OSError:
            pass  # the fork server was killed; `_exited` follows
        self._close_control()

    def _close_control(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()

    def _exited(self, exited: asyncio.Future[int]) -> None:
        if self._control.fileno() >= 0:
            self._read()  # the exits that it reported before its own
            self._close_control()
        for worker in self._workers.values():
            worker.orphaned(exited.result())


class ForkedWorker:
    """A worker in a process that a fork server makes."""

    def __init__(self, plan: WorkerPlan, server: ForkServer) -> None:
        self.plan = plan
        self.log: OutputLog = OutputLog()
        self.pid: int | None = None  # known when it was forked
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.killed: bool = False  # perhaps before it was forked
        self._server = server
        self._pidfd: int | None = None  # unlike a pid, it never refers to another process
        self._lifeline: int | None
        read, self._lifeline = os.pipe()
        self.pipes: list[int] = [read]  # the worker's ends
        self._outputs = []
        for stream in ("stdout", "stderr"):
            ours, theirs = os.pipe()
            self.pipes.append(theirs)
            pipe = os.fdopen(ours, "rb", buffering=0)
            self._outputs.append(OutputPipe(pipe, partial(self._take_lines, stream)))
        close_in_children(self)  # a fork that keeps the lifeline would keep the worker alive

    def descriptors(self) -> list[int]:
        """List the descriptors that a fork of this process has to close."""
        handles = [each for each in (self._lifeline, self._pidfd) if each is not None]
        return [*handles, *(output.descriptor for output in self._outputs)]

    def write(self, data: bytes) -> None:
        """Write to the worker's standard input; small data, which the pipe takes at once."""
        assert self._lifeline is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, which is reported
            os.write(self._lifeline, data)

    def kill(self) -> None:
        """Send SIGKILL, at once or when the worker has been forked."""
        self.killed = True
        if self._pidfd is None:
            self._server.kill_if_unwanted()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    # ── reports of the fork server ──────────────────────────────────────────────────────────────

    def started(self, pid: int) -> None:
        """Take note of the process."""
        self.pid = pid
        # It may have ended and been reaped by now; then its exit is the next message.
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)
        if self.killed:
            self.kill()

    def finished(self, code: int) -> None:
        """Take note of the exit: read the last output, close the pipes, set `ended`."""
        if self.ended.done():  # it was orphaned before its exit was read
            return
        # First the output: `ended` promises that the log is complete.
        for output in self._outputs:
            output.finish()
        self._close_lifeline()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.ended.set_result(code)

    def orphaned(self, code: int) -> None:
        """Kill the worker, if it was forked: its fork server has exited without reporting it."""
        if self.ended.done():
            return
        # The workers of a fork server that was killed are children of init: their exit codes are
        # lost, and no one reports them. So they are ended, and the cluster may restart them.
        self.kill()
        self._close_lifeline()
        if self._pidfd is None:
            # Forked or not, unknown: if it was, it holds the other ends of these pipes, and reads
            # the end of its lifeline.
            outputs = asyncio.gather(*(output.ended for output in self._outputs))
            outputs.add_done_callback(lambda _: self.finished(code))
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self.finished, code)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _take_lines(self, stream: str, lines: list[str]) -> None:
        for line in lines:
            self.log.add(line)
        forward_lines(self.plan.name, stream, lines)


# ── in the fork server ──────────────────────────────────────────────────────────────────────────


def serve_forks() -> NoReturn:
    """Serve the driver at the socket named on the command line: one packet, one worker.

    The rest of the command line are modules to load before the first fork.
    """
    control = socket.socket(fileno=int(sys.argv[2]))
    for module in sys.argv[3:]:
        with contextlib.suppress(ImportError):  # a worker that needs it says what is missing
            importlib.import_module(module)
    gc.collect()  # garbage would be frozen, too
    # A collection in a worker would write to, and so copy, the pages that they share.
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    # Until the driver has closed the socket and the last worker is reaped.
    while selector.get_map():
        for key, _ in selector.select():
            if key.fileobj is not control:
                _reap(control, selector, key)
                continue
            number, pipes, _, _ = socket.recv_fds(control, MAX_PACKET, 3)
            if number:
                _fork(control, selector, int(number), pipes)
            else:  # the driver is done, or gone; the workers have lifelines of their own
                selector.unregister(control)
    os._exit(0)


def _fork(
    control: socket.socket, selector: selectors.BaseSelector, number: int, pipes: list[int]
) -> None:
    pid = os.fork()
    if pid == 0:
        # The control socket, and pidfds of workers forked earlier.
        inherited = [key.fd for key in selector.get_map().values()]
        selector.close()
        _become_worker(pipes, inherited)
    # Else later forks inherit them, and a pipe never ends while one of these lives.
    for each in pipes:
        os.close(each)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (number, pid))
    _send(control, f"start {number} {pid}")


def _reap(
    control: socket.socket, selector: selectors.BaseSelector, key: selectors.SelectorKey
) -> None:
    number, pid = key.data
    _, status = os.waitpid(pid, 0)
    selector.unregister(key.fd)
    os.close(key.fd)
    _send(control, f"exit {number} {os.waitstatus_to_exitcode(status)}")


def _send(control: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):  # the driver is gone
        control.send(message.encode())


def _become_worker(pipes: list[int], inherited: list[int]) -> NoReturn:
    """Turn a fork into a worker, with its own session, streams, environment and random numbers."""
    try:
        os.setsid()  # the interrupt key must reach the driver only
        for standard, each in enumerate(pipes):
            os.dup2(each, standard)
        # A copy of the control socket would hide the end of the fork server from the driver.
        for each in (*pipes, *inherited):
            os.close(each)
        # Before `main` unpickles the plan: that may import modules from the user's path.
        path, folder, environment = marshal.load(sys.stdin.buffer)
        sys.path[:] = path
        os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        np.random.seed()  # forks of one process would all draw the same numbers
        main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Never back into the loop of the fork server, which would then serve the driver twice.
        os._exit(1)
