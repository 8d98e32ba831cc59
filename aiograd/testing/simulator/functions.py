"""The functions that simulated programs call. Each enters itself into the ledger when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiograd.rpc.api import inline, rpc_async, rpc_sync
from aiograd.testing.simulator.ledger import CallId, enter, leave


class Boom(Exception):
    """What functions raise on purpose."""


async def work(id: CallId, value: Any, seconds: float) -> Any:
    """Take some time."""
    enter(id)
    try:
        await asyncio.sleep(seconds)
    finally:
        leave(id)
    return value


async def measure(id: CallId, value: Any) -> int:
    """Take something large, and give something small."""
    enter(id)
    leave(id)
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
        leave(id)


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
        leave(id)


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
