"""Calls that may be made again: those of functions marked `@idempotent`, when a worker is lost.

A call runs at most once unless its author says that twice does no harm. Then it is made again, also
at the next start of a worker of that name, after pauses that grow and differ:

    call ──WorkerLost, Overloaded──▶ pause ──▶ call … at most 4 times more, never past the deadline

Retries of everyone at once are what keeps a sick cluster sick, so they have an allowance: calls to
a worker earn a tenth of a retry each.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import Overloaded, WorkerClosed, WorkerLost
from aiograd.rpc.future import Future, fail, prepare
from aiograd.wire.fastcodec import decode_call, encode_call

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

RETRIES: Final = 4
EARNED: Final = 0.1  # of a retry, by each call: at most a tenth more load
SAVED: Final = 10.0  # retries a quiet caller may make at once
_FIRST: Final = 0.2  # seconds before the first retry, doubled each time: 3 s for a restart in all


class Allowance:
    """How many retries the calls to one worker have earned."""

    def __init__(self) -> None:
        self._left = SAVED

    def earn(self) -> None:
        self._left = min(SAVED, self._left + EARNED)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def pause_before(retry: int, random: Random) -> float:
    """Seconds to wait before the retry of this number, from 0: never the same for two callers."""
    return _FIRST * 2.0**retry * random.uniform(0.5, 1.5)


def worth_another(error: BaseException | None, worker: str) -> bool:
    """Whether it was that worker which failed the call, and another try may go better."""
    # Not their subclasses: an owner that is gone, or one that is silent, stays so.
    return type(error) in (WorkerLost, Overloaded) and getattr(error, "worker", "") == worker


def persist(
    agent: Agent,
    to: Any,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float | None,
    frame: FrameType,
    future: Future[Any] | None,
) -> Future[Any]:
    """Call a function that may be called again; raises what is known before sending."""
    future = prepare(future if future is not None else Future(loop=agent.loop))
    Persistence(agent, to, func, args, kwargs, timeout, frame, future).start()
    return future


class Persistence:
    """All attempts at one call; `future` gets the outcome of the last."""

    def __init__(
        self,
        agent: Agent,
        to: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        frame: FrameType,
        future: Future[Any],
    ) -> None:
        self.future = future
        self._agent, self._to, self._func, self._frame = agent, to, func, frame
        self._worker = agent.directory.find(to).name
        self._arguments: tuple[Any, Any] = (args, kwargs)
        # What is plain is taken as it is now; arrays and objects are borrowed until the end.
        self._frozen = encode_call(args, kwargs)
        self._timeout = timeout
        _, self._deadline = agent.deadline(timeout)
        allowances: dict[str, Allowance] = agent.parts.setdefault(Allowance, {})
        self._allowance = allowances.setdefault(self._worker, Allowance())
        self._context = contextvars.copy_context()
        self._retries = 0
        self._under_way: asyncio.Future[Any] | None = None  # the attempt, or the pause before it

    def start(self) -> None:
        """Call for the first time; raises what is known before sending."""
        self._allowance.earn()
        self.future.add_done_callback(self._over)
        self._attempt(self._timeout)

    def _attempt(self, timeout: float | None) -> None:
        attempt = prepare(Future(loop=self._agent.loop))
        attempt.add_done_callback(self._ended, context=self._context)
        args, kwargs = self._arguments
        if self._retries and self._frozen is not None:
            args, kwargs = decode_call(self._frozen)
        self._under_way = attempt
        self._agent.call(
            self._to,
            self._func,
            args,
            kwargs,
            timeout=timeout,
            frame=self._frame,
            future=attempt,
            once=True,
        )
        self.future._function, self.future._seconds = attempt._function, attempt._seconds
        self.future._code, self.future._instruction = attempt._code, attempt._instruction

    def _ended(self, attempt: Future[Any]) -> None:
        if attempt.cancelled():
            self.future.cancel()
        elif (error := attempt.exception()) is None:
            if not self.future.done():
                self.future.set_result(attempt.result())
        elif self.future.done() or not self._again(error):
            fail(self.future, error)

    def _again(self, error: BaseException) -> bool:
        agent = self._agent
        if self._retries == RETRIES or agent.closed or not worth_another(error, self._worker):
            return False
        pause = pause_before(self._retries, agent.runtime.random)
        if agent.loop.time() + pause >= self._deadline or not self._allowance.spend():
            return False
        self._retries += 1
        self._under_way = agent.spawn(self._wait_and_attempt(pause), self._context)
        return True

    async def _wait_and_attempt(self, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            fail(self.future, WorkerClosed(f"{self._agent.name} was shut down", self._agent.name))
            raise
        left = self._deadline - self._agent.loop.time()
        if self.future.done():
            return
        try:
            self._attempt(math.inf if left == math.inf else max(left, 1e-3))
        except Exception as error:
            fail(self.future, error)

    def _over(self, future: Future[Any]) -> None:
        if future.cancelled() and self._under_way is not None:
            self._under_way.cancel()
