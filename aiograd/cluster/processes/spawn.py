"""Child processes of an event loop: started by exec, watched without signals, read line by line.

What a child needs to know goes through its standard input: neither arguments nor environment are
private. The pipe then stays open as a lifeline: when this process dies, however it dies, the child
reads the end of it. Children run in a session of their own, so that the interrupt key reaches only
the parent. What they run is up to the caller.

    Child           one process: pipes, exit code, log
    SpawnedWorker   a `Child` that runs `worker_main.main`
    OutputPipe ──▶ LineSplitter ──▶ OutputLog, forward_lines
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
from typing import IO

from aiograd.cluster.config import THREAD_VARIABLES, WorkerPlan
from aiograd.rpc.affinity import close_in_children

__all__ = [
    "Child",
    "LineSplitter",
    "OutputLog",
    "OutputPipe",
    "SpawnedWorker",
    "describe_exit",
    "forward_lines",
    "plan_bytes",
    "python_command",
    "worker_environment",
]

MAX_LINE = 64 * 1024  # bytes; output without a line end is cut there, to be shown at all

# The path comes first, and by marshal, the one format that needs no import of ours: without the
# path, aiograd may not be found.
BOOT = (
    "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from aiograd.cluster.processes.worker_main import main; main()"
)


# ── output ──────────────────────────────────────────────────────────────────────────────────────


class LineSplitter:
    """Assembles lines from bytes that arrive in any pieces; gives text without the line end.

    A carriage return begins the line again, as on a terminal: of a progress bar that is drawn over
    and over, the last state is the line.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; gives the lines that they complete."""
        *lines, rest = (self._rest + data).split(b"\n")
        # Only the last state is kept: a bar that is drawn for hours must not fill the memory.
        self._rest = _overwritten(rest) if b"\r" in rest else rest
        # Bounded: a process that writes no line end at all must not fill the driver's memory.
        while len(self._rest) >= MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return [_decode(line) for line in lines]

    def end(self) -> list[str]:
        """Give what is left of a line that never ended."""
        rest, self._rest = self._rest, b""
        # A bar that clears itself at its end leaves blanks, and no line.
        return [_decode(rest)] if rest and not (b"\r" in rest and rest.isspace()) else []


def _decode(line: bytes) -> str:
    if b"\r" in line:
        line = _overwritten(line).removesuffix(b"\r")
    return line.decode("utf-8", "replace")


def _overwritten(line: bytes) -> bytes:
    """Give what is left of a line after its carriage returns, with one at its end if it has any."""
    text = line.rstrip(b"\r")
    # The one at the end stays: whether "\n" or another state follows it is not known yet.
    return text[text.rfind(b"\r") + 1 :] + line[len(text) : len(text) + 1]


class OutputLog:
    """The last lines that a worker has written, in bounded memory."""

    def __init__(self, lines: int = 2000, characters: int = 1 << 20) -> None:
        self.count: int = 0  # lines so far
        self._lines: deque[str] = deque(maxlen=lines)
        self._characters, self._limit = 0, characters

    def add(self, line: str) -> None:
        """Append a line; the oldest lines are dropped beyond the limits."""
        if len(self._lines) == self._lines.maxlen:
            self._characters -= len(self._lines[0])  # `append` is about to drop it
        self.count += 1
        self._lines.append(line)
        self._characters += len(line)
        while self._characters > self._limit and len(self._lines) > 1:
            self._characters -= len(self._lines.popleft())

    def since(self, count: int) -> list[str]:
        """List the lines after the first `count` ones, as far as they are kept."""
        return list(self._lines)[-(self.count - count) :] if count < self.count else []

    def tail(self, lines: int) -> str:
        """Give the last `lines` lines."""
        return "\n".join(list(self._lines)[-lines:])

    def __str__(self) -> str:
        return "\n".join(self._lines)


class OutputPipe:
    """One pipe that a child writes to; the lines of each read go to `on_lines`, on the loop."""

    def __init__(self, pipe: IO[bytes], on_lines: Callable[[list[str]], None]) -> None:
        self._pipe, self._on_lines = pipe, on_lines
        self._lines = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # A reader callback and not a transport: `finish` has to read synchronously at the end.
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    @property
    def descriptor(self) -> int:
        """The open file descriptor; -1 if it is closed."""
        return -1 if self._pipe.closed else self._pipe.fileno()

    def finish(self) -> None:
        """Read what the process left, and close.

        Does not wait for the end of the pipe: a process that the child forked may hold it open.
        """
        while not self._pipe.closed and self._read():
            pass
        self._close()

    def _read(self) -> bool:
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if lines := self._lines.feed(data):
            self._on_lines(lines)
        if not data:
            self._close()
        return bool(data)

    def _close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            if lines := self._lines.end():
                self._on_lines(lines)
            self.ended.set_result(None)


def forward_lines(name: str, stream: str, lines: Sequence[str]) -> None:
    """Write a child's lines to this process's `stream`, each prefixed by the child's name."""
    target = getattr(sys, stream)  # looked up each time: notebooks and tests replace it
    if target is None:  # as in a process without a console
        return
    try:
        # In an empty context: a notebook would show it under the cell that started the child.
        contextvars.Context().run(target.write, "".join(f"[{name}] {each}\n" for each in lines))
        # Else a pipe (`python train.py | tee log`) shows them when this process ends. Once for all
        # lines of a read: a flush costs a system call, and in a notebook a switch of threads.
        target.flush()
    except (OSError, ValueError):
        return  # nobody reads any more; the log still has it


