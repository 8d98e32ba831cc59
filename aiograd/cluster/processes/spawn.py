"""Child processes of a loop: started by exec, watched without signals, heard line by line.

What a child must know it is told over its standard input: neither arguments nor environment are
private. The pipe then stays open as a lifeline: when this process dies, however it dies, the child
reads the end of it. Children run in a session of their own, so that the interrupt key reaches only
the parent. What they run is the caller's business.

Where a worker of a `LocalCluster` lives: in a process of its own, or in this loop.

Both kinds look the same to the cluster: started at once, ended in `ended`, killed without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import marshal
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Protocol

from aiograd.cluster.config import Plan
from aiograd.cluster.worker import Worker
from aiograd.rpc.affinity import close_in_children

# One thread per array library: n workers with a pool of threads each would fight for the cores.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

LONGEST_LINE = 64 * 1024  # bytes; what has no line end for longer is cut, to be shown at all


class Lines:
    """Collects bytes in any pieces and gives back whole lines, as text without the line end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) >= LONGEST_LINE:
            lines.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return [_text(line) for line in lines]

    def end(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


class Log:
    """The last lines that a worker has written; a bounded memory."""

    def __init__(self, lines: int = 2000, characters: int = 1 << 20) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._characters, self._limit = 0, characters

    def add(self, line: str) -> None:
        if len(self._lines) == self._lines.maxlen:
            self._characters -= len(self._lines[0])
        self._lines.append(line)
        self._characters += len(line)
        while self._characters > self._limit and len(self._lines) > 1:
            self._characters -= len(self._lines.popleft())

    def tail(self, lines: int) -> str:
        return "\n".join(list(self._lines)[-lines:])

    def __str__(self) -> str:
        return "\n".join(self._lines)


class Output:
    """One pipe that a child writes to: read whenever there is something, to its end at the end."""

    def __init__(self, pipe: IO[bytes], heard: Callable[[str], None]) -> None:
        self._pipe, self._heard = pipe, heard
        self._lines = Lines()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        for line in self._lines.feed(data):
            self._heard(line)
        if not data:
            self._close()
        return bool(data)

    def finish(self) -> None:
        """Read what the process left, without waiting for others that hold the pipe open."""
        while not self._pipe.closed and self._read():
            pass
        self._close()

    @property
    def descriptor(self) -> int:
        return -1 if self._pipe.closed else self._pipe.fileno()

    def _close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            for line in self._lines.end():
                self._heard(line)
            self.ended.set_result(None)


class Child:
    """One child process; belongs to the loop it was started on.

    `exited` ends with the return code once the process is gone and all it wrote has been read.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        heard: Callable[[str, str], None],
        told: bytes = b"",
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the process. `heard(stream, line)` gets every line of "stdout" and "stderr".

        What it is `told` it can read from its standard input, which ends when this process does.
        """
        self.name = name
        self.log = Log()
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self.pid = self._process.pid
        self._handle = -1  # a pidfd, where there are such
        close_in_children(self)  # a fork that keeps the lifeline would keep the child alive
        self._watch_exit()
        self._outputs = [
            Output(getattr(self._process, stream), partial(self._heard, heard, stream))
            for stream in ("stdout", "stderr")
        ]
        self._tell(told)

    def descriptors(self) -> list[int]:
        """What is open here for the child."""
        process = self._process
        pipes = (process.stdin, process.stdout, process.stderr)
        return [self._handle, *(each.fileno() for each in pipes if each and not each.closed)]

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended: its number may be another's by then."""
        self._process.send_signal(number)

    def release(self) -> None:
        """Cut the lifeline: the child ends by itself, if it has not yet."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> int:
        """Wait for the end of the process; cancelling the wait leaves the process alone."""
        return await asyncio.shield(self.exited)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _heard(self, heard: Callable[[str, str], None], stream: str, line: str) -> None:
        self.log.add(line)
        heard(stream, line)

    def _tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        # A child that died at once is reported by its exit, with what it had to say.
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(self._process.stdin.fileno(), view) :]

    def _watch_exit(self) -> None:
        try:
            self._handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            # No such thing on this system: a thread waits, and ends with the process.
            name = f"aiograd-wait-{self.name}"
            threading.Thread(target=self._wait_in_thread, name=name, daemon=True).start()
            return

        def ended() -> None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1
            self._ended()

        self._loop.add_reader(self._handle, ended)

    def _wait_in_thread(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        code = self._process.wait()  # it has ended, so this only reaps
        self.release()
        for output in self._outputs:
            output.finish()
        if not self.exited.done():
            self.exited.set_result(code)


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Give a worker its parent's environment, with one thread per array library unless set.

    A secret stays out of it: other users of a host may read it there."""
    inherited = {name: value for name, value in environment.items() if name != "AIOGRAD_SECRET"}
    return {**dict.fromkeys(ONE_THREAD, "1"), **inherited}


def python(*arguments: str) -> list[str]:
    """Give the command for another interpreter like this one: -X dev, -W error, -O and the like."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *arguments]


def forward(name: str, stream: str, line: str) -> None:
    """Show a child's line where this process writes, with the child's name."""
    target = getattr(sys, stream)  # looked up each time: notebooks and tests replace it
    if target is None:
        return
    try:
        # In no context at all: a notebook would show it under the cell that started the child.
        contextvars.Context().run(target.write, f"[{name}] {line}\n")
    except (OSError, ValueError):
        return  # nobody reads any more; the log still has it


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
    "from aiograd.cluster.processes.worker_main import main; main()"
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
