"""What simulated programs do with calls and streams: the functions, and the acts that call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import numpy as np

from aiograd.rpc.api import Group, inline, rpc_async, rpc_stream, rpc_sync
from aiograd.testing.simulator.ledger import CallId, enter, leave
from aiograd.testing.simulator.workload.actor import Act, Actor

# Bytes of the call that is overtaken: more chunks than leave before the first of the small calls.
OVERTAKEN: Final = 6 << 20
# Small calls: more than the 4,096 numbers that an earlier bookkeeping of copies remembered.
CROWD: Final = 5000


class Boom(Exception):
    """What functions raise by intent."""


async def work(id: CallId, value: Any, seconds: float) -> Any:
    """Take some time on the loop, and return the value."""
    enter(id)
    try:
        await asyncio.sleep(seconds)
    finally:
        leave(id)
    return value


async def measure(id: CallId, value: Any) -> int:
    """Take something large, and return something small."""
    enter(id)
    leave(id)
    return len(value)


@inline
def same(value: int) -> int:
    """Return the value, without a note in the ledger: there are thousands of these calls."""
    return value


def plain(id: CallId, value: int) -> int:
    """Add one, in a thread."""
    enter(id)
    return value + 1


async def count(id: CallId, numbers: int, seconds: float) -> AsyncIterator[int]:
    """Stream numbers, from the loop."""
    enter(id)
    try:
        for number in range(numbers):
            if seconds:
                await asyncio.sleep(seconds)
            yield number
    finally:
        leave(id)


def count_in_thread(id: CallId, numbers: int) -> Iterator[int]:
    """Stream numbers, from a thread."""
    enter(id)
    yield from range(numbers)


async def fail(id: CallId, text: str) -> None:
    """Raise an error of the user's own."""
    enter(id)
    raise Boom(text)


async def chain(id: CallId, path: list[str], value: int) -> int:
    """Call from worker to worker; the value grows by one with each of them."""
    enter(id)
    try:
        if not path:
            return value
        back = await rpc_async(path[0], chain, ((*id, 0), path[1:], value + 1))
        return int(back)
    finally:
        leave(id)


def chain_in_threads(id: CallId, path: list[str], value: int) -> int:
    """Do the same with blocking calls, each of which holds a thread on its worker."""
    enter(id)
    if not path:
        return value
    return int(rpc_sync(path[0], chain_in_threads, ((*id, 0), path[1:], value + 1)))


async def fan_out(id: CallId, names: list[str], value: int) -> int:
    """Call several workers at once, in a TaskGroup: one failure cancels the others."""
    enter(id)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(name, (*id, i), value)) for i, name in enumerate(names)]
    return sum(task.result() for task in tasks)


async def _ask(name: str, id: CallId, value: int) -> int:
    return int(await rpc_async(name, work, (id, value, 0.01)))


# ── what actors do ──────────────────────────────────────────────────────────────────────────────


async def small_calls(actor: Actor) -> None:
    """Make a few calls to one worker at once, which share messages and overtake each other."""
    to = actor.someone()
    values = [actor.random.randrange(1000) for _ in range(actor.random.randint(1, 6))]
    async with asyncio.TaskGroup() as group:
        for value in values:
            # Most return at once, with replies that share a message; the others are overtaken.
            seconds = actor.random.choice((0.0, 0.0, 0.01, 0.5))
            group.create_task(actor.call(work, value, seconds, expected=value, to=to))


async def large_call(actor: Actor) -> None:
    """Send an array there and back: inside one frame, and in chunks."""
    # 800 bytes, 160 kB and 2.4 MB: a small frame, a large one, and several chunks.
    size = actor.random.choice((100, 20_000, 300_000))
    array = np.arange(size, dtype=np.float64) + actor.random.randrange(100)
    await actor.call(work, array, 0.0, expected=array)


