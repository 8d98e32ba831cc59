"""What simulated programs do with references: create, use, share, keep, give back.

Every value that an owner makes is entered into the ledger by a weak reference, so that it is known
whether it lives as long as somebody holds it, and no longer.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from aiograd.rpc.api import rpc_async
from aiograd.rref import RRef, remote
from aiograd.testing.simulator.ledger import ANY, CallId, current_ledger, enter
from aiograd.testing.simulator.workload.actor import Act, Actor
from aiograd.testing.simulator.workload.calls import Boom
from aiograd.testing.simulator.world import here

PATIENCE = 60.0  # seconds; a release is repeated until the owner answers or is gone


class Value:
    """Something that stays with its owner."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Value({self.number})"

    def plus(self, more: int) -> int:
        return self.number + more


async def make(number: int, seconds: float, *id: Any) -> Value:
    enter(id)  # plain arguments: so it goes by the quick road
    if seconds:
        await asyncio.sleep(seconds)
    if number < 0:
        raise Boom("this value cannot be made")
    value = Value(number)
    current_ledger().values.append((here(), weakref.ref(value)))
    return value


async def fetch(id: CallId, rref: RRef) -> Any:
    enter(id)
    return await rref


async def shelve(id: CallId, key: CallId, rref: RRef) -> None:
    """Keep a reference for later."""
    enter(id)
    here().shelf[key] = rref


async def unshelve(id: CallId, key: CallId) -> Any:
    """Use what was kept, and let it go."""
    enter(id)
    rref = here().shelf.pop(key)
    return await rref


async def give(id: CallId, key: CallId) -> Any:
    """Hand over what was kept."""
    enter(id)
    return here().shelf.pop(key)


async def relay(id: CallId, path: list[str], rref: RRef) -> Any:
    """Pass a reference from worker to worker; the last one looks at the value."""
    enter(id)
    if not path:
        return await rref
    return await rpc_async(path[0], relay, ((*id, 0), path[1:], rref))


# ── what actors do ──────────────────────────────────────────────────────────────────────────────


def _create(actor: Actor, number: int, owner: str | None = None) -> RRef:
    owner = owner or actor.someone()
    entry = actor.begin("make", owner, actor.ledger.world.options.timeout)
    seconds = actor.random.choice((0.0, 0.0, 0.01, 0.3))
    return remote(owner, make, (number, seconds, *entry.id))


async def _look(actor: Actor, rref: RRef, expected: Value) -> None:
    entry = actor.begin("to_here", rref.owner_name(), actor.ledger.world.options.timeout)
    await actor.ledger.watch(entry, rref.to_here, expected)


async def _let_go(actor: Actor, rref: RRef) -> None:
    if actor.random.random() < 0.5:
        return  # the garbage collector does it
    entry = actor.begin("release", rref.owner_name(), PATIENCE)
    await actor.ledger.watch(entry, rref.release, None)


async def use_reference(actor: Actor) -> None:
    number = actor.random.randrange(1000)
    rref = _create(actor, number)
    for _ in range(actor.random.randint(0, 3)):
        await _look(actor, rref, Value(number))
    if actor.random.random() < 0.3:
        entry = actor.begin("method", rref.owner_name(), actor.ledger.world.options.timeout)
        await actor.ledger.watch(entry, lambda: rref.rpc_async().plus(1), number + 1)
    await _let_go(actor, rref)


async def share_reference(actor: Actor) -> None:
    number = actor.random.randrange(1000)
    rref = _create(actor, number)
    path = actor.others(actor.random.randint(0, 3))
    await actor.call(relay, path, rref, expected=Value(number))
    await _let_go(actor, rref)


async def leave_reference(actor: Actor) -> None:
    """Somebody else keeps it; our own goes; the value must still be there."""
    number, result_store = actor.random.randrange(1000), actor.someone()
    rref = _create(actor, number)
    entry = actor.begin("shelve", result_store, actor.ledger.world.options.timeout)
    key = entry.id
    args = [entry.id, key, rref]
    await actor.ledger.watch(entry, lambda: rpc_async(result_store, shelve, tuple(args)), None)
    args.clear()
    kept = entry.outcome == "ok"
    await _let_go(actor, rref)
    del rref
    await asyncio.sleep(actor.random.choice((0.0, 0.01, 1.0, 5.0)))
    if not kept:
        return
    if actor.random.random() < 0.5:
        await actor.call(unshelve, key, expected=Value(number), to=result_store, errors=(KeyError,))
        return
    entry = actor.begin("give", result_store, actor.ledger.world.options.timeout)
    got = await actor.ledger.watch(
        entry, lambda: rpc_async(result_store, give, (entry.id, key)), ANY, errors=(KeyError,)
    )
    if got is not None:
        await _look(actor, got, Value(number))


async def fail_reference(actor: Actor) -> None:
    rref = _create(actor, -1)
    entry = actor.begin("to_here", rref.owner_name(), actor.ledger.world.options.timeout)
    await actor.ledger.watch(entry, rref.to_here, NEVER, errors=(Boom,))


async def forget_reference(actor: Actor) -> None:
    """Drop references before anything is known of them."""
    rrefs = [_create(actor, n) for n in range(actor.random.randint(1, 5))]
    await asyncio.sleep(actor.random.choice((0.0, 0.001, 0.1)))
    rrefs.clear()


async def own_reference(actor: Actor) -> None:
    """A value of one's own, lent to others."""
    value = Value(actor.random.randrange(1000))
    actor.ledger.values.append((actor.node, weakref.ref(value)))
    expected = Value(value.number)
    rref = RRef(value)
    del value
    path = actor.others(actor.random.randint(0, 2))
    await actor.call(relay, path, rref, expected=expected)


class _Never:
    def __repr__(self) -> str:
        return "an error"


NEVER = _Never()

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
