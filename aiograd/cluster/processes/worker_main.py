"""A worker process: what runs at the other end of a host.

It reads its plan from standard input, joins, serves until it is dismissed, and ends. The pipe that
brought the plan stays open as long as its parent lives; a thread waits for its end, so that the
process goes when its parent does, even if its loop is blocked.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiograd.cluster.bootstrap import is_listening
from aiograd.cluster.config import Plan
from aiograd.cluster.processes.malloc import keep_freed_memory
from aiograd.cluster.worker import Worker

__all__ = ["main", "new_event_loop"]

LAST_WORDS = 2.0  # seconds to end in order once the parent is gone


def main() -> None:
    """Run a worker from the plan on standard input; does not return."""
    plan: Plan = pickle.load(sys.stdin.buffer)
    lifeline = _take_lifeline()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    keep_freed_memory()
    if plan.crowded:
        take_no_core_away()
    name_process(plan.name)
    loop = new_event_loop(plan.options.loop)
    asyncio.set_event_loop(loop)
    serving = loop.create_task(serve(plan))
    watch = partial(_watch, lifeline, plan, partial(loop.call_soon_threadsafe, serving.cancel))
    threading.Thread(target=watch, name="aiograd-lifeline", daemon=True).start()
    code, dismissed = 0, False
    try:
        dismissed = loop.run_until_complete(serving)
    except asyncio.CancelledError:
        code = 1  # the parent is gone
    except Exception:
        code = 1
        sys.excepthook(*sys.exc_info())
    if not dismissed:
        _remove_sockets(plan)
    _end(code)


async def serve(plan: Plan) -> bool:
    """Be a worker until dismissed, or until the coordinator is gone; tells which."""
    for module in plan.modules:
        importlib.import_module(module)
    gc.freeze()  # what is here by now stays: no collection needs to look through it again
    worker = Worker.planned(plan)
    await worker.start()
    worker.make_current()
    return await worker.serve()


def _take_lifeline() -> int:
    """Keep the pipe from the parent, and give user code an empty standard input instead."""
    lifeline = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return lifeline


def _watch(lifeline: int, plan: Plan, stop: Callable[[], Any]) -> None:
    while os.read(lifeline, 1024):
        pass
    _remove_sockets(plan)
    with contextlib.suppress(RuntimeError):  # the loop is closed: it is ending anyway
        stop()
    time.sleep(LAST_WORDS)
    os._exit(1)


def _remove_sockets(plan: Plan) -> None:
    """Remove the sockets of a parent that was killed, and could not do so itself."""
    addresses = plan.coordinator.addresses if plan.coordinator is not None else ()
    for path in [each.removeprefix("unix:") for each in addresses if each.startswith("unix:")]:
        for _ in range(20):
            if not is_listening(path):
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
                break
            time.sleep(0.02)  # a dying process closes one thing after the other


def _end(code: int) -> None:
    """End the process without waiting for threads that still run somebody's function."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Make the loop that `Options.loop` names; "auto" is uvloop where it is installed."""
    if kind != "asyncio":
        try:
            import uvloop
        except ImportError:
            if kind == "uvloop":
                raise
        else:
            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def take_no_core_away() -> None:
    """Where workers share cores: let whoever wakes us up with a message go on with its work.

    Else the kernel may give us the core of a sender that has messages for others, too, and these
    then sit idle until we are done. Who has chosen how this process is scheduled is obeyed.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may not allow it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def name_process(name: str) -> None:
    """Show the worker's name in `ps` and `top`, where the system can."""
    if sys.platform == "linux":
        import ctypes

        set_name = 15
        ctypes.CDLL(None).prctl(set_name, f"ag-{name}".encode()[:15], 0, 0, 0)
