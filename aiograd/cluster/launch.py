"""The commands `aiograd run` and `aiograd worker`: start the ranks of a script, or join a cluster.

`run` starts n processes of one script, passes each its rank in `AIOGRAD_*` variables, prefixes
their output by their names, and ends them all when one fails. `worker` is one worker that serves
until the cluster it joined is closed. `__main__.py` parses the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.joining.folders import SECRET, PrivateFolder
from aiograd.cluster.processes.malloc import collect_less_often, keep_freed_memory
from aiograd.cluster.processes.spawn import (
    Child,
    describe_exit,
    forward_lines,
    python_command,
    worker_environment,
)
from aiograd.cluster.processes.worker_main import new_event_loop
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError, SecurityError
from aiograd.observe.runfolder import remove_records

__all__ = ["join_cluster", "run_ranks"]

_log = logging.getLogger("aiograd.cluster")

# Seconds for ranks to exit after a signal, before they are killed.
EXIT_GRACE = 5.0
JOIN_NOTICE = 1.0  # seconds without an answer of rank 0, before a line says who is waited for
# Seconds that a rank whose loss ended another one has to exit itself: its interpreter may take
# longer to end than the other one takes to notice.
CAUSE_GRACE = 1.0
EXIT_TIME = 2.0  # seconds beyond `Options.grace` for a worker to end after a signal
REJOIN_PAUSE = 1.0  # seconds before a worker that was lost joins again
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The last line of a traceback that says that another worker failed.
LOSS = re.compile(
    r"^(?:[^\w]*)aiograd\.errors\.(?:WorkerLost|OwnerLost|WorkerUnresponsive|BackwardFailed): .*",
    re.MULTILINE,
)


# ── aiograd run ─────────────────────────────────────────────────────────────────────────────────


def run_ranks(count: int, program: Sequence[str]) -> int:
    """Run `python program…` as ranks 0 … count-1 on this host; gives the exit code.

    Installs handlers of SIGINT and SIGTERM, so it must run in the main thread.
    """
    folder = PrivateFolder()
    try:
        environments = rank_environments(count, folder.path, os.environ)
        secret = Path(folder.path, SECRET)
        # The mode before the content: at no time can others read it.
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        with asyncio.Runner() as runner:
            return runner.run(_run(environments, python_command(*program)))
    finally:
        folder.close()


def rank_environments(
    count: int, folder: str, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Give each rank its environment; the secret is in a file that only this user can read."""
    return [
        {
            **worker_environment(environment),
            "AIOGRAD_RANK": str(rank),
            "AIOGRAD_WORLD_SIZE": str(count),
            "AIOGRAD_NAME": f"worker{rank}",
            "AIOGRAD_RENDEZVOUS": f"unix:{folder}/meet",
            "AIOGRAD_SECRET_FILE": f"{folder}/{SECRET}",
            "PYTHONUNBUFFERED": "1",  # show lines as they are written
        }
        for rank in range(count)
    ]


async def _run(environments: Sequence[dict[str, str]], command: Sequence[str]) -> int:
    loop = asyncio.get_running_loop()
    signalled = _catch_signals(loop)
    children: list[Child] = []
    # From the first child on: if a later one cannot be started, those before it are ended.
    try:
        for rank, environment in enumerate(environments):
            name = f"worker{rank}"
            child = Child(name, command, environment, partial(forward_lines, name))
            children.append(child)
            _log.info("started %s (process %d)", name, child.pid)
            # No lifeline: a script does not read it, and finds its standard input empty.
            child.release()
        return await _first_failure(children, signalled)
    finally:
        await _end(children)


