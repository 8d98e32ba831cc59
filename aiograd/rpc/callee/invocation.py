"""One call being served, and what it may give: a value, or something to await."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from aiograd.rpc.callee.functions import Target
from aiograd.rpc.caller.streams import StreamSource
from aiograd.rpc.observe.tracing import Visit

if TYPE_CHECKING:
    from aiograd.rpc.callee.execution import Running
    from aiograd.rpc.runtime.deadlines import Bucket


class Invocation:
    """One call being served."""

    # Defaults live in the class: most calls need few of these.
    args: Any = ()
    kwargs: Any = None
    context: contextvars.Context | None = None
    carried: Any = None  # the baggage it came with
    token: Any = None
    kept = False  # its result stays here
    along = False  # …and a copy goes along with the reply
    bucket: Bucket | None = None  # where its deadline waits
    task: asyncio.Task[Any] | None = None
    value: Any = None
    error: BaseException | None = None
    answered = False
    refused = False  # its function or service never began
    abandoned = False  # nobody waits for the answer any more
    in_thread = False
    stream: StreamSource | None = None
    record: bool | None = None  # the caller wants to know what it does; True: in detail
    visit: Visit | None = None  # while that is recorded

    def __init__(self, callee: Running, id: int, target: Target, kind: int) -> None:
        self.callee, self.id, self.target, self.kind = callee, id, target, kind
        self.func: Any = target.func

    # As a job of the thread pool.

    def run(self) -> None:
        if self.abandoned and not self.kept:
            return  # given up while it waited for a thread
        assert self.context is not None
        try:
            self.value = self.context.run(self.func, *self.args, **(self.kwargs or {}))
        except BaseException as error:
            self.error = error

    def finished(self) -> None:
        self.callee.returned(self)

    def expire(self) -> None:
        self.callee.expired(self)


async def itself(awaitable: Any) -> Any:
    try:
        return await awaitable
    finally:
        del awaitable  # a failed future, its error, the traceback and this frame: no circle


def unfinished(value: Any) -> bool:
    """Whether a result must be awaited. Other awaitables, such as an RRef, are values."""
    return isinstance(value, CoroutineType) or asyncio.isfuture(value)


def discard(value: Any) -> None:
    if inspect.iscoroutine(value):
        value.close()
    else:
        value.cancel()
