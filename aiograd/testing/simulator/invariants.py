"""What must hold, whatever the faults: the checks after the programs have ended.

I1  every awaited call ends by its deadline + 0.25 s               (ledger)
I2  a result is the oracle's, or the error is typed and justified  (ledger)
I3  gradients are exact, or the pass failed and none can be read   (gradients)
I4  a call runs at most once, exactly once if it gave a result     (ledger)
I5  a value lives while it has a holder, and not much longer       (ledger, here)
I6  no context is left
I7  at rest nothing is left: calls, tasks, bytes, timers
I8  resets, and cuts below two seconds, change no outcome            (ledger)
I9  within 10 s of the last fault every living pair can call again, also if one had lost the other
I10 the same seed gives the same trace                             (tests)
I11 outcome agreement: no worker contradicts the originator of a pass (here, gradients)

Outcome agreement says what a worker may answer when the gradients of a context are read there. The
originator of a backward pass decides its outcome, once. From then on no worker disagrees:

    the pass is     a participant may answer                        it never answers
    running         PassUndecided; sums of earlier passes           a number of this pass
                    if this pass has not reached it yet
    good            the exact sums, PassUndecided                   BackwardFailed, other numbers,
                                                                    no entry
    failed          BackwardFailed, PassUndecided, UnknownContext,  a number of this pass
                    no entry; sums of earlier passes if this
                    pass never reached it

Readings are synchronous and local: they send nothing, so they may be taken at any moment.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from enum import Enum
from typing import Any, Final

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.registry import ContextRegistry
from aiograd.errors import AiogradError, BackwardFailed, PassUndecided, UnknownContext, WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.testing.simulator.ledger import Ledger
from aiograd.testing.simulator.workload.calls import plain
from aiograd.testing.simulator.world import Node, World

SETTLE: Final = 25.0  # seconds after the last program has ended
LOOKS: Final = 3  # at the counters
PINGS: Final = 1024  # bytes; the latest heartbeats are never all acknowledged
RECOVER: Final = 10.0  # seconds for a fresh call
RETRY: Final = 0.25  # seconds between two attempts at one
Sums = dict[Tensor, Any]  # leaf of one worker → the gradient that it should show


async def check_at_rest(
    world: World,
    ledger: Ledger,
    seconds: float = SETTLE,
    shares: tuple[float, ...] = (0.4, 0.4, 0.2),
) -> None:
    """Check I5 and I7: nothing is left of what the programs did.

    Wait for `seconds` and two leases before, in `shares` with a collection of garbage at each.
    """
    for share in shares:
        # Each time again: the last call of a crashed worker may arrive after all programs ended.
        for node in world.living:
            node.shelf.clear()
        # Tracebacks of failed calls hold references, in cycles.
        gc.collect()
        await asyncio.sleep((seconds + 2 * world.options.lease) * share)
    kept = [node.name for node, value in ledger.values if node.alive and value() is not None]
    if kept:
        ledger.violated("I5", f"values without a holder are still kept on {kept}")
    looks = []
    # Several looks, of which the lowest counts: a heartbeat may be under way at one of them.
    for _ in range(LOOKS):
        looks.append({node: node.counters() for node in world.living})
        await asyncio.sleep(0.37)
    for node in world.living:
        left = {
            name: count
            for name in node.counters()
            if (count := min(look[node][name] for look in looks))
        }
        if left:
            ledger.violated("I7", f"{node.name} at rest still has {left}")
        kept_bytes = max(
            (sum(map(len, link.session.kept)) for link in node.agent.links.all()), default=0
        )
        if kept_bytes > PINGS:
            ledger.violated("I7", f"{node.name} at rest still keeps {kept_bytes} bytes it has sent")


async def check_alive(world: World, ledger: Ledger, number: int) -> None:
    """Check I9: a call on every living pair succeeds in `RECOVER` seconds; no peer is suspect.

    No pair is excused, whatever happened to it: after the last fault all have to find each other.
    """
    # Each worker also calls itself, which needs no network.
    tasks = [
        (node, other, node.spawn(_ping(world, other.name, (number, i, j))))
        for i, node in enumerate(world.living)
        for j, other in enumerate(world.living)
    ]
    await asyncio.sleep(RECOVER)
    doubtful: list[tuple[Node, Node]] = []
    for node, other, task in tasks:
        if not task.done():
            ledger.violated("I9", f"{node.name} to {other.name}: no answer within {RECOVER:g} s")
            task.cancel()
        elif (error := task.exception()) is not None:
            ledger.violated("I9", f"{node.name} to {other.name}: {error!r}")
        elif task.result() != 8:
            ledger.violated("I9", f"{node.name} to {other.name}: {task.result()!r}")
        elif other.name in node.agent.links.suspects():
            doubtful.append((node, other))
    # A `reset_after` may have come a moment ago, with the bytes of this very call. The session
    # then has its time to resume.
    if doubtful:
        await asyncio.sleep(world.options.resume + 1.0)
    for node, other in doubtful:
        if other.name in node.agent.links.suspects():
            ledger.violated("I9", f"{node.name} called {other.name}, and still suspects it")


async def _ping(world: World, to: str, id: tuple[int, ...]) -> int:
    """Call until it succeeds: the dial of a lost peer may have begun before the network healed."""
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


async def check_closed(world: World, ledger: Ledger) -> None:
    """Check I7: a closed worker leaves no task and no timer behind."""
    await asyncio.sleep(1.0)
    for node in world.living:
        left = world.loop.pending(node)
        if left:
            ledger.violated("I7", f"{node.name} was closed but still has {left!r:.300}")
        if tasks := world.loop.tasks_of(node):
            ledger.violated("I7", f"{node.name} was closed but still has {tasks!r:.300}")


# ── outcome agreement ────────────────────────────────────────────────────────────────────────────


class Outcome(Enum):
    """What the originator of a pass has decided."""

    RUNNING = "running"
    GOOD = "good"
    FAILED = "failed"


def read(node: Node, context_id: int) -> dict[Tensor, Any] | AiogradError:
    """Return what a worker answers now when its gradients of a context are read there."""
    context = node.agent.parts[ContextRegistry].find(context_id)
    if context is None:
        return UnknownContext(context_id)
    try:
        # As code of that worker would read them.
        found: dict[Tensor, Tensor] = node.agent.context.copy().run(lambda: context.gradients)
    except AiogradError as error:
        return error
    return {leaf: np.asarray(gradient) for leaf, gradient in found.items()}


def disagreement(
    answer: dict[Tensor, Any] | AiogradError,
    outcome: Outcome,
    sums: Sums,
    *,
    reached: bool = True,
    forgotten: bool = False,
) -> str:
    """Say what is wrong with an answer; "" if nothing is.

    `sums` are those of all passes that ended well. `reached`: the pass has come to this worker.
    `forgotten`: the worker may have dropped the context, since it lost the worker that opened it.
    """
    if isinstance(answer, AiogradError):
        return _wrong_error(answer, outcome, forgotten or not sums)
    if outcome is Outcome.GOOD:
        return "" if same(answer, sums) else f"shows {_text(answer)}, not {_text(sums)}"
    if not answer or (not reached and same(answer, sums)):
        return ""
    if same(answer, sums):
        return f"shows sums of earlier passes although it took part in one that is {outcome.value}"
    return f"shows {_text(answer)} of a pass that is {outcome.value}"


def _wrong_error(error: AiogradError, outcome: Outcome, forgotten: bool) -> str:
    if isinstance(error, PassUndecided):
        return ""
    if isinstance(error, UnknownContext):
        if outcome is not Outcome.GOOD or forgotten:
            return ""
    elif isinstance(error, BackwardFailed) and outcome is not Outcome.GOOD:
        return ""
    return f"raises {error!r:.120} for a pass that is {outcome.value}"


def same(answer: dict[Tensor, Any], sums: Sums) -> bool:
    """Tell whether an answer shows exactly these gradients, and no others."""
    return answer.keys() == sums.keys() and all(
        np.array_equal(answer[leaf], gradient) for leaf, gradient in sums.items()
    )


def _text(numbers: dict[Tensor, Any]) -> str:
    return f"{[np.asarray(number).ravel().tolist() for number in numbers.values()]!r:.80}"
