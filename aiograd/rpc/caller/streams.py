"""Streams: values of a remote generator, one after the other.

caller                              callee
CALL (stream)          ──▶          starts the generator with `WINDOW` credits
                       ◀── ITEM     one credit less; at none left it waits
CREDIT n               ──▶          the reader has taken n
                       ◀── REPLY    the end (or FAULT)
CANCEL                 ──▶          the reader left: the generator is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, ProtocolError, RpcError, SerializationError
from aiograd.rpc.envelope import pack
from aiograd.rpc.extension import Departure
from aiograd.wire.messages import CREDIT, ITEM

if TYPE_CHECKING:
    from aiograd.rpc.callee.invocation import Invocation
    from aiograd.rpc.future import Future
    from aiograd.rpc.link.link import Link

WINDOW = 8  # items that may be on their way: enough to hide the journey, few enough to stop soon
_END = object()


class StreamSource:
    """The callee's end: drives the generator as far as credits reach."""

    def __init__(self, link: Link, invocation: Invocation) -> None:
        self._link, self._incoming = link, invocation
        self._credits = WINDOW
        self._more = asyncio.Event()

    def credit(self, count: int) -> None:
        self._credits = min(self._credits + count, WINDOW)
        self._more.set()

    async def drive(self) -> None:
        invocation, callee = self._incoming, self._link.callee
        try:
            generator = invocation.func(*invocation.args, **(invocation.kwargs or {}))
            if inspect.isasyncgen(generator) or hasattr(generator, "__aiter__"):
                await self._drive_async(generator)
            elif inspect.isgenerator(generator) or hasattr(generator, "__iter__"):
                await self._drive_plain(iter(generator))
            else:
                if inspect.iscoroutine(generator):
                    generator.close()
                kind = type(generator).__name__
                raise TypeError(f"rpc_stream needs a generator function, this one gave {kind}")
        except asyncio.CancelledError as error:
            callee.fail(invocation, error)
            if invocation.abandoned:
                raise
        except BaseException as error:
            callee.fail(invocation, error)
        else:
            callee.succeed(invocation, None)

    async def _drive_async(self, generator: Any) -> None:
        try:
            async for item in generator:
                await self._send(item)
        finally:
            if hasattr(generator, "aclose"):
                await generator.aclose()

    async def _drive_plain(self, generator: Any) -> None:
        run = self._link.agent.pool.run
        try:
            while (item := await run(next, generator, _END)) is not _END:
                await self._send(item)
        finally:
            if hasattr(generator, "close"):
                # It may still be inside `next` in its thread: it is closed when that is over.
                closing = self._link.agent.spawn(_close(run, generator))
                with contextlib.suppress(Exception):
                    await asyncio.shield(closing)

    async def _send(self, item: Any) -> None:
        while self._credits == 0:
            self._more.clear()
            await self._more.wait()
        self._credits -= 1
        link, invocation = self._link, self._incoming
        departure = Departure(link.peer, "reply", invocation.carried)
        try:
            flags, payload = pack(link.agent, item, departure, "item", link.max_message)
        except SerializationError as error:
            raise SerializationError(error.path, error.what, link.agent.name) from None
        link.send(ITEM, flags, invocation.id, 0.0, 0, payload, "reply", departure.undo)


async def _close(run: Any, generator: Any) -> None:
    for _ in range(1000):
        try:
            await run(generator.close)
        except ValueError:  # it is still executing
            await asyncio.sleep(0.01)
        else:
            return


class Stream(AsyncIterator[Any]):
    """The caller's end: `async for item in stream`.

    Leaving the loop closes the generator, and so does cancelling a task that waits for an item.
    """

    def __init__(self, future: Future[Any], link: Link, patience: float | None) -> None:
        self._future, self._link = future, link
        self._patience = patience  # seconds to wait for one item, where there is no deadline
        self._items: deque[tuple[Any, list[asyncio.Future[Any]], BaseException | None]] = deque()
        self._taken = 0  # items for which no credit was given back yet
        self._over = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        future._stream = _Mailbox(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        await self._wait()
        if not self._items:
            error, self._error = self._error, None
            if error is not None:
                raise error
            raise StopAsyncIteration
        value, waits, error = self._items.popleft()
        self._taken += 1
        if self._taken >= WINDOW // 2 and not self._over:
            self._link.put_small(CREDIT, self._future._id, self._taken)
            self._taken = 0
        for each in waits:
            await each
        if error is not None:
            raise error
        return value

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._patience) as limit:
                while not self._items and not self._over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            self.cancel()
            name = self._future._function
            raise DeadlineExceeded(self._link.peer.name, name, self._patience or 0.0) from None
        except asyncio.CancelledError:
            # The reader may be kept alive by the traceback, and nobody would close the generator.
            self.cancel()
            name = self._future._function
            self._error = RpcError(f"the stream of {name}() was cancelled while it was read")
            raise

    async def aclose(self) -> None:
        """Stop reading; the remote generator is closed."""
        self.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._items.clear()
        if not self._over:
            self._over = True
            self._future.cancel()

    def __del__(self) -> None:
        if not self._over:
            loop = self._link.agent.loop
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._future.cancel)

    def item(
        self, value: Any, waits: list[asyncio.Future[Any]], error: BaseException | None
    ) -> None:
        if len(self._items) > 2 * WINDOW:
            peer = self._link.peer.name
            raise ProtocolError(f"{peer} sends more items than it was allowed to", peer)
        self._items.append((value, waits, error))
        self._news.set()

    def ended(self, error: BaseException | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._news.set()


class _Mailbox:
    """What the link knows of a stream: not the stream itself, so that dropping it is noticed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = weakref.ref(stream)

    def item(self, *item: Any) -> None:
        if (stream := self._stream()) is not None:
            stream.item(*item)

    def ended(self, error: BaseException | None) -> None:
        if (stream := self._stream()) is not None:
            stream.ended(error)
