"""What distributed autograd asks of its agent, in the words of `dist`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from contextvars import Context as Variables
from typing import Any, TypeVar

from aiograd.rpc import remote_exceptions
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Departure

T = TypeVar("T")


class Shell:
    """Carries what the engine decides: on the loop, in a thread, to a peer, later."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.name = agent.name

    def on_loop(self, action: Callable[..., None], *args: Any) -> None:
        """Do something on the worker's loop: now if this is its thread, else soon."""
        if threading.get_ident() == self.agent.thread:
            action(*args)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and everything with it
                self.agent.loop.call_soon_threadsafe(action, *args)

    def give_way(self) -> None:
        """Let a process that we have just woken up have this core, if it has found no other."""
        self.agent.runtime.give_way()

    def later(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.agent.loop.call_later(seconds, action, *args)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a function off the loop, under the variables of the caller."""
        job = _Job(function, asyncio.get_running_loop().create_future())
        self.agent.pool.submit(job)
        await job.done
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[no-any-return]

    def insist(self, peer: PeerInfo, service: str, *args: Any) -> asyncio.Future[Any]:
        """Tell a peer something idempotent until it has heard it, however long that takes."""
        future: asyncio.Future[Any] = self._freely(
            lambda: self.agent.request(peer, service, *args, timeout=math.inf, retry=True)
        )
        future.add_done_callback(_look_at)
        return future

    def ask(self, peer: str | PeerInfo, service: str, *args: Any, timeout: float) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._freely(
            lambda: self.agent.request(peer, service, *args, timeout=timeout)
        )
        return future

    def _freely(self, action: Callable[[], T]) -> T:
        """Outside the time budget of whatever call is running."""
        variables: Variables = self.agent.context.copy()
        return variables.run(action)

    def describe(self, error: BaseException, peer: PeerInfo) -> Any:
        """An error as a peer can read it."""
        return remote_exceptions.describe(self.agent.codec_for(peer), error, Departure(peer, "error"))

    def rebuild(self, fault: Any, sender: PeerInfo, worker: str) -> Exception:
        """What `sender` described as the error of some worker."""
        return remote_exceptions.rebuild(self.agent.codec_for(sender), fault, worker)


class _Job:
    """One function for the agent's threads."""

    def __init__(self, function: Callable[[], Any], done: asyncio.Future[None]) -> None:
        self.function, self.done = function, done
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error

    def finished(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
