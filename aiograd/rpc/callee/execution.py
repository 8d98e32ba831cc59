"""Calls of one peer while they run: on the loop, as a task or in a thread, to their end or not.

A coroutine is cancelled when its caller gives up or its time is over. A thread cannot be stopped:
its result is dropped, and it counts as abandoned until it returns.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from aiograd.errors import ProtocolError
from aiograd.rpc.callee.functions import TASK, THREAD
from aiograd.rpc.callee.invocation import Invocation, discard, itself, unfinished
from aiograd.rpc.callee.responses import Answering
from aiograd.rpc.observe.tracing import visit
from aiograd.wire.messages import CALL

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link


class Running(Answering):
    """The calls of one peer that run here."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.abandoned = 0  # threads that compute for nobody

    async def _wait_and_run(self, invocation: Invocation, waits: list[asyncio.Future[Any]]) -> None:
        try:
            while waits:  # none is carried on to: the traceback of its error would hold it in turn
                await waits.pop(0)
        except asyncio.CancelledError as error:
            self._fail(invocation, error)
            invocation.args, invocation.kwargs = (), None  # see `_abandon`
            raise
        except Exception as error:
            return self._refuse(invocation, error)
        invocation.task = None
        if not invocation.abandoned:
            self._run(invocation)

    def _run(self, invocation: Invocation) -> None:
        context, agent = invocation.context, self._agent
        assert context is not None
        if invocation.kind != CALL:
            return self._serve(invocation)
        if invocation.record is not None or agent.profiles is not None:
            invocation.visit = visit(invocation, agent)
        if invocation.stream is not None:
            invocation.task = agent.loop.create_task(invocation.stream.drive(), context=context)
        elif invocation.target.mode == TASK:
            invocation.task = agent.loop.create_task(self._perform(invocation), context=context)
        elif invocation.target.mode == THREAD:
            invocation.in_thread = True
            agent.pool.submit(invocation)
        else:
            try:
                value = context.run(invocation.func, *invocation.args, **(invocation.kwargs or {}))
            except BaseException as error:
                return self._fail(invocation, error)
            self._result(invocation, value)

    def _serve(self, invocation: Invocation) -> None:
        """A service of the library itself: always on the loop."""
        handler = self._agent.services.get(invocation.target.name)
        assert invocation.context is not None
        try:
            if handler is None:
                raise ProtocolError(f"no service {invocation.target.name!r}", self._agent.name)
            value = invocation.context.run(handler, self._link.peer, *invocation.args)
        except Exception as error:
            return self._fail(invocation, error)
        self._result(invocation, value)

    def _result(self, invocation: Invocation, value: Any) -> None:
        if value is not None and unfinished(value):
            invocation.func, invocation.args, invocation.kwargs = itself, (value,), None
            self.running[invocation.id] = invocation
            invocation.task = self._agent.loop.create_task(
                self._perform(invocation), context=invocation.context
            )
        else:
            self.succeed(invocation, value)

    async def _perform(self, invocation: Invocation) -> None:
        try:
            value = await invocation.func(*invocation.args, **(invocation.kwargs or {}))
        except asyncio.CancelledError as error:
            self._fail(invocation, error)
            if invocation.abandoned:
                raise
        except BaseException as error:  # SystemExit in a function must not end the worker
            self._fail(invocation, error)
        else:
            self.succeed(invocation, value)
        finally:
            invocation.args, invocation.kwargs = (), None  # an error's traceback holds this frame

    def returned(self, invocation: Invocation) -> None:
        """A thread is done with it."""
        self._agent.polling.function_ended()
        if invocation.abandoned:
            self.abandoned -= 1
        error, invocation.error = invocation.error, None  # its traceback holds `invocation` in turn
        if error is not None:
            self._fail(invocation, error)
        elif invocation.abandoned and not invocation.kept:
            self._forget(invocation)
            if unfinished(invocation.value):
                discard(invocation.value)
        else:
            invocation.in_thread = False
            self._result(invocation, invocation.value)

    # ── ending early ────────────────────────────────────────────────────────────────────────────

    def credit(self, id: int, count: int) -> None:
        """The reader of a stream can take more."""
        invocation = self.running.get(id)
        if invocation is not None and invocation.stream is not None:
            invocation.stream.credit(count)

    def expired(self, invocation: Invocation) -> None:
        invocation.bucket = None
        if invocation.id in self.running:
            self._abandon(invocation)

    def _abandon(self, invocation: Invocation) -> None:
        if invocation.abandoned:
            return
        invocation.abandoned = True
        task = invocation.task
        if task is not None:
            task.cancel()
            coroutine: Any = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                # A task cancelled before its first step never runs, so nothing in it can tell.
                if invocation.func is itself:
                    discard(invocation.args[0])
                self._fail(invocation, asyncio.CancelledError())
                # The task keeps its error, whose traceback holds the frame that holds `invocation`:
                # a circle through a field of the task that the collector does not look at.
                invocation.args, invocation.kwargs = (), None
        elif invocation.in_thread:
            self.abandoned += 1
            self.running.pop(invocation.id, None)

    def tasks(self) -> list[asyncio.Task[Any]]:
        return [each.task for each in self.running.values() if each.task is not None]
