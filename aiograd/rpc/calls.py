"""The public functions for calls; each finds the current agent and lets it work."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiograd.errors import RpcError
from aiograd.rpc.current import current_agent
from aiograd.rpc.future import Future

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class WrongThread(RpcError, RuntimeError):
    """A blocking call was made on an event loop's thread, where it would stop everything."""


def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Future[Any]:
    """Call `func(*args, **kwargs)` on worker `to`; await the result.

    Starts at once. Unknown workers and arguments that cannot travel are raised here, everything
    else by `await`. `timeout=None` is what is left of the surrounding call's time, else
    `Options.timeout`.
    """
    return current_agent().call(to, func, args, kwargs, timeout=timeout, frame=sys._getframe(1))


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """The blocking form of `rpc_async`, for code off the loop."""
    _refuse_on_loop("await ag.rpc_async(...)")
    agent = current_agent()
    return _wait(agent, agent.call(to, func, args, kwargs, timeout=timeout, frame=sys._getframe(1)))


def run_sync(awaitable: Awaitable[T]) -> T:
    """Wait, off the loop, for anything awaitable: it runs on the worker's loop, in this context."""
    _refuse_on_loop("await it")
    return _wait(current_agent(), awaitable)  # type: ignore[no-any-return]


def inline(func: F) -> F:
    """Mark a plain function as short and non-blocking: it runs on the callee's loop."""
    func.__aiograd_inline__ = True  # type: ignore[attr-defined]
    return func


def expose(func: F) -> F:
    """Let `registered` and `restricted` peers call this function, by its module and name."""
    func.__aiograd_exposed__ = True  # type: ignore[attr-defined]
    return func


def _refuse_on_loop(instead: str) -> None:
    if asyncio._get_running_loop() is not None:
        raise WrongThread(f"this is an event loop's thread, blocking would stop it: {instead}")


def _wait(agent: Any, awaitable: Any) -> Any:
    outcome: list[Any] = []
    ended = agent.runtime.event()
    context = contextvars.copy_context()
    task: list[asyncio.Task[Any]] = []

    async def work() -> None:
        try:
            outcome.append((await awaitable, None))
        except BaseException as error:
            outcome.append((None, error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            ended.set()

    def start() -> None:
        task.append(agent.spawn(work(), context))

    agent.loop.call_soon_threadsafe(start)
    with agent.pool.blocked():
        try:
            ended.wait()
        except BaseException:  # an interrupt: what we waited for is no longer wanted
            agent.loop.call_soon_threadsafe(lambda: task and task[0].cancel())
            raise
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