def _catch_signals(
    loop: asyncio.AbstractEventLoop, within: float = math.inf
) -> asyncio.Future[int]:
    """Give a future that ends with the number of the first signal to stop.

    The process then has so many seconds to end, before it is ended.
    """
    signalled: asyncio.Future[int] = loop.create_future()

    def caught(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    for number in SIGNALS:
        with contextlib.suppress(NotImplementedError):  # Windows; Ctrl-C still interrupts
            loop.add_signal_handler(number, caught, number)
            if within != math.inf:
                # In the place of the loop's own, which does nothing; the loop hears of signals
                # by its pipe. This one also runs while a function blocks the loop.
                signal.signal(number, partial(_end_within, within))
    return signalled


def _end_within(seconds: float, number: int, frame: FrameType | None) -> None:
    """End this process after some time, if it has not ended by then."""

    def end() -> None:
        _say(f"aiograd: a function blocks the loop, so this process is ended after {seconds:g} s")
        with contextlib.suppress(Exception):  # nothing may keep this process alive
            remove_records(os.getpid())
        os._exit(128 + number)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


async def _first_failure(children: Sequence[Child], signalled: asyncio.Future[int]) -> int:
    """Wait until all have succeeded, one has failed, or a signal came; gives the exit code."""
    running = {child.exited: child for child in children}
    while running:
        await asyncio.wait([signalled, *running], return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            # The children have sessions of their own: the terminal did not send them the signal.
            await _end(children, signalled.result())
            return 128 + signalled.result()
        failed = []
        for exited in [each for each in running if each.done()]:
            child = running.pop(exited)
            _log.info("%s ended (%s)", child.name, describe_exit(exited.result()))
            if exited.result():
                failed.append(child)
        if failed:
            return await _report(failed, list(running.values()))
    return 0


async def _report(failed: list[Child], running: list[Child]) -> int:
    """Say which rank failed first and which ones are ended for it; gives its exit code."""
    # A rank that fails because another one did may exit before that one.
    blamed = [child for child in running if any(child.name in _losses(each) for each in failed)]
    if blamed:
        await asyncio.wait([child.exited for child in blamed], timeout=CAUSE_GRACE)
    failed += [child for child in running if child.exited.done() and child.exited.result()]
    # The cause is one that names no other of them as lost.
    names = {child.name for child in failed}
    failed.sort(key=lambda child: bool((names - {child.name}) & _losses(child)))
    first, *later = failed
    text = f"{first.name} failed ({describe_exit(first.exited.result())})"
    if later:
        text += f"; {', '.join(child.name for child in later)} failed as well"
    if others := [child.name for child in running if not child.exited.done()]:
        text += f"; ending {', '.join(others)}"
    forward_lines("aiograd", "stderr", [text])
    code = first.exited.result()
    return code if code > 0 else 128 - code  # a signal, as a shell reports it


def _losses(child: Child) -> set[str]:
    """Give the words of the errors by which a rank said that it had lost another one."""
    return {word.strip(",;()") for line in LOSS.findall(str(child.log)) for word in line.split()}


async def _end(children: Sequence[Child], number: int = signal.SIGTERM) -> None:
    """Send a signal to those that still run, and kill them if they do not exit in time."""
    running = [child for child in children if not child.exited.done()]
    for child in running:
        child.signal(number)
    if running:
        await asyncio.wait([child.exited for child in running], timeout=EXIT_GRACE)
    # All of them, without effect on those that have exited.
    for child in running:
        child.kill()
        await child.wait()


# ── aiograd worker ──────────────────────────────────────────────────────────────────────────────


def join_cluster(plan: WorkerPlan, rejoin: bool = False) -> int:
    """Join an open cluster as a worker; serve until it is closed or a signal comes.

    Gives the exit code: 0 if the cluster told it to leave, 128 + n for signal n, else 1. With
    `rejoin` it joins again when it was lost. RpcError or AuthError if the worker cannot join.
    """
    plan = replace(plan, background=True)
    keep_freed_memory()  # this process is ours: it runs nothing but the worker
    collect_less_often()
    with asyncio.Runner(loop_factory=partial(new_event_loop, plan.options.loop)) as runner:
        return runner.run(_serve(plan, rejoin))


async def _serve(plan: WorkerPlan, rejoin: bool) -> int:
    # `Worker.close` takes its grace and a second; the rest is for the interpreter to end.
    signalled = _catch_signals(asyncio.get_running_loop(), plan.options.grace + EXIT_TIME)
    while True:
        try:
            code, told = await _serve_once(plan, signalled)
        except SecurityError:
            raise  # trying again does not make the secrets equal
        except RpcError as error:
            if not rejoin:
                raise
            _say(f"{plan.name}: {error}")
            code, told = 1, False
        if told or not rejoin:
            return code
        _say(f"{plan.name} joins again")
        await asyncio.wait([signalled], timeout=REJOIN_PAUSE)
        if signalled.done():
            return 128 + signalled.result()


async def _serve_once(plan: WorkerPlan, signalled: asyncio.Future[int]) -> tuple[int, bool]:
    """Join and serve once; gives the exit code, and whether somebody wanted it to end."""
    loop = asyncio.get_running_loop()
    worker = Worker.from_plan(plan)
    where = plan.rendezvous.location if plan.rendezvous is not None else "the invitation"
    starting = loop.create_task(worker.start())
    if not await _unless_signalled(starting, signalled, JOIN_NOTICE):
        if not signalled.done():
            _say(f"{plan.name or 'this worker'} waits for rank 0 at {where}")
            await _unless_signalled(starting, signalled)
        if signalled.done():
            return 128 + signalled.result(), True
    starting.result()  # raises why it could not join
    worker.make_current()
    _say(f"{worker.name} joined {where} as rank {worker.rank}")
    dismissed = worker.member.dismissed
    serving = loop.create_task(worker.serve())
    waits: list[asyncio.Future[Any]] = [signalled, serving]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    # A worker that was dismissed at the same time is closing already.
    if signalled.done() and not serving.done() and not dismissed.done():
        await worker.close()  # leave gracefully
        serving.cancel()
        await asyncio.wait([serving])
        return 128 + signalled.result(), True
    asked = await serving
    _say(f"{worker.name} left: {dismissed.result().why}")
    # Not told to leave: supervisors restart what fails, and only that.
    return (0 if asked else 1), asked


async def _unless_signalled(
    work: asyncio.Task[Any], signalled: asyncio.Future[int], timeout: float | None = None
) -> bool:
    """Wait for work to end, and cancel it at a signal; tell whether it has ended by itself."""
    waits: list[asyncio.Future[Any]] = [signalled, work]
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        return True
    if signalled.done():
        work.cancel()
        await asyncio.wait([work])
    return False


def _say(line: str) -> None:
    # Printed, not logged: a command line user has configured no logging.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
