"""Where the time goes: a record of calls, and of what they did on other workers.

    with record() as spans:
        await rpc_async("worker1", train_step)
    spans.save("trace.json")            # opens in chrome://tracing or Perfetto

Recording is a property of the context: calls made inside are noted here, run recorded over there,
and bring the notes of their callees back, however deep. Nothing is recorded, and nothing is paid,
outside. Results that stay (`remote`) and registered ops are noted at the caller only.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiograd.rpc.current import current_agent
from aiograd.rpc.functions import INLINE, TASK, function_name, run_mode
from aiograd.rpc.future import Future

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

RECORDER: Final[ContextVar[Recorder | None]] = ContextVar("aiograd_recorder", default=None)


class Span(NamedTuple):
    """Something that took time on a worker. `start` is that worker's clock, in seconds."""

    name: str
    worker: str
    start: float
    seconds: float
    error: str = ""


class Recorder:
    """The spans of one recording, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, span: Span) -> None:
        self.spans.append(span)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def chrome_trace(self) -> dict[str, Any]:
        """The recording as Chrome's trace format: one row per worker."""
        rows = {name: row for row, name in enumerate(sorted({s.worker for s in self.spans}))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": row, "args": {"name": name}}
            for name, row in rows.items()
        ]
        for span in self.spans:
            event = {
                "ph": "X",
                "name": span.name,
                "pid": rows[span.worker],
                "tid": 0,
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"error": span.error} if span.error else {},
            }
            events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.chrome_trace(), file)


@contextlib.contextmanager
def record() -> Iterator[Recorder]:
    """Record the calls made in this block, and by the tasks it starts."""
    recorder = Recorder()
    token = RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        RECORDER.reset(token)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Note how long this block takes, if somebody records."""
    recorder = RECORDER.get()
    if recorder is None:
        yield
        return
    agent = current_agent()
    start, error = agent.runtime.time(), ""
    try:
        yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        recorder.add(Span(name, agent.name, start, agent.runtime.time() - start, error))


def key(kind: str, function: str, source: str, destination: str) -> str:
    """The name of a call's span."""
    return f"rpc_{kind}#{function}({source} -> {destination})"


# ── at the caller ───────────────────────────────────────────────────────────────────────────────


class _Recorded(Future[Any]):
    """The answer to a recorded call: takes the callee's spans out of it."""

    _recorder: Recorder
    _prefix = ""

    def set_result(self, result: Any, /) -> None:
        value, spans = result
        for each in spans:
            found = Span(*each)
            self._recorder.add(found._replace(name=f"{self._prefix}/{found.name}"))
        super().set_result(value)


def recorded_call(
    agent: Agent, recorder: Recorder, to: Any, func: Any, args: Any, kwargs: Any, **rest: Any
) -> Future[Any]:
    """Make a call and note it; with a function of the user's, also what it does over there."""
    token = RECORDER.set(None)
    try:
        peer = agent.link(to).peer
        op_name = getattr(func, "op_name", None)
        kind = "remote" if rest["keep"] is not None else "op" if op_name else "call"
        name = key(kind, op_name or function_name(func), agent.name, peer.name)
        start = agent.runtime.time()
        future: Future[Any]
        if kind == "call" and callable(func):
            answer, given = _Recorded(loop=agent.loop), rest["future"]
            answer._recorder, answer._prefix = recorder, name
            rest["future"] = answer
            agent.call(to, _runner(func), (func, tuple(args), kwargs), None, **rest)
            answer._function = function_name(func)
            future = answer if given is None else _passed_on(answer, given)
        else:
            future = agent.call(to, func, args, kwargs, **rest)
    finally:
        RECORDER.reset(token)

    def ended(_: object) -> None:
        error = "CancelledError" if future.cancelled() else ""
        if not error and (raised := _peek(future)) is not None:
            error = type(raised).__name__
        recorder.add(Span(name, agent.name, start, agent.runtime.time() - start, error))

    future.add_done_callback(ended)
    return future


def _passed_on(answer: Future[Any], given: Future[Any]) -> Future[Any]:
    """Let the caller's own kind of future end as the answer does, and the other way round."""

    def answered(_: object) -> None:
        if answer.cancelled():
            given.cancel()
        elif not given.done():
            error = answer.exception()
            if error is not None:
                given.set_exception(error)
            else:
                given.set_result(answer.result())

    answer.add_done_callback(answered)
    given.add_done_callback(lambda _: answer.cancel())
    return given


def _peek(future: Future[Any]) -> BaseException | None:
    """The error of a future, without counting as somebody who looked at it."""
    return getattr(future, "_exception", None)


# ── at the callee ───────────────────────────────────────────────────────────────────────────────


def _runner(func: Callable[..., Any]) -> Callable[..., Any]:
    """What calls the function over there, running where the function itself would."""
    mode = run_mode(func)
    return _run_task if mode == TASK else _run_inline if mode == INLINE else _run_thread


def _run_thread(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    recorder = Recorder()
    RECORDER.set(recorder)
    with span(function_name(func)):
        value = func(*args, **(kwargs or {}))
    if inspect.iscoroutine(value) or asyncio.isfuture(value):
        return _finish(value, recorder)
    return value, [tuple(each) for each in recorder]


def _run_inline(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    return _run_thread(func, args, kwargs)


_run_inline.__aiograd_inline__ = True  # type: ignore[attr-defined]


async def _run_task(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    recorder = Recorder()
    RECORDER.set(recorder)
    with span(function_name(func)):
        value = await func(*args, **(kwargs or {}))
    return value, [tuple(each) for each in recorder]


async def _finish(awaitable: Any, recorder: Recorder) -> Any:
    return await awaitable, [tuple(each) for each in recorder]
