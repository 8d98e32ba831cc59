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
from aiograd.rpc.callee.invocation import Incoming, discard, itself, unfinished
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

    async def _wait_and_run(self, incoming: Incoming, waits: list[asyncio.Future[Any]]) -> None:
        try:
            while waits:  # none is held on to: the traceback of its error would hold it in turn
                await waits.pop(0)
        except asyncio.CancelledError as error:
            self._fail(incoming, error)
            incoming.args, incoming.kwargs = (), None  # see `_abandon`
            raise
        except Exception as error:
            return self._refuse(incoming, error)
        incoming.task = None
        if not incoming.abandoned:
            self._run(incoming)

    def _run(self, incoming: Incoming) -> None:
        context, agent = incoming.context, self._agent
        assert context is not None
        if incoming.kind != CALL:
            return self._serve(incoming)
        if incoming.record is not None or agent.profiles is not None:
            incoming.visit = visit(incoming, agent)
        if incoming.stream is not None:
            incoming.task = agent.loop.create_task(incoming.stream.drive(), context=context)
        elif incoming.target.mode == TASK:
            incoming.task = agent.loop.create_task(self._perform(incoming), context=context)
        elif incoming.target.mode == THREAD:
            incoming.in_thread = True
            agent.pool.submit(incoming)
        else:
            try:
                value = context.run(incoming.func, *incoming.args, **(incoming.kwargs or {}))
            except BaseException as error:
                return self._fail(incoming, error)
            self._result(incoming, value)

    def _serve(self, incoming: Incoming) -> None:
        """A service of the library itself: always on the loop."""
        handler = self._agent.services.get(incoming.target.name)
        assert incoming.context is not None
        try:
            if handler is None:
                raise ProtocolError(f"no service {incoming.target.name!r}", self._agent.name)
            value = incoming.context.run(handler, self._link.peer, *incoming.args)
        except Exception as error:
            return self._fail(incoming, error)
        self._result(incoming, value)

    def _result(self, incoming: Incoming, value: Any) -> None:
        if value is not None and unfinished(value):
            incoming.func, incoming.args, incoming.kwargs = itself, (value,), None
            self.running[incoming.id] = incoming
            incoming.task = self._agent.loop.create_task(
                self._perform(incoming), context=incoming.context
            )
        else:
            self.succeed(incoming, value)

    async def _perform(self, incoming: Incoming) -> None:
        try:
            value = await incoming.func(*incoming.args, **(incoming.kwargs or {}))
        except asyncio.CancelledError as error:
            self._fail(incoming, error)
            if incoming.abandoned:
                raise
        except BaseException as error:  # SystemExit in a function must not end the worker
            self._fail(incoming, error)
        else:
            self.succeed(incoming, value)
        finally:
            incoming.args, incoming.kwargs = (), None  # an error's traceback holds this frame

    def returned(self, incoming: Incoming) -> None:
        """A thread is done with it."""
        self._agent.polling.function_ended()
        if incoming.abandoned:
            self.abandoned -= 1
        error, incoming.error = incoming.error, None  # its traceback holds `incoming` in turn
        if error is not None:
            self._fail(incoming, error)
        elif incoming.abandoned and not incoming.kept:
            self._forget(incoming)
            if unfinished(incoming.value):
                discard(incoming.value)
        else:
            incoming.in_thread = False
            self._result(incoming, incoming.value)

    # ── ending early ────────────────────────────────────────────────────────────────────────────

    def credit(self, id: int, count: int) -> None:
        """The reader of a stream can take more."""
        incoming = self.running.get(id)
        if incoming is not None and incoming.stream is not None:
            incoming.stream.credit(count)

    def expired(self, incoming: Incoming) -> None:
        incoming.bucket = None
        if incoming.id in self.running:
            self._abandon(incoming)

    def _abandon(self, incoming: Incoming) -> None:
        if incoming.abandoned:
            return
        incoming.abandoned = True
        task = incoming.task
        if task is not None:
            task.cancel()
            coroutine: Any = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                # A task cancelled before its first step never runs, so nothing in it can tell.
                if incoming.func is itself:
                    discard(incoming.args[0])
                self._fail(incoming, asyncio.CancelledError())
                # The task keeps its error, whose traceback holds the frame that holds `incoming`:
                # a circle through a field of the task that the collector does not look at.
                incoming.args, incoming.kwargs = (), None
        elif incoming.in_thread:
            self.abandoned += 1
            self.running.pop(incoming.id, None)

    def tasks(self) -> list[asyncio.Task[Any]]:
        return [each.task for each in self.running.values() if each.task is not None]
