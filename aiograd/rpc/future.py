"""`Future`: the answer to a call that is under way."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiograd.rpc.deadlines import Bucket
    from aiograd.rpc.link import Link

_log = logging.getLogger("aiograd")
T = TypeVar("T")


class Future(asyncio.Future[T]):
    """An `asyncio.Future` that knows its call: cancelling it cancels the work over there.

    Await it any number of times. A failure that nobody looks at is logged with the line that made
    the call.
    """

    __slots__ = (
        "_bucket",
        "_code",
        "_function",
        "_id",
        "_instruction",
        "_kind",
        "_link",
        "_seconds",
        "_stream",
        "_undo",
    )

    def __init__(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(loop=loop)
        self._link: Link | None = None  # set while the call is under way
        self._id = 0  # its number there, once sent
        self._bucket: Bucket | None = None
        self._function = ""
        self._seconds = 0.0
        self._kind = "call"
        self._code: CodeType | None = None
        self._instruction = 0
        self._undo: list[Any] | None = None
        self._stream: Any = None

    def made_at(self, frame: FrameType | None) -> None:
        if frame is not None:
            self._code, self._instruction = frame.f_code, frame.f_lasti

    def cancel(self, msg: Any | None = None) -> bool:
        """Stop waiting, and cancel the coroutine over there, with everything it waits for."""
        link = self._link
        if link is not None and threading.get_ident() != link.agent.thread:
            if self.done():
                return False
            link.agent.loop.call_soon_threadsafe(self.cancel, msg)
            return True
        if not super().cancel(msg):
            return False
        if link is not None:
            link.cancelled(self)
        return True

    def expire(self) -> None:
        """Its deadline has come (called by `Deadlines`)."""
        if self._link is not None:
            self._link.expired(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Future cannot travel: await it and send its result")

    def __del__(self) -> None:
        # The base class sets this while an exception waits to be looked at.
        if getattr(self, "_log_traceback", False):
            self._log_traceback = False
            _log.error(
                "%s failed and nobody awaited it (called %s): %r",
                self._function or "a call",
                self._place(),
                self.exception(),
            )

    def _place(self) -> str:
        if self._code is None:
            return "from the library"
        line = self._code.co_firstlineno
        for start, end, number in _lines(self._code):
            if start <= self._instruction < end:
                line = number
        return f"at {self._code.co_filename}:{line}"


def _lines(code: CodeType) -> list[tuple[int, int, int]]:
    return [(start, end, line) for start, end, line in code.co_lines() if line is not None]
