"""What a worker process runs: read the plan, join, serve until dismissed, exit.

The plan comes from standard input. That pipe stays open as long as the parent lives; a thread waits
for its end, so that this process exits when its parent does, even if its loop is blocked.
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
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiograd.cluster.config import THREAD_VARIABLES, WorkerPlan
from aiograd.cluster.joining.folders import is_listening
from aiograd.cluster.processes.malloc import collect_less_often, keep_freed_memory
from aiograd.cluster.worker import Worker
from aiograd.observe.runfolder import remove_records

__all__ = ["KILL", "main", "new_event_loop"]

KILL = b"k"  # on the lifeline of a parent that has no other way to kill this process, as over ssh

ORPHAN_GRACE = 2.0  # seconds to exit in order once the parent is gone


def main() -> None:
    """Run a worker from the plan on standard input; exits the process, and does not return."""
    # Pickle is safe here: only the parent has the other end of this pipe.
    try:
        plan: WorkerPlan = pickle.load(sys.stdin.buffer)
    except EOFError:  # the parent has ended, or wants no worker any more
        sys.exit(1)
    lifeline = _take_lifeline()
    # The driver shows output line by line; a pipe would be block-buffered.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A crash in C code then leaves its traceback in the log that the driver keeps.
    faulthandler.enable()
    if os.environ.get("AIOGRAD_LOG") == "json":
        from aiograd.observe.json_logs import enable

        enable()
    keep_freed_memory()
    collect_less_often()
    if plan.crowded:
        use_batch_scheduling()
    if plan.threads > 1:
        use_threads(plan.threads)
    name_process(plan.name)
    loop = new_event_loop(plan.options.loop)
    asyncio.set_event_loop(loop)
    # Not asyncio.run: it would wait for the threads of its executor, in which a user's function may
    # never return.
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
    if not dismissed:  # a coordinator that dismisses its workers removes its sockets itself
        _remove_sockets(plan)
    _end(code)


async def serve(plan: WorkerPlan) -> bool:
    """Be a worker until dismissed (True) or until the coordinator is lost (False)."""
    # Before joining: a member can be called at once.
    for module in plan.modules:
        importlib.import_module(module)
    gc.freeze()  # modules stay for good: no collection needs to scan them again
    worker = Worker.from_plan(plan)
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


def _watch(lifeline: int, plan: WorkerPlan, stop: Callable[[], Any]) -> None:
    """Wait for the end of the parent, then stop the worker; runs in a thread of its own."""
    while data := os.read(lifeline, 1024):
        if KILL in data:
            os.kill(os.getpid(), signal.SIGKILL)
    # At once, not when the worker has ended: it may be blocked, and killed below.
    _remove_sockets(plan)
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process exits anyway
        stop()
    # The loop may be blocked by a function that never returns; then nothing else ends this process.
    time.sleep(ORPHAN_GRACE)
    with contextlib.suppress(Exception):  # nothing may keep this process alive
        remove_records(os.getpid())
    os._exit(1)


def _remove_sockets(plan: WorkerPlan) -> None:
    """Remove the sockets of a parent that was killed, and could not do so itself."""
    # All workers try; the first one removes the folder, for the others there is nothing left.
    addresses = plan.coordinator.addresses if plan.coordinator is not None else ()
    for path in [each.removeprefix("unix:") for each in addresses if each.startswith("unix:")]:
        for _ in range(20):
            if not is_listening(path):
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
                break
            time.sleep(0.02)  # a dying process closes its pipes and sockets one after the other


def _end(code: int) -> None:
    """Exit without waiting for threads that still run a user's function."""
    # os._exit skips the exit handlers of user code and the flush, so both are done here.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Make the loop that `Options.loop` names; "auto" is uvloop where it is installed."""
    # Made directly, not by a policy: user code in the worker finds the default policy.
    if kind != "asyncio":
        try:
            import uvloop
        except ImportError:
            if kind == "uvloop":
                raise
        else:
            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def use_batch_scheduling() -> None:
    """Do not preempt the sender of a message that wakes this process; for workers that share cores.

    Otherwise the kernel may give us the core of a sender that has messages for other workers as
    well, and these sit idle until we are done. A scheduling policy that was set already is kept.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may not allow it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_threads(count: int) -> None:
    """Let libraries compute on several threads, which the environment of a worker does not.

    After the fork, which such threads would not survive. numpy is loaded already, and stays at one.
    """
    for name in THREAD_VARIABLES:
        os.environ[name] = str(count)  # for what is loaded later
    preloaded = sys.modules.get("aiograd.torch")
    if preloaded is not None:
        preloaded.TORCH.use_threads(count)


def name_process(name: str) -> None:
    """Show the worker's name in `ps` and `top`, where the system can."""
    if sys.platform == "linux":
        import ctypes

        set_name = 15  # PR_SET_NAME; the kernel keeps 15 bytes
        ctypes.CDLL(None).prctl(set_name, f"ag-{name}".encode()[:15], 0, 0, 0)
