"""`Future`: the answer to a call that is under way."""

from __future__ import annotations

import asyncio
import functools
import logging
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiograd.rpc.caller.calls import Caller
    from aiograd.rpc.observe.tracing import Trace
    from aiograd.rpc.runtime.deadlines import Bucket

_log = logging.getLogger("aiograd")
T = TypeVar("T")


class Future(asyncio.Future[T]):
    """An `asyncio.Future` that knows its call: cancelling it cancels the work over there.

    Await it any number of times. A failure that nobody looks at is logged with the line that made
    the call.
    """

    # Set by who makes it (`prepare`): an `__init__` of our own would cost as much as the future.
    # One that user code makes has none of these.
    __slots__ = (
        "_bucket",
        "_caller",
        "_code",
        "_frame",
        "_function",
        "_id",
        "_instruction",
        "_kind",
        "_seconds",
        "_stream",
        "_trace",
        "_undo",
    )
    _bucket: Bucket | None  # where its deadline waits
    _caller: Caller | None  # set while the call is under way
    _code: CodeType | None  # where it was made
    _frame: tuple[int, bytes] | None  # its place in the outbox; only if its result stays there
    _instruction: int
    _function: str
    _id: int  # its number there, once sent
    _kind: str
    _seconds: float
    _stream: Any
    _trace: Trace | None  # while somebody records it
    _undo: list[Any] | None

    def cancel(self, msg: Any | None = None) -> bool:
        """Stop waiting, and cancel the coroutine over there, with everything it waits for."""
        loop = self.get_loop()
        if asyncio._get_running_loop() is not loop and loop.is_running():
            # In another thread, where its call may be about to begin: behind that.
            if self.done():
                return False
            loop.call_soon_threadsafe(self.cancel, msg)
            return True
        caller = getattr(self, "_caller", None)
        if not super().cancel(msg):
            return False
        if caller is not None:
            caller.cancelled(self)
        return True

    def expire(self) -> None:
        """Its deadline has come (called by `Deadlines`)."""
        if self._caller is not None:
            self._caller.expired(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Future cannot travel: await it and send its result")

    def set_exception(self, exception: Any) -> None:
        super().set_exception(exception)
        self.__class__ = _failed(self.__class__)

    def _place(self) -> str:
        code = getattr(self, "_code", None)
        if code is None:
            return "from the library"
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= self._instruction < end and number is not None:
                line = number
        return f"at {code.co_filename}:{line}"


def prepare(future: Future[Any], function: str = "") -> Future[Any]:
    """A future that is no call so far."""
    future._bucket = future._caller = future._code = future._trace = future._undo = None
    future._stream = future._frame = None
    future._function, future._kind, future._seconds = function, "call", 0.0
    future._id = future._instruction = 0
    return future


@functools.cache
def _failed(kind: type[Future[Any]]) -> type[Future[Any]]:
    """The class of those that have failed: only they have something to say in the end."""
    return type(kind.__name__, (kind,), {"__slots__": (), "__del__": _tell})


def _tell(future: Future[Any]) -> None:
    # The base class sets this while an exception waits to be looked at.
    if future._log_traceback:
        future._log_traceback = False
        _log.error(
            "%s failed and nobody awaited it (called %s): %r",
            getattr(future, "_function", "") or "a call",
            future._place(),
            future.exception(),
        )


def fail(future: Future[Any], error: BaseException) -> None:
    """End a future with an error, unless it has ended."""
    if not future.done():
        future.set_exception(error)
