"""Functions that run on workers while these fail, and helpers to make them fail."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import aiograd as ag
from tests.support import waiting

SEEN: dict[str, float] = {}  # moments, by the clock that all processes of a host share
RELEASED = threading.Event()  # what `linger_in_thread` waits for


def now() -> float:
    return time.monotonic()


@ag.inline
def echo(x: Any) -> Any:
    return x


async def linger() -> None:
    """Never return; remember when this was cancelled."""
    SEEN["started"] = now()
    try:
        await asyncio.sleep(3600.0)
    except asyncio.CancelledError:
        SEEN["cancelled"] = now()
        raise


def linger_in_thread() -> None:
    """Return after `release_threads`."""
    SEEN["in a thread"] = now()
    RELEASED.wait()


@ag.inline
def release_threads() -> None:
    RELEASED.set()


async def linger_through(names: list[str]) -> None:
    """Linger on the last of these workers, called through all before it."""
    SEEN["started"] = now()
    try:
        if names:
            await ag.rpc_async(names[0], linger_through, (names[1:],))
        else:
            await linger()
    except asyncio.CancelledError:
        SEEN["cancelled"] = now()
        raise


@ag.inline
def seen() -> dict[str, float]:
    return dict(SEEN)


@ag.inline
def hold_the_loop(seconds: float) -> float:
    began = now()
    time.sleep(seconds)
    return began


seen.__aiograd_quiet__ = True  # type: ignore[attr-defined]


@ag.inline
def leave_memory(spare: int) -> None:
    """Limit this process to `spare` bytes more than it has now."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + spare, resource.RLIM_INFINITY))


@ag.inline
def limit_reached(name: str) -> int:
    return ag.current_worker().agent.limits[name]


async def length(x: Any) -> int:
    return len(x)


async def fetch(size: int) -> int:
    """Fetch `size` bytes from the driver."""
    return len(await ag.rpc_async("driver", bytes, (size,)))


async def told(name: str, what: str) -> float:
    """Wait until an event was seen on a worker; return when it was."""

    async def has_seen() -> bool:
        return what in await ag.rpc_async(name, seen)

    await waiting.until(has_seen, 60.0)
    return (await ag.rpc_async(name, seen))[what]


async def running_calls(name: str, count: int) -> None:
    """Wait until a worker runs `count` calls."""

    async def enough() -> bool:
        return (await ag.rpc_async(name, ag.debug_info))["running_calls"] >= count

    await waiting.until(enough)


async def until(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds here; return when it did."""
    await waiting.until(condition)
    return now()


async def outcome(awaitable: Any) -> tuple[BaseException, float]:
    """Return the error that an awaitable raises, and when it did."""
    try:
        result = await awaitable
    except Exception as error:
        return error, now()
    raise AssertionError(f"no error, but {result!r}")


def fork_helper() -> int:
    """Fork a child that keeps inherited descriptors, as `multiprocessing` does; return its pid."""
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600.0,))
    helper.start()
    assert helper.pid is not None
    return helper.pid


def fork_helper_in_c() -> int:
    """Fork with the C library, so that none of Python's fork hooks run in the child."""
    child = ctypes.PyDLL(None).fork()
    while child == 0:
        time.sleep(3600.0)
    return int(child)


@contextmanager
def stopped(cluster: ag.LocalCluster, name: str) -> Any:
    """Stop a worker's process inside the block, as a debugger or a swapping machine would."""
    process = cluster.pid(name)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        if not cluster._hosts[name].ended.done():
            os.kill(process, signal.SIGCONT)


def alive(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(cluster: ag.LocalCluster, name: str) -> float:
    """Kill a worker's process without the cluster's knowledge; return when."""
    process = cluster.pid(name)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    return now()
