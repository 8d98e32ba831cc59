"""Run every async test on both event loops, with a deadline and a leak check."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import uvloop

from tests.support.engines import own_children, own_files, own_threads

# Programs that tests start must show their lines without it, as they do for most users.
os.environ.pop("PYTHONUNBUFFERED", None)

# What a shell starts in the background ignores interrupts, and so would programs of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEADLINE = 30.0  # seconds; `@pytest.mark.deadline(n)` sets another one

# The first uvloop opens a pipe that stays for the whole process; later it would look like a leak.
uvloop.new_event_loop().close()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests in an order drawn from this seed"
    parser.addoption("--shuffle", type=int, metavar="SEED", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)
    # pytest-asyncio replaces the call itself, so a deadline must be inside the coroutine function.
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            mark = item.get_closest_marker("deadline")
            item.obj = _limited(item.obj, mark.args[0] if mark else DEADLINE)


def pytest_collection_finish() -> None:
    # Every test ends with a garbage collection; it need not scan pytest and all modules each time.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any], dict[str, Any]]:
    # xdist sends reports as UTF-8, and some tests log text with lone surrogates.
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {key: _sendable(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_sendable, value))
        case _:
            return value


def _limited(test: Callable[..., object], seconds: float) -> Callable[..., object]:
    @functools.wraps(test)
    async def limited(*args: object, **kwargs: object) -> None:
        async with asyncio.timeout(seconds):
            await test(*args, **kwargs)

    return limited


@contextlib.contextmanager
def _asyncio_errors() -> Iterator[list[str]]:
    """Collect what asyncio only logs: unretrieved exceptions, destroyed pending tasks."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("asyncio").removeHandler(handler)


def _open_files() -> dict[str, str]:
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.startswith(("/proc/", "/dev/", "/sys/")):
            files[fd] = target
    return files


def _children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found |= set(file.read().split())
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, file descriptor, child process or unretrieved error outlives a test."""
    # Dask and Ray keep threads, sockets and processes of their own.
    engine = request.node.get_closest_marker("engine") is not None
    threads, files, children = set(threading.enumerate()), _open_files(), _children()
    with _asyncio_errors() as errors:
        yield
        pure = not inspect.iscoroutinefunction(getattr(request.node, "obj", None))
        if pure and not errors and set(threading.enumerate()) <= threads:
            return  # nothing asynchronous ran, so there is nothing to collect and to wait for
        # Inside the block: finalizers of tasks and futures in cycles log their errors now.
        gc.collect()
    # Threads and children may end a moment after their test, and there is no event to await for all
    # of them, so look several times.
    end = time.monotonic() + 2.0
    while True:
        names = [t.name for t in set(threading.enumerate()) - threads]
        started, known = sorted(_children() - children), set(files.values())
        opened = {fd: target for fd, target in _open_files().items() if target not in known}
        left = {
            "threads": own_threads(names) if engine else names,
            "children": own_children(started) if engine else started,
            "files": sorted(own_files(opened) if engine else set(opened.values())),
        }
        if not any(left.values()) or time.monotonic() > end:
            break
        time.sleep(0.01)
    assert not any(left.values()), f"left behind: {left}"
    assert not errors, errors
    # What is left belongs to pytest. Scanning its thousands of reports again took 0.1 s per test.
    gc.freeze()