# ── processes ───────────────────────────────────────────────────────────────────────────────────


class Child:
    """One child process; belongs to the loop it was started on.

    `exited` ends with the return code once the process is gone and all its output has been read.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_lines: Callable[[str, list[str]], None],
        stdin: bytes = b"",
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the process; `on_lines(stream, lines)` gets all lines of "stdout" and "stderr".

        `stdin` is what it can read first from its standard input, which ends when this process
        does.
        """
        self.name = name
        self.log: OutputLog = OutputLog()
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        # Not asyncio's own subprocesses: these are watched by SIGCHLD or by a thread for each.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # the descriptors are read and written directly
            env=environment,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self.pid: int = self._process.pid
        self._pidfd = -1  # where the system has them, until the process ends
        close_in_children(self)  # a fork that keeps the lifeline would keep the child alive
        self._watch_exit()
        self._outputs = [
            OutputPipe(getattr(self._process, stream), partial(self._take_lines, on_lines, stream))
            for stream in ("stdout", "stderr")
        ]
        self.send(stdin)

    def descriptors(self) -> list[int]:
        """List the descriptors that a fork of this process has to close."""
        process = self._process
        pipes = (process.stdin, process.stdout, process.stderr)
        return [self._pidfd, *(each.fileno() for each in pipes if each and not each.closed)]

    def signal(self, number: int) -> None:
        """Send a signal; without effect if the process has ended and its pid may be reused."""
        # Popen sends nothing once it has reaped the process.
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process at once; `exited` follows."""
        self._process.kill()  # not by number: Windows has no SIGKILL

    def send(self, data: bytes) -> None:
        """Write to its standard input; without effect if it has ended or closed it."""
        if (stdin := self._process.stdin) is None or stdin.closed:
            return
        view = memoryview(data)
        # Blocking, but the data is small: a pipe takes 64 KiB at once.
        # A child that died at once is reported by its exit, with what it wrote.
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(stdin.fileno(), view) :]

    def release(self) -> None:
        """Close the lifeline: the child reads the end of its standard input, and should exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> int:
        """Wait for the end of the process; cancelling the wait leaves the process alone."""
        return await asyncio.shield(self.exited)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _take_lines(
        self, on_lines: Callable[[str, list[str]], None], stream: str, lines: list[str]
    ) -> None:
        for line in lines:
            self.log.add(line)
        on_lines(stream, lines)

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            # No pidfds on this system: a thread waits, and ends with the process.
            name = f"aiograd-wait-{self.name}"
            threading.Thread(target=self._wait_in_thread, name=name, daemon=True).start()
            return

        def ended() -> None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._ended()

        self._loop.add_reader(self._pidfd, ended)

    def _wait_in_thread(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and `exited` with it
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        code = self._process.wait()  # it has ended, so this only reaps
        self.release()
        # First the output: `exited` promises that the log is complete.
        for output in self._outputs:
            output.finish()
        if not self.exited.done():
            self.exited.set_result(code)


class SpawnedWorker:
    """A worker in a process that was started by exec."""

    log: OutputLog

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self._child = Child(
            plan.name,
            python_command("-c", BOOT, f"aiograd-{plan.name}"),
            worker_environment(os.environ),
            partial(forward_lines, plan.name),
            stdin=marshal.dumps(sys.path) + plan_bytes(plan),
        )
        self.log: OutputLog = self._child.log
        self.ended: asyncio.Future[int] = self._child.exited
        self.pid: int | None = self._child.pid

    def kill(self) -> None:
        """Send SIGKILL; `ended` tells when the process is gone."""
        self._child.kill()


def plan_bytes(plan: WorkerPlan) -> bytes:
    """Return a plan as `worker_main.main` reads it from standard input."""
    return pickle.dumps(plan)


def describe_exit(code: int, expected: bool = False) -> str:
    """Describe an exit code of `subprocess`, where a signal is negative."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a signal without a name
        name = f"signal {-code}"
    # The kernel's way to free memory, and the usual reason where nobody else sent it.
    hint = " (out of memory?)" if name == "SIGKILL" and not expected else ""
    return f"killed by {name}{hint}"


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Give a worker its parent's environment, with one thread per array library unless set.

    Without AIOGRAD_SECRET: other users of a host may be able to read an environment.
    """
    # One thread per array library: n workers with a pool of threads each would fight for the cores,
    # and a fork would lose them. What the user has set stays.
    inherited = {name: value for name, value in environment.items() if name != "AIOGRAD_SECRET"}
    return {**dict.fromkeys(THREAD_VARIABLES, "1"), **inherited}


def python_command(*arguments: str) -> list[str]:
    """Give the command for another interpreter with the flags of this one: -X dev, -O and so on."""
    # What multiprocessing uses for its children; there is no public function for it.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *arguments]
