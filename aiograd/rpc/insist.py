"""Requests that are sent again until they are answered.

For the library's own idempotent messages only: a user's call runs at most once. Ends with the first
answer, at the deadline, or when the peer is gone.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, WorkerClosed, WorkerLost
from aiograd.rpc.future import Future, fail

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.directory import PeerInfo

_FIRST, _LONGEST = 0.2, 2.0  # seconds between attempts: doubled each time


def insist(
    agent: Agent,
    future: Future[Any],
    peer: PeerInfo,
    service: str,
    args: tuple[Any, ...],
    deadline: float,
    carry: bool,
) -> None:
    """Answer `future` with the first answer to as many requests as it takes."""

    def start() -> None:
        task = agent.spawn(_insist(agent, future, peer, service, args, deadline, carry), context)
        future.add_done_callback(lambda _: task.cancel())

    context = agent.context.copy()
    if asyncio._get_running_loop() is agent.loop:
        start()
    else:
        agent.from_thread(start)


async def _insist(
    agent: Agent,
    future: Future[Any],
    peer: PeerInfo,
    service: str,
    args: tuple[Any, ...],
    deadline: float,
    carry: bool,
) -> None:
    attempts: set[Future[Any]] = set()
    pause = _FIRST
    try:
        while not future.done():
            left = deadline - agent.loop.time()
            if left <= 0:
                raise DeadlineExceeded(peer.name, service, future._seconds)
            attempt = agent.request(peer, service, *args, timeout=math.inf, carry=carry)
            attempts.add(attempt)
            until = agent.loop.time() + min(pause, left)
            while attempts and (wait := until - agent.loop.time()) > 0:
                done, attempts = await asyncio.wait(
                    attempts, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                for each in done:
                    if _answer(agent, future, peer, each):
                        return
            if not attempts:
                await asyncio.sleep(max(until - agent.loop.time(), 0))
            pause = min(pause * 2, _LONGEST)
    except asyncio.CancelledError:
        fail(future, WorkerClosed(f"{agent.name} was shut down", agent.name))
        raise
    except Exception as error:
        fail(future, error)
    finally:
        for attempt in attempts:
            attempt.cancel()


def _answer(agent: Agent, future: Future[Any], peer: PeerInfo, attempt: Future[Any]) -> bool:
    """Whether an attempt that has ended is the answer; one that never left is not."""
    error = attempt.exception()
    if error is None:
        if not future.done():
            future.set_result(attempt.result())
        return True
    if isinstance(error, WorkerLost) and agent.link(peer).error is None:
        return False
    fail(future, error)
    return True
