"""The worker of this process: an aiograd `Worker` on a loop in a thread of its own.

    program's threads ──▶ agent.call, run_sync ──▶ loop thread ──▶ peers
                     ◀── torch futures, Latch ◀──

A process has one, as with torch: `start` makes it, `current` finds it, `stop` ends it. A forked
child has none: it starts its own.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc import constants

from aiograd.cluster.worker import Worker
from aiograd.compat.torch_rpc.failures import NO_AGENT, translate
from aiograd.compat.torch_rpc.meeting import Meeting
from aiograd.errors import AiogradError
from aiograd.rpc.agent import Agent
from aiograd.rpc.observe.watchdog import Watchdog
from aiograd.rpc.options import Options

T = TypeVar("T")
_JOIN: Final = 2.0  # seconds for threads that end with the worker


class LocalWorker:
    """The worker of this process; torch's programs know it as the current RPC agent."""

    is_static_group: bool

    def __init__(self, name: str, rank: int, world_size: int | None, options: Any) -> None:
        self.name, self.rank, self.world_size = name, rank, world_size
        self.backend_options = options
        self.is_static_group = world_size is not None
        self.timeout = float(options.rpc_timeout)
        self.profiles_gil = False
        self._loop = _new_loop()
        self._worker: Worker | None = None
        self._folder: str | None = None  # of the rendezvous socket, if this process made it
        self._thread = threading.Thread(target=self._run, name="aiograd-torch-rpc", daemon=True)
        self._next_id = 0
        self._lock = threading.Lock()

    # ── living ──────────────────────────────────────────────────────────────────────────────────

    def start(self, meeting: Meeting) -> None:
        """Join the cluster; returns when every rank is there."""
        kind, _, path = meeting.rendezvous.partition(":")
        if kind == "unix" and self.rank == 0:
            self._folder = os.path.dirname(path)
        threads = getattr(self.backend_options, "num_worker_threads", 0)
        options = Options(
            timeout=self.timeout or math.inf,
            threads=max(Options.threads, threads),
            secret_file=os.environ.get("AIOGRAD_SECRET_FILE"),
        )
        self._thread.start()
        try:
            self.run(self._join(meeting.rendezvous, options))
        except BaseException:
            self.end()
            raise

    async def _join(self, rendezvous: str, options: Options) -> None:
        alone = self.world_size == 1
        worker = Worker(
            self.name,
            rank=self.rank,
            world_size=self.world_size,
            rendezvous=None if alone else rendezvous,
            options=options,
        )
        self._worker = worker  # before the start: calls of faster workers arrive during it
        await worker.start()
        worker.make_current()
        if self.rank == 0 and not alone:
            # A program may end right after `init_rpc`, without `shutdown`. So rank 0, which admits
            # the others, returns when they have got its answer, as torch's does: the reply to a
            # call that was sent after it says so.
            others = [info.name for info in worker.workers() if info.rank]
            await asyncio.gather(*[worker.agent.call(name, _reached) for name in others])

    def close(self, graceful: bool, timeout: float) -> None:
        """Leave the cluster; `timeout` in seconds, `math.inf` for none."""
        worker = self._worker
        if worker is not None:
            self.run(worker.close(graceful, timeout))

    def end(self, timeout: float | None = None) -> None:
        """Stop the loop and its thread; `timeout` in seconds for it to stop, None for ever."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout)
        if self._worker is not None and self._worker.running:  # nobody has closed the worker
            self.agent.pool.close()  # else its idle threads would wait for work
            if Watchdog in self.agent.parts:
                self.agent.parts[Watchdog].close()
        self._join_threads()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _join_threads(self) -> None:
        """Wait for the threads of the worker, but not for a function that does not return.

        A program may end right after this. A thread that waits for the interpreter inside of
        torch's C++ code would then abort the process.
        """
        names = (f"aiograd-{self.name}", f"aiograd-watchdog-{self.name}", self._thread.name)
        end = time.monotonic() + _JOIN
        for thread in threading.enumerate():
            if thread.name in names and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop and wait for it, with torch's errors."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except AiogradError as error:
            raise translate(error) from error
        except BaseException:
            future.cancel()
            raise

    def on_loop(self, work: Callable[[], Any]) -> None:
        """Call a function on the loop, soon."""
        self._loop.call_soon_threadsafe(work)

    # ── what it is ──────────────────────────────────────────────────────────────────────────────

    @property
    def worker(self) -> Worker:
        """The aiograd worker."""
        if self._worker is None:
            raise RuntimeError(NO_AGENT)
        return self._worker

    @property
    def agent(self) -> Agent:
        """The agent of the aiograd worker, which makes and serves calls."""
        return self.worker.agent

    def new_id(self) -> int:
        """Give the next id of a reference or fork, as torch counts them."""
        with self._lock:
            self._next_id += 1
            return self._next_id - 1

    def seconds(self, timeout: float) -> float:
        """Give the time for a call as aiograd counts it: torch's -1 is the default, 0 is none."""
        if timeout < 0:
            timeout = self.timeout
        return timeout or math.inf

    # ── torch's methods of an agent ─────────────────────────────────────────────────────────────

    def get_worker_info(self, worker: str | int | None = None) -> Any:
        """Look a worker up by name or id; without an argument, this one."""
        if worker is None:
            return WorkerInfo(self.name, self.rank)
        try:
            info = self.worker.get_worker_info(worker)
        except AiogradError as error:
            raise translate(error) from error
        return WorkerInfo(info.name, info.rank)

    def get_worker_infos(self) -> list[Any]:
        """List all workers."""
        return [WorkerInfo(each.name, each.rank) for each in self.worker.workers()]

    def get_debug_info(self) -> dict[str, str]:
        """Give counters under torch's names."""
        counters = self.worker.debug_info()
        threads = getattr(self.backend_options, "num_worker_threads", Options.threads)
        info = {
            "agent.thread_pool_size": str(threads),
            "agent.num_idle_threads": str(threads - min(threads, counters["running_calls"])),
            "agent.client_active_calls": str(counters["pending_calls"]),
            "agent.server_active_calls": str(counters["running_calls"]),
            "agent.server_active_async_calls": "0",
        }
        if self.profiles_gil:
            info["agent.gil_average_wait_time_us"] = "0"
        return info

    def _get_backend_options(self) -> Any:
        return self.backend_options

    def _get_device_map(self, worker: Any) -> dict[Any, Any]:
        """Give the map of devices to a worker: there is none, see `options.check`."""
        return {}


def _reached() -> None:
    """Answer rank 0: what it sent before has arrived."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


# ── the one of this process ─────────────────────────────────────────────────────────────────────

_current: Any = None  # a LocalWorker, or the agent of a backend that a program registered


def current() -> Any:
    """Return the worker of this process; RuntimeError if there is none."""
    if _current is None:
        raise RuntimeError(NO_AGENT)
    return _current


def is_set() -> bool:
    """Tell whether this process has a worker."""
    return _current is not None


def use(worker: Any) -> None:
    """Make a worker, or None, that of this process."""
    global _current
    _current = worker


def _end_with_interpreter() -> None:
    """End the worker of a program that ends without `shutdown`, see `LocalWorker._join_threads`."""
    if isinstance(_current, LocalWorker):
        _current.end(_JOIN)


atexit.register(_end_with_interpreter)
# A forked child shares no loop with its parent, and starts a worker of its own.
os.register_at_fork(after_in_child=lambda: use(None))

DEFAULT_TIMEOUT: float = constants.DEFAULT_RPC_TIMEOUT_SEC
