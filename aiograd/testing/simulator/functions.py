"""The functions that simulated programs call. Each enters itself into the ledger when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from aiograd.rpc.api import inline, rpc_async, rpc_sync
from aiograd.testing.simulator.ledger import CallId, ledger
from aiograd.testing.simulator.loop import OWNER

if TYPE_CHECKING:
    from aiograd.testing.simulator.world import Node


class Boom(Exception):
    """What functions raise on purpose."""


def enter(id: CallId) -> None:
    book = ledger()
    book.ran[id] = book.ran.get(id, 0) + 1
    book.began[id] = book.world.loop.time()
    book.world.trace("run", id)


def here() -> Node:
    """The node that runs this function."""
    owner = OWNER.get()
    assert owner is not None
    return owner  # type: ignore[return-value]


def _leave(id: CallId) -> None:
    book = ledger()
    book.stopped[id] = book.world.loop.time()


async def work(id: CallId, value: Any, seconds: float) -> Any:
    """Take some time."""
    enter(id)
    try:
        await asyncio.sleep(seconds)
    finally:
        _leave(id)
    return value


async def measure(id: CallId, value: Any) -> int:
    """Take something large, and give something small."""
    enter(id)
    _leave(id)
    return len(value)


@inline
def same(value: int) -> int:
    """One of thousands: too many for the ledger."""
    return value


def plain(id: CallId, value: int) -> int:
    """Run in a thread."""
    enter(id)
    return value + 1


async def count(id: CallId, numbers: int, seconds: float) -> AsyncIterator[int]:
    """A stream."""
    enter(id)
    try:
        for number in range(numbers):
            if seconds:
                await asyncio.sleep(seconds)
            yield number
    finally:
        _leave(id)


def count_in_thread(id: CallId, numbers: int) -> Iterator[int]:
    enter(id)
    yield from range(numbers)


async def fail(id: CallId, text: str) -> None:
    enter(id)
    raise Boom(text)


async def chain(id: CallId, path: list[str], value: int) -> int:
    """Go from worker to worker, and come back with a number larger by the length of the way."""
    enter(id)
    try:
        if not path:
            return value
        back = await rpc_async(path[0], chain, ((*id, 0), path[1:], value + 1))
        return int(back)
    finally:
        _leave(id)


def chain_in_threads(id: CallId, path: list[str], value: int) -> int:
    """The same with blocking calls."""
    enter(id)
    if not path:
        return value
    return int(rpc_sync(path[0], chain_in_threads, ((*id, 0), path[1:], value + 1)))


async def fan_out(id: CallId, names: list[str], value: int) -> int:
    """Ask several workers at once."""
    enter(id)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(name, (*id, i), value)) for i, name in enumerate(names)]
    return sum(task.result() for task in tasks)


async def _ask(name: str, id: CallId, value: int) -> int:
    return int(await rpc_async(name, work, (id, value, 0.01)))
