"""Streams, the reader's end: values of a remote generator, one after the other.

caller                              callee (`callee.execution`)
CALL (stream)          ──▶          starts the generator with `WINDOW` credits
                       ◀── ITEM     one credit less; at none left it waits
CREDIT n               ──▶          the reader has taken n
                       ◀── REPLY    the end (or FAULT)
CANCEL                 ──▶          the reader left: the generator is closed
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self, TypeVar

from aiograd.errors import DeadlineExceeded, ProtocolError, RpcError
from aiograd.rpc.callee.execution import WINDOW
from aiograd.rpc.channel import Channel
from aiograd.rpc.future import Future
from aiograd.wire.messages import CREDIT

T = TypeVar("T")


class Stream(AsyncIterator[T]):
    """The caller's end: `async for item in stream`.

    Leaving the loop closes the generator, and so does cancelling a task that waits for an item.

        >>> stream = ag.rpc_stream("worker1", range, args=(1000,))
        >>> async with stream:
        ...     async for number in stream:
        ...         if number == 2:
        ...             break
        >>> number
        2
    """

    def __init__(self, future: Future[Any], channel: Channel, patience: float | None) -> None:
        self._future, self._channel = future, channel
        self._patience = patience  # seconds to wait for one item, where there is no deadline
        self._items: deque[tuple[T, list[asyncio.Future[Any]], BaseException | None]] = deque()
        self._taken = 0  # items for which no credit was given back yet
        self._over = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        future.info.stream = _Mailbox(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Stream cannot travel: read it here and send its items")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self._wait()
        if not self._items:
            error, self._error = self._error, None
            try:
                if error is not None:
                    raise error
            finally:  # its traceback holds this frame, which must not hold the error in turn
                del error
            raise StopAsyncIteration
        value, waits, error = self._items.popleft()
        # Credits go back for half a window at a time: one message for four items, while the sender
        # still has the other half to go on with.
        self._taken += 1
        if self._taken >= WINDOW // 2 and not self._over:
            self._channel.send_control(CREDIT, self._future.info.id, self._taken)
            self._taken = 0
        # After the credit was given back: the next items need not wait for what this one waits for.
        try:
            while waits:
                await waits.pop(0)
            if error is not None:
                raise error
        finally:  # as above
            del error
        return value

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._patience) as limit:
                # In a loop: between the event and this task's turn another reader may have taken
                # the item.
                while not self._items and not self._over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            # A TimeoutError of the surrounding code, not of this limit.
            if not limit.expired():
                raise
            self.cancel()
            name = self._future.info.name
            raise DeadlineExceeded(self._channel.peer.name, name, self._patience or 0.0) from None
        except asyncio.CancelledError:
            # The reader may be kept alive by the traceback, and nobody would close the generator.
            self.cancel()
            name = self._future.info.name
            self._error = RpcError(f"the stream of {name}() was cancelled while it was read")
            raise

    async def aclose(self) -> None:
        """Stop reading; the remote generator is closed."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop reading, and drop what has not been read; the remote generator is closed."""
        self._items.clear()
        if not self._over:
            self._over = True
            self._future.cancel()

    def __del__(self) -> None:
        if not self._over:
            loop = self._future.get_loop()
            # A finaliser may run in any thread, where a future must not be cancelled directly.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._future.cancel)

    def item(self, value: T, waits: list[asyncio.Future[Any]], error: BaseException | None) -> None:
        """Take the next item; it may be read when all `waits` are done."""
        # Twice the window, as a margin: credits and items cross on their way.
        if len(self._items) > 2 * WINDOW:
            peer = self._channel.peer.name
            raise ProtocolError(f"{peer} sends more items than it was allowed to", peer)
        self._items.append((value, waits, error))
        self._news.set()

    def ended(self, error: BaseException | None) -> None:
        """Take note of the end of the stream."""
        if not self._over:
            self._over, self._error = True, error
            self._news.set()


class _Mailbox:
    """What the link knows of a stream: a weak reference, so that dropping the stream is noticed."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream = weakref.ref(stream)

    def item(self, *item: Any) -> None:
        """Hand an item on, if somebody still reads."""
        if (stream := self._stream()) is not None:
            stream.item(*item)

    def ended(self, error: BaseException | None) -> None:
        """Hand the end on, if somebody still reads."""
        if (stream := self._stream()) is not None:
            stream.ended(error)
