"""What must hold, however the faults fell: the checks after the programs have ended.

I1  every awaited call ends by its deadline + 0.25 s               (ledger)
I2  a result is the oracle's, or the error is typed and justified  (ledger)
I3  gradients are exact, or the pass failed and none can be read   (gradients)
I4  a call runs at most once, exactly once if it gave a result     (ledger)
I5  a value lives while it has a holder, and not much longer       (ledger, here)
I6  no context is left
I7  at rest nothing is left: calls, tasks, bytes, timers
I8  who was only away for a while lost nothing: resets and cuts below two seconds change no outcome
                                                                   (ledger)
I9  within 10 s of the last fault every living pair can talk again, whoever had lost whom
I10 the same seed gives the same trace                             (tests)
I11 outcome agreement: nobody contradicts the originator of a pass (agreement)
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Final

from aiograd.errors import WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.testing.simulator.functions import plain
from aiograd.testing.simulator.ledger import Ledger
from aiograd.testing.simulator.world import Node, World

SETTLE: Final = 25.0  # seconds after the last program has ended
LOOKS: Final = 3
PINGS: Final = 1024  # bytes; the last signs of life are never acknowledged all
RECOVER: Final = 10.0  # seconds for a fresh call
RETRY: Final = 0.25  # seconds between two attempts at one


async def check_quiet(
    world: World,
    book: Ledger,
    seconds: float = SETTLE,
    shares: tuple[float, ...] = (0.4, 0.4, 0.2),
) -> None:
    """I7: nothing is left of what the programs did."""
    for share in shares:
        for node in world.living:  # a last call of the dead may come later than the end of all
            node.shelf.clear()
        gc.collect()  # references in tracebacks of failed calls
        await asyncio.sleep((seconds + 2 * world.options.lease) * share)
    kept = [node.name for node, value in book.values if node.alive and value() is not None]
    if kept:
        book.violated("I5", f"values that nobody holds are still kept on {kept}")
    looks = []
    for _ in range(LOOKS):  # a heartbeat may be on its way at one of them
        looks.append({node: node.counters() for node in world.living})
        await asyncio.sleep(0.37)
    for node in world.living:
        left = {
            name: count
            for name in node.counters()
            if (count := min(look[node][name] for look in looks))
        }
        if left:
            book.violated("I7", f"{node.name} at rest still has {left}")
        kept_bytes = max(
            (sum(map(len, link.session.kept)) for link in node.agent.links.all()), default=0
        )
        if kept_bytes > PINGS:
            book.violated("I7", f"{node.name} at rest still keeps {kept_bytes} bytes it has sent")


async def check_alive(world: World, book: Ledger, number: int) -> None:
    """I9: a call on every living pair succeeds, soon if not at once; nobody suspects anybody."""
    tasks = [
        (node, other, node.spawn(_ping(world, other.name, (number, i, j))))
        for i, node in enumerate(world.living)
        for j, other in enumerate(world.living)
    ]
    await asyncio.sleep(RECOVER)
    doubtful: list[tuple[Node, Node]] = []
    for node, other, task in tasks:
        if not task.done():
            book.violated("I9", f"{node.name} to {other.name}: no answer within {RECOVER:g} s")
            task.cancel()
        elif (error := task.exception()) is not None:
            book.violated("I9", f"{node.name} to {other.name}: {error!r}")
        elif task.result() != 8:
            book.violated("I9", f"{node.name} to {other.name}: {task.result()!r}")
        elif other.name in node.agent.links.suspects():
            doubtful.append((node, other))
    if doubtful:  # a reset after so many bytes may have come a moment ago
        await asyncio.sleep(world.options.resume + 1.0)
    for node, other in doubtful:
        if other.name in node.agent.links.suspects():
            book.violated("I9", f"{node.name} called {other.name}, and still suspects it")


async def _ping(world: World, to: str, id: tuple[int, ...]) -> int:
    """Call until it goes well: a dial of a lost peer may have begun before the network was back."""
    limit = world.loop.time() + RECOVER - 1.0
    for attempt in itertools.count():
        left = limit - world.loop.time()
        try:
            return int(await rpc_async(to, plain, ((*id, attempt), 7), timeout=left))
        except WorkerLost:
            if world.loop.time() + RETRY >= limit:
                raise
            await asyncio.sleep(RETRY)
    raise AssertionError("unreachable")


async def check_closed(world: World, book: Ledger) -> None:
    """I7: a closed worker leaves no task and no timer behind."""
    await asyncio.sleep(1.0)
    for node in world.living:
        left = world.loop.pending(node)
        if left:
            book.violated("I7", f"{node.name} was closed but still has {left!r:.300}")
        if tasks := world.loop.tasks_of(node):
            book.violated("I7", f"{node.name} was closed but still has {tasks!r:.300}")
