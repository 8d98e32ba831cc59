"""What `aiograd run` and `aiograd worker` do: start ranks of a script here, or join from afar.

`run` starts n processes of one script, tells each its rank through `AIOGRAD_*` variables, shows
what they write under their names, and ends them all when one fails. `worker` is one worker that
serves until the cluster it joined is closed. The command line itself is `__main__.py`'s business.
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
from aiograd.cluster.config import Plan
from aiograd.cluster.processes.malloc import keep_freed_memory
from aiograd.cluster.processes.spawn import Child, forward, python, worker_environment
from aiograd.cluster.processes.worker_main import new_event_loop
from aiograd.cluster.rendezvous import parse_place
from aiograd.cluster.worker import Worker
from aiograd.rpc.options import Options

__all__ = ["join_cluster", "run_ranks"]

LAST_WORDS = 5.0  # seconds that ranks have to end after they were asked to
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# ── aiograd run ─────────────────────────────────────────────────────────────────────────────────


def run_ranks(count: int, program: Sequence[str]) -> int:
    """Run `python program…` as ranks 0 … count-1 on this host; gives the exit code."""
    folder = private_folder()
    try:
        environments = rank_environments(count, folder, os.environ)
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        with asyncio.Runner() as runner:
            return runner.run(_run(environments, python(*program)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rank_environments(
    count: int, folder: str, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Tell each rank who it is; the secret is in a file that only this user can read."""
    return [
        {
            **worker_environment(environment),
            "AIOGRAD_RANK": str(rank),
            "AIOGRAD_WORLD_SIZE": str(count),
            "AIOGRAD_NAME": f"worker{rank}",
            "AIOGRAD_RENDEZVOUS": f"unix:{folder}/meet",
            "AIOGRAD_SECRET_FILE": f"{folder}/secret",
            "PYTHONUNBUFFERED": "1",  # lines are shown when they are written
        }
        for rank in range(count)
    ]


async def _run(environments: Sequence[dict[str, str]], command: Sequence[str]) -> int:
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[int] = loop.create_future()  # by a signal, with its number
    for number in SIGNALS:
        loop.add_signal_handler(number, _ask, asked, number)
    children: list[Child] = []
    try:
        for rank, environment in enumerate(environments):
            name = f"worker{rank}"
            child = Child(name, command, environment, partial(forward, name))
            children.append(child)
            child.release()  # a script that reads its input finds it empty
        return await _first_failure(children, asked)
    finally:
        await _end(children)


def _ask(asked: asyncio.Future[int], number: int) -> None:
    if not asked.done():
        asked.set_result(number)


async def _first_failure(children: Sequence[Child], asked: asyncio.Future[int]) -> int:
    """Wait until all have ended well, one has failed, or a signal came; gives the exit code."""
    running = {child.exited: child for child in children}
    while running:
        await asyncio.wait([asked, *running], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await _end(children, asked.result())
            return 128 + asked.result()
        for exited in [each for each in running if each.done()]:
            child = running.pop(exited)
            code = exited.result()
            if code:
                others = ", ".join(other.name for other in running.values())
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                ending = f"; ending {others}" if others else ""
                forward("aiograd", "stderr", f"{child.name} failed ({how}){ending}")
                return code if code > 0 else 128 - code
    return 0


async def _end(children: Sequence[Child], number: int = signal.SIGTERM) -> None:
    """Ask those that still run to end, and kill them if they do not."""
    running = [child for child in children if not child.exited.done()]
    for child in running:
        child.signal(number)
    if running:
        await asyncio.wait([child.exited for child in running], timeout=LAST_WORDS)
    for child in running:
        child.signal(signal.SIGKILL)
        await child.wait()


# ── aiograd worker ──────────────────────────────────────────────────────────────────────────────


def join_cluster(rendezvous: str, name: str, options: Options) -> int:
    """Join an open cluster as a worker, and serve until it is closed or this is interrupted."""
    plan = Plan(name=name, rank=None, options=options, place=parse_place(rendezvous))
    if options.secret_file is None and (file := os.environ.get("AIOGRAD_SECRET_FILE")):
        plan = replace(plan, options=replace(options, secret_file=file))
    keep_freed_memory()
    with asyncio.Runner(loop_factory=partial(new_event_loop, options.loop)) as runner:
        return runner.run(_serve(plan))


async def _serve(plan: Plan) -> int:
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[int] = loop.create_future()
    for number in SIGNALS:
        loop.add_signal_handler(number, _ask, asked, number)
    worker = Worker.planned(plan)
    await worker.start()
    worker.make_current()
    assert plan.place is not None
    sys.stderr.write(f"{worker.name} joined {plan.place.text} as rank {worker.rank}\n")
    serving = loop.create_task(worker.serve())
    waits: list[asyncio.Future[Any]] = [asked, serving]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if asked.done() and not serving.done():
        await worker.close()  # leave in order; serving ends with it
        serving.cancel()
        await asyncio.wait([serving])
        return 128 + asked.result()
    await serving
    return 0