async def overtaken_call(actor: Actor) -> None:
    """Make a large call, and thousands of small ones that overtake it on the same link.

    So a number of a message is thousands behind the newest when it arrives: bookkeeping that
    remembers only the last few thousand took such a call for a copy.
    """
    to, timeout = actor.someone(), actor.ledger.world.options.timeout
    array = np.zeros(OVERTAKEN, np.uint8)
    large, crowd = actor.begin("measure", to, timeout), actor.begin("same", to, timeout)
    begun: list[Any] = []

    def begin() -> Any:
        """Begin all calls in one callback, before the first byte of the large one is sent."""
        future = rpc_async(to, measure, (large.id, array))
        begun.append(Group([to]).map(same, range(CROWD), concurrency=CROWD))
        return future

    await actor.ledger.watch(large, begin, OVERTAKEN)
    # `begin` may have raised before the small calls were made: their worker was lost.
    if begun:
        await actor.ledger.watch(crowd, begun.pop, list(range(CROWD)))


async def plain_call(actor: Actor) -> None:
    """Call a function that runs in a thread."""
    value = actor.random.randrange(1000)
    await actor.call(plain, value, expected=value + 1)


async def failing_call(actor: Actor) -> None:
    """Call a function that raises: its own error arrives, unless a fault comes first."""
    await actor.call(fail, "on purpose", expected=None, errors=(Boom,))


async def nested_call(actor: Actor) -> None:
    """Make a call that makes calls, on loops or in threads."""
    path = actor.others(actor.random.randint(1, 4))
    func = actor.random.choice((chain, chain_in_threads))
    await actor.call(func, path, 5, expected=5 + len(path))


async def wide_call(actor: Actor) -> None:
    """Make a call that makes several calls at once."""
    names = actor.others(actor.random.randint(1, 4))
    value = actor.random.randrange(100)
    # A failure inside arrives as a group, which is not judged itself.
    to = actor.someone()
    entry = actor.begin("fan_out", to, actor.ledger.world.options.timeout)
    await actor.ledger.watch(
        entry,
        lambda: rpc_async(to, fan_out, (entry.id, names, value)),
        value * len(names),
        errors=(ExceptionGroup,),
    )


async def late_call(actor: Actor) -> None:
    """Make a call that cannot end in time, so that it ends at its deadline."""
    timeout = actor.random.choice((0.05, 0.3, 1.0))
    await actor.call(work, 1, timeout * 20, expected=None, timeout=timeout, quick=False)


async def cancelled_call(actor: Actor) -> None:
    """Cancel a call at a random moment: before it is sent, while it runs, as it returns."""
    to, seconds, timeout = actor.someone(), 3.0, actor.ledger.world.options.timeout
    # If its work takes most of the time it has, a timeout needs no other reason.
    entry = actor.begin("work", to, timeout, quick=2 * seconds <= timeout)
    task = asyncio.ensure_future(
        actor.ledger.watch(entry, lambda: rpc_async(to, work, (entry.id, 1, seconds)), 1)
    )
    # Before the call is sent, on its way, while it runs, and just before and after its reply.
    await asyncio.sleep(actor.random.choice((0.0, 0.001, 0.002, 0.5, 2.999, 3.001)))
    task.cancel()
    await asyncio.wait([task])


async def read_stream(actor: Actor) -> None:
    """Read all of a stream, or only its beginning."""
    to, numbers = actor.someone(), actor.random.choice((0, 1, 5, 30))
    until = actor.random.choice((0, 3, 100, 100))
    options = actor.ledger.world.options
    # The timeout of a stream holds for each item, and the entry is that of all of them.
    entry = actor.begin("count", to, options.timeout * (numbers + 2))
    entry.patient = True
    func: Any = count
    args: tuple[Any, ...] = (entry.id, numbers, actor.random.choice((0.0, 0.0, 0.001, 0.05)))
    if actor.random.random() < 0.3:
        func, args = count_in_thread, args[:2]

    async def read() -> list[int]:
        """Read up to `until` + 1 items, and leave the stream."""
        got: list[int] = []
        async with rpc_stream(to, func, args) as stream:
            async for number in stream:
                got.append(number)
                if len(got) > until:
                    break
        return got

    await actor.ledger.watch(entry, read, list(range(min(numbers, until + 1))))


# Drawn with equal chances, so an act that stands here twice is drawn twice as often.
CALLS: list[Act] = [
    small_calls,
    small_calls,
    large_call,
    plain_call,
    failing_call,
    nested_call,
    wide_call,
    late_call,
    cancelled_call,
    read_stream,
]
