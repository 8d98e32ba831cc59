"""Futures of torch that aiograd completes, and `wait_all`, which ends with the first failure.

    loop     call answered ─▶ Bridge.finished ─▶ a thread: unpack, complete ─▶ callbacks, waiters

Callbacks of a torch future run in the thread that completes it, and may make calls and wait for
them. So a future is never completed on the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from aiograd.rpc.agent import Agent

__all__ = ["CallFuture", "collect_all", "follow", "wait_all"]


class CallFuture(Future):  # type: ignore[misc]
    """A `torch.futures.Future` of a call.

    A thread of the worker that waits for it lets another one work meanwhile, so nested calls never
    starve; torch's own `wait` blocks where nobody sees it.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self._ended = threading.Event()

    def wait(self) -> Any:
        """Block until the call has ended; return its result or raise its error."""
        if not self._ended.is_set():
            with self._agent.pool.blocked():
                self._ended.wait()
        return super().wait()

    def complete(self, work: Callable[[], Any]) -> None:
        """End with what `work` returns or raises; callbacks run here."""
        try:
            result = work()
        except Exception as error:
            self._ended.set()
            self.set_exception(error)
        except BaseException as error:  # torch's futures hold nothing but an Exception
            self._ended.set()
            self.set_exception(RuntimeError(repr(error)))
        else:
            self._ended.set()
            self.set_result(result)


def follow(
    agent: Agent, source: asyncio.Future[Any], finish: Callable[[asyncio.Future[Any]], Any]
) -> CallFuture:
    """Make a torch future that ends with what `finish(source)` gives, called in a thread.

    Call it before the loop knows `source`, or on the loop.
    """
    future = CallFuture(agent)

    def work() -> None:
        future.complete(lambda: finish(source))

    def finished(_: asyncio.Future[Any]) -> None:
        if agent.closed:  # its pool takes no more work
            threading.Thread(target=work, daemon=True, name="aiograd-torch-rpc").start()
        else:
            agent.pool.run(work)

    source.add_done_callback(finished)
    return future


def _collect(futures: list[Any]) -> tuple[threading.Event, list[BaseException]]:
    """Return an event, set when all futures have ended or one has failed, and failures."""
    ended, failures, lock = threading.Event(), [], threading.Lock()
    left = len(futures)
    if not left:
        ended.set()

    def one(future: Any) -> None:
        nonlocal left
        try:
            future.value()
        except BaseException as error:
            failures.append(error)
            ended.set()
        with lock:
            left -= 1
            last = left == 0
        if last:
            ended.set()

    for future in futures:
        future.add_done_callback(one)
    return ended, failures


def wait_all(futures: list[Any]) -> list[Any]:
    """Wait for all futures and return their results; raise at the first failure.

    torch's own function leaves early only if the failure was made in C++, which a future of ours
    never is.
    """
    ended, failures = _collect(futures)
    if not ended.is_set():
        pool = next((f._agent.pool for f in futures if isinstance(f, CallFuture)), None)
        if pool is None:
            ended.wait()
        else:
            with pool.blocked():
                ended.wait()
    if failures:
        raise failures[0]
    return [future.wait() for future in futures]


def collect_all(futures: list[Any]) -> Any:
    """Return a future of the list of futures; it ends with them, or with the first failure."""
    collected = Future()
    lock, left = threading.Lock(), len(futures)
    if not left:
        collected.set_result(futures)
        return collected

    def one(future: Any) -> None:
        nonlocal left
        failure = None
        try:
            future.value()
        except Exception as error:
            failure = error
        with lock:
            if left <= 0:
                return
            left = 0 if failure is not None else left - 1
            last = left == 0
        if failure is not None:
            collected.set_exception(failure)
        elif last:
            collected.set_result(futures)

    for future in futures:
        future.add_done_callback(one)
    return collected


def is_future(value: Any) -> bool:
    """Tell whether a value is a future of torch, made in Python or in C++."""
    return isinstance(value, torch._C.Future)
