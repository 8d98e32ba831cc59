"""What simulated programs do with references: create, use, share, keep, release.

The ledger has a weak reference to every value that an owner makes. So it is known whether a value
lives as long as a worker holds a reference to it, and no longer.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, ClassVar

from aiograd.rpc.api import rpc_async
from aiograd.rref import RRef, remote
from aiograd.testing.simulator.ledger import ANY, CallId, current_ledger, enter
from aiograd.testing.simulator.workload.actor import Act, Actor
from aiograd.testing.simulator.workload.calls import Boom
from aiograd.testing.simulator.world import here

RELEASED = 60.0  # seconds; a release is repeated until the owner answers or is gone


class Value:
    """A value that stays with its owner; unlike a number, it can be weakly referenced."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.number == self.number

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Value({self.number})"

    def plus(self, more: int) -> int:
        """Add, as a method that is called through a reference."""
        return self.number + more


async def make(number: int, seconds: float, *id: Any) -> Value:
    """Make a value, after some seconds; raise `Boom` for a negative number."""
    # The id comes as separate numbers, not as a tuple: flat arguments take the fast path of
    # creations.
    enter(id)
    if seconds:
        await asyncio.sleep(seconds)
    if number < 0:
        raise Boom("this value cannot be made")
    value = Value(number)
    current_ledger().values.append((here(), weakref.ref(value)))
    return value


async def fetch(id: CallId, rref: RRef[Any]) -> Any:
    """Fetch the value of a reference that came as an argument."""
    enter(id)
    return await rref


async def shelve(id: CallId, key: CallId, rref: RRef[Any]) -> None:
    """Keep a reference for later."""
    enter(id)
    here().shelf[key] = rref


async def unshelve(id: CallId, key: CallId) -> Any:
    """Fetch the value of a reference that was kept, and drop the reference."""
    enter(id)
    rref = here().shelf.pop(key)
    return await rref


async def give(id: CallId, key: CallId) -> Any:
    """Return a reference that was kept, which makes a fork of it for the caller."""
    enter(id)
    return here().shelf.pop(key)


async def relay(id: CallId, path: list[str], rref: RRef[Any]) -> Any:
    """Pass a reference from worker to worker; the last one fetches the value."""
    enter(id)
    if not path:
        return await rref
    return await rpc_async(path[0], relay, ((*id, 0), path[1:], rref))


# ── what actors do ──────────────────────────────────────────────────────────────────────────────


def _create(actor: Actor, number: int, owner: str | None = None) -> RRef[Any]:
    owner = owner or actor.someone()
    entry = actor.begin("make", owner, actor.ledger.world.options.timeout)
    seconds = actor.random.choice((0.0, 0.0, 0.01, 0.3))
    # Any: how long the id is, types do not say.
    args: Any = (number, seconds, *entry.id)
    made: RRef[Any] = remote(owner, make, args)
    return made


async def _look(actor: Actor, rref: RRef[Any], expected: Value) -> None:
    entry = actor.begin("to_here", rref.owner_name(), actor.ledger.world.options.timeout)
    await actor.ledger.watch(entry, rref.to_here, expected)


async def _release(actor: Actor, rref: RRef[Any]) -> None:
    # Half of them by the garbage collector: the two ways differ in who waits for the owner.
    if actor.random.random() < 0.5:
        return
    entry = actor.begin("release", rref.owner_name(), RELEASED)
    await actor.ledger.watch(entry, rref.release, None)


async def use_reference(actor: Actor) -> None:
    """Create a value, fetch it a few times, call a method of it, and release it."""
    number = actor.random.randrange(1000)
    rref = _create(actor, number)
    for _ in range(actor.random.randint(0, 3)):
        await _look(actor, rref, Value(number))
    if actor.random.random() < 0.3:
        entry = actor.begin("method", rref.owner_name(), actor.ledger.world.options.timeout)
        await actor.ledger.watch(entry, lambda: rref.rpc_async().plus(1), number + 1)
    await _release(actor, rref)


async def share_reference(actor: Actor) -> None:
    """Send a reference through several workers, before its creation is confirmed."""
    number = actor.random.randrange(1000)
    rref = _create(actor, number)
    path = actor.others(actor.random.randint(0, 3))
    await actor.call(relay, path, rref, expected=Value(number))
    await _release(actor, rref)


async def leave_reference(actor: Actor) -> None:
    """Let another worker keep a reference, and drop our own: the value must still be there."""
    number, keeper = actor.random.randrange(1000), actor.someone()
    rref = _create(actor, number)
    entry = actor.begin("shelve", keeper, actor.ledger.world.options.timeout)
    key = entry.id
    args: list[Any] = [entry.id, key, rref]
    await actor.ledger.watch(entry, lambda: rpc_async(keeper, shelve, tuple(args)), None)
    # The closure keeps the list alive, and would keep the reference.
    args.clear()
    kept = entry.outcome == "ok"
    await _release(actor, rref)
    del rref
    # Up to longer than the lease of most plans (2 s): the fork of the keeper must hold the value.
    await asyncio.sleep(actor.random.choice((0.0, 0.01, 1.0, 5.0)))
    if not kept:
        return
    # KeyError needs no reason: the keeper may have been restarted, with an empty shelf.
    if actor.random.random() < 0.5:
        await actor.call(unshelve, key, expected=Value(number), to=keeper, errors=(KeyError,))
        return
    entry = actor.begin("give", keeper, actor.ledger.world.options.timeout)
    got = await actor.ledger.watch(
        entry, lambda: rpc_async(keeper, give, (entry.id, key)), ANY, errors=(KeyError,)
    )
    if got is not None:
        await _look(actor, got, Value(number))


async def fail_reference(actor: Actor) -> None:
    """Fetch a value whose creation raises."""
    rref = _create(actor, -1)
    entry = actor.begin("to_here", rref.owner_name(), actor.ledger.world.options.timeout)
    await actor.ledger.watch(entry, rref.to_here, NEVER, errors=(Boom,))


async def forget_reference(actor: Actor) -> None:
    """Drop references before their creation is confirmed."""
    rrefs = [_create(actor, n) for n in range(actor.random.randint(1, 5))]
    await asyncio.sleep(actor.random.choice((0.0, 0.001, 0.1)))
    rrefs.clear()


async def own_reference(actor: Actor) -> None:
    """Share a value of this worker with others."""
    value = Value(actor.random.randrange(1000))
    actor.ledger.values.append((actor.node, weakref.ref(value)))
    expected = Value(value.number)
    rref = RRef(value)
    # From here on the reference alone keeps the value: I5 sees when it is freed.
    del value
    path = actor.others(actor.random.randint(0, 2))
    await actor.call(relay, path, rref, expected=expected)


class _Never:
    # Equal to nothing: a call that should have raised, but returned, is a violation.
    def __repr__(self) -> str:
        return "an error"


NEVER = _Never()

# Drawn with equal chances: an act that stands here twice is drawn twice as often.
REFERENCES: list[Act] = [
    use_reference,
    use_reference,
    share_reference,
    share_reference,
    leave_reference,
    leave_reference,
    fail_reference,
    forget_reference,
    own_reference,
]
