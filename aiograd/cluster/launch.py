"""The commands `aiograd run` and `aiograd worker`: start the ranks of a script, or join a cluster.

`run` starts n processes of one script, passes each its rank in `AIOGRAD_*` variables, prefixes
their output by their names, and ends them all when one fails. `worker` is one worker that serves
until the cluster it joined is closed. `__main__.py` parses the command line.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiograd.cluster.bootstrap import private_folder
from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.processes.malloc import collect_less_often, keep_freed_memory
from aiograd.cluster.processes.spawn import (
    Child,
    forward_lines,
    python_command,
    worker_environment,
)
from aiograd.cluster.processes.worker_main import new_event_loop
from aiograd.cluster.rendezvous import parse_rendezvous
from aiograd.cluster.worker import Worker
from aiograd.rpc.options import Options

__all__ = ["join_cluster", "run_ranks"]

# Seconds for ranks to exit after a signal, before they are killed.
EXIT_GRACE = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# ── aiograd run ─────────────────────────────────────────────────────────────────────────────────


def run_ranks(count: int, program: Sequence[str]) -> int:
    """Run `python program…` as ranks 0 … count-1 on this host; gives the exit code.

    Installs handlers of SIGINT and SIGTERM, so it must run in the main thread.
    """
    folder = private_folder()
    try:
        environments = rank_environments(count, folder, os.environ)
        secret = Path(folder, "secret")
        # The mode before the content: at no time can others read it.
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        with asyncio.Runner() as runner:
            return runner.run(_run(environments, python_command(*program)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
            "AIOGRAD_SECRET_FILE": f"{folder}/secret",
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
            # No lifeline: a script does not read it, and finds its standard input empty.
            child.release()
        return await _first_failure(children, signalled)
    finally:
        await _end(children)


def _catch_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Future[int]:
    """Give a future that ends with the number of the first signal to stop."""
    signalled: asyncio.Future[int] = loop.create_future()

    def caught(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, caught, number)
    return signalled


async def _first_failure(children: Sequence[Child], signalled: asyncio.Future[int]) -> int:
    """Wait until all have succeeded, one has failed, or a signal came; gives the exit code."""
    running = {child.exited: child for child in children}
    while running:
        await asyncio.wait([signalled, *running], return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            # The children have sessions of their own: the terminal did not send them the signal.
            await _end(children, signalled.result())
            return 128 + signalled.result()
        # Several may have ended at once; the first one that failed decides the exit code.
        for exited in [each for each in running if each.done()]:
            child = running.pop(exited)
            code = exited.result()
            if code:
                others = ", ".join(other.name for other in running.values())
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                ending = f"; ending {others}" if others else ""
                forward_lines("aiograd", "stderr", [f"{child.name} failed ({how}){ending}"])
                return code if code > 0 else 128 - code  # a signal, as a shell reports it
    return 0


async def _end(children: Sequence[Child], number: int = signal.SIGTERM) -> None:
    """Send a signal to those that still run, and kill them if they do not exit in time."""
    running = [child for child in children if not child.exited.done()]
    for child in running:
        child.signal(number)
    if running:
        await asyncio.wait([child.exited for child in running], timeout=EXIT_GRACE)
    # All of them, without effect on those that have exited.
    for child in running:
        child.signal(signal.SIGKILL)
        await child.wait()


# ── aiograd worker ──────────────────────────────────────────────────────────────────────────────


def join_cluster(rendezvous: str, name: str, options: Options) -> int:
    """Join an open cluster as a worker; serve until it is closed or a signal comes.

    Gives the exit code. RpcError or AuthError if the worker cannot join.
    """
    # No `plan_worker`: name and rank in the environment, if any, are those of another process.
    plan = WorkerPlan(
        name=name, rank=None, options=options, rendezvous=parse_rendezvous(rendezvous)
    )
    if options.secret_file is None and (file := os.environ.get("AIOGRAD_SECRET_FILE")):
        plan = replace(plan, options=replace(options, secret_file=file))
    keep_freed_memory()  # this process is ours: it runs nothing but the worker
    collect_less_often()
    with asyncio.Runner(loop_factory=partial(new_event_loop, options.loop)) as runner:
        return runner.run(_serve(plan))


async def _serve(plan: WorkerPlan) -> int:
    loop = asyncio.get_running_loop()
    signalled = _catch_signals(loop)
    worker = Worker.from_plan(plan)
    await worker.start()
    worker.make_current()
    assert plan.rendezvous is not None
    # Printed, not logged: a command line user has configured no logging.
    sys.stderr.write(f"{worker.name} joined {plan.rendezvous.location} as rank {worker.rank}\n")
    serving = loop.create_task(worker.serve())
    waits: list[asyncio.Future[Any]] = [signalled, serving]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    # A worker that was dismissed at the same time is closing already.
    if signalled.done() and not serving.done():
        await worker.close()  # leave gracefully
        serving.cancel()
        await asyncio.wait([serving])
        return 128 + signalled.result()
    await serving
    return 0
