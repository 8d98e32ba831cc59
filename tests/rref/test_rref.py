"""Making, sharing and using references, on workers in one loop."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest

from aiograd.errors import (
    DeadlineExceeded,
    NotOwner,
    RemoteError,
    RRefError,
    RRefReleased,
    SerializationError,
    UnknownWorker,
    WorkerClosed,
)
from aiograd.rpc.api import rpc_async, rpc_sync, run_sync
from aiograd.rpc.options import Options
from aiograd.rref import RRef, remote
from aiograd.rref.refcount.records import unpack_forks
from tests.support.waiting import until


def add(a: Any, b: Any = 1, *, twice: bool = False) -> Any:
    return (a + b) * 2 if twice else a + b


async def add_later(a: Any, b: Any = 1) -> Any:
    await asyncio.sleep(0)
    return a + b


def fail(text: str = "no such luck") -> None:
    raise ValueError(text)


async def add_fetched(*rrefs: RRef) -> Any:
    return sum(await asyncio.gather(*[rref.to_here() for rref in rrefs]))


def add_fetched_in_a_thread(*rrefs: RRef) -> Any:
    return sum(run_sync(rref.to_here()) for rref in rrefs)


def add_local_values(*rrefs: RRef) -> Any:
    return sum(rref.local_value() for rref in rrefs)


class Gate:
    """A function that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, value: Any) -> Any:
        self.entered.set()
        await self.open.wait()
        return value


GATES: dict[str, Gate] = {}


async def through_gate(name: str, value: Any) -> Any:
    return await GATES[name](value)


@pytest.fixture
def gate() -> Any:
    """A gate that called functions find by name; they run in the same process."""
    name = f"gate{len(GATES)}"
    yield name
    GATES.pop(name, None)


# ── creation and use ────────────────────────────────────────────────────────────────────────────


async def test_rref_remote_value(workers: Any) -> None:
    async with workers(2) as w:
        rrefs = [remote("worker1", add, args=(i,), kwargs={"b": 2}) for i in range(10)]
        assert [await rref for rref in rrefs] == [i + 2 for i in range(10)]
        assert await remote("worker1", add_later, args=(1, 2)).to_here() == 3
        array = np.ones((2, 2))
        rref = remote("worker1", add, args=(array, array), kwargs={"twice": True})
        assert (await rref == 4).all()
        del rrefs, rref
        await w.at_rest()


async def test_rref_self(workers: Any) -> None:
    async with workers(1) as w:
        rref = remote("worker0", add, args=(1, 2))
        assert rref.is_owner()
        assert await rref.to_here() == 3
        assert rref.local_value() == 3

        def in_a_thread() -> Any:
            return remote("worker0", add, args=(3, 4)).local_value()  # waits for the creation

        assert await asyncio.to_thread(in_a_thread) == 7
        await w.at_rest()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_rref_self_as_arg(workers: Any, gate: str, to: str) -> None:
    async with workers(2) as w:
        GATES[gate] = Gate()
        rref = remote("worker0", through_gate, args=(gate, 5))
        pending = [
            rpc_async(to, add_fetched, args=(rref,)),
            remote(to, add_fetched, args=(rref,)).to_here(),
            rpc_async(to, add_fetched_in_a_thread, args=(rref,)),
        ]
        await GATES[gate].entered.wait()
        GATES[gate].open.set()
        assert await asyncio.gather(*pending) == [5, 5, 5]
        del rref, pending
        await w.at_rest()


async def test_rref_args_to_owner(workers: Any) -> None:
    async with workers(2) as w:
        a, b = remote("worker1", add, args=(1, 1)), remote("worker1", add, args=(1, 2))
        assert await rpc_async("worker1", add_local_values, args=(a, b)) == 5
        assert await remote("worker1", add_fetched, args=(a, b)).to_here() == 5
        del a, b
        await w.at_rest()


async def test_rref_args_to_user(workers: Any) -> None:
    async with workers(3) as w:
        a, b = remote("worker1", add, args=(1, 1)), remote("worker1", add, args=(1, 2))
        assert await rpc_async("worker2", add_fetched, args=(a, b)) == 5
        assert await remote("worker2", add_fetched, args=(a, b)).to_here() == 5
        del a, b
        await w.at_rest()


def make_lists() -> list[RRef]:
    return [RRef([i]) for i in range(3)]


def append(rref: RRef, value: Any) -> None:
    rref.local_value().append(value)


async def test_rref_local(workers: Any) -> None:
    async with workers(2) as w:
        a, b = RRef(40), RRef(50)
        assert await rpc_async("worker1", add_fetched, args=(a, b)) == 90
        assert await asyncio.to_thread(rpc_sync, "worker1", add_fetched, (a, b)) == 90
        assert await remote("worker1", add_fetched, args=(a, b)).to_here() == 90
        rrefs = await rpc_async("worker1", make_lists)
        for rref in rrefs:
            await rpc_async(rref.owner(), append, args=(rref, "x"))
        assert [await rref for rref in rrefs] == [[i, "x"] for i in range(3)]
        del rrefs, rref
        await w.at_rest()


async def make_nested(to: str, value: Any) -> tuple[RRef, ...]:
    return tuple(remote(to, add, args=(value, i)) for i in range(2))


async def make_inner(to: str, value: Any) -> RRef:
    return remote(to, add, args=(value, 1))


async def test_rref_nested(workers: Any) -> None:
    async with workers(3) as w:
        outer = [remote("worker1", make_nested, args=("worker2", i)) for i in range(20)]
        for i, rref in enumerate(outer):
            inner = await rref
            assert [one.owner_name() for one in inner] == ["worker2", "worker2"]
            assert [await one for one in inner] == [i, i + 1]
        single = await rpc_async("worker1", make_inner, args=("worker2", 1))
        assert await single == 2
        assert isinstance(await remote("worker1", make_inner, args=("worker2", 1)), RRef)
        del outer, rref, inner, single
        await w.at_rest()


async def forward(hops: int, count: int, rref: RRef) -> list[RRef]:
    if hops == 0:
        return [RRef(await rref)]
    to = f"worker{hops % count}"
    return [remote(to, forward, args=(hops - 1, count, rref))]


async def test_rref_forward_chain(workers: Any) -> None:
    async with workers(4) as w:
        rref = remote("worker1", add, args=(1, 2))
        found = await forward(8, 4, rref)
        for _ in range(8):
            found = await found[0]
        assert await found[0] == 3
        del rref, found
        await w.at_rest()


async def test_rref_owner_equality(workers: Any) -> None:
    async with workers(3) as w:
        a, b = remote("worker1", add, args=(1,)), remote("worker1", add, args=(2,))
        c = remote("worker2", add, args=(1,))
        assert a.owner() == b.owner()
        assert len({a.owner(), b.owner(), c.owner()}) == 2
        assert a.owner() != c.owner()
        assert a.owner() != 1
        assert (a.owner().name, a.owner().rank, a.owner_name()) == ("worker1", 1, "worker1")
        assert RRef(1).owner_name() == "worker0"
        assert await a == 2
        del a, b, c
        await w.at_rest()


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def add(self, more: int) -> int:
        self.value += more
        return self.value


def call_add(rref: RRef, more: int) -> int:
    result: int = rref.local_value().add(more)
    return result


async def test_rref_call_method(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", Counter, args=(10,))
        assert await rpc_async(rref.owner(), call_add, args=(rref, 1)) == 11
        assert await asyncio.to_thread(rpc_sync, rref.owner(), call_add, (rref, 2)) == 13
        assert await remote(rref.owner(), call_add, args=(rref, 3)).to_here() == 16
        del rref
        await w.at_rest()


async def test_fetching_gives_a_fresh_copy_and_at_the_owner_the_object_itself(workers: Any) -> None:
    async with workers(2):
        value = [1]
        local = RRef(value)
        assert await local is value
        assert local.local_value() is value
        rref = remote("worker1", list, args=((1, 2),))
        first, second = await rref, await rref
        assert first == second == [1, 2]
        assert first is not second


async def test_z_rref_equality(workers: Any) -> None:
    async with workers(1):
        a, b = RRef(1), RRef(1)
        assert a == a
        assert a != b
        assert len({a, b}) == 2


async def test_unknown_workers_and_unsendable_arguments_are_raised_at_once(workers: Any) -> None:
    async with workers(2) as w:
        with pytest.raises(UnknownWorker):
            remote("worker7", add, args=(1,))
        with pytest.raises(SerializationError):
            remote("worker1", add, args=(threading.Lock(),))
        with pytest.raises(ValueError, match="timeout"):
            remote("worker1", add, args=(1,), timeout=0)
        with pytest.raises(TypeError):
            remote("worker1", "add", args=(1,))  # type: ignore[arg-type]
        with pytest.raises(SerializationError):
            remote("worker0", add, args=(threading.Lock(),))
        assert w.counters() == [(0, 0), (0, 0)]


def nothing_is_current() -> RRef:
    return RRef(1)


async def test_without_a_worker_there_are_no_references() -> None:
    with pytest.raises(WorkerClosed):
        RRef(1)
    with pytest.raises(WorkerClosed):
        remote("worker0", add)


def lock() -> Any:
    return threading.Lock()


async def test_a_value_that_cannot_travel_does_not_harm_its_owner(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", lock)
        with pytest.raises(SerializationError):
            await rref
        assert w[1].counters()["owner_rrefs"] == 1
        assert await rref.rpc_async().locked() is False
        del rref
        await w.at_rest()


# ── confirmation, errors, type ──────────────────────────────────────────────────────────────────


def all_confirmed(*rrefs: RRef) -> bool:
    return all(rref.confirmed_by_owner() for rref in rrefs)


async def test_rref_confirmed(workers: Any, gate: str) -> None:
    async with workers(3) as w:
        GATES[gate] = Gate()
        slow = remote("worker1", through_gate, args=(gate, 1))
        assert not slow.confirmed_by_owner()
        assert await rpc_async("worker2", all_confirmed, args=(slow, slow))
        assert await remote("worker2", all_confirmed, args=(slow,)).to_here()
        assert not slow.confirmed_by_owner()
        GATES[gate].open.set()
        assert await slow.future() is None
        assert slow.confirmed_by_owner()
        del slow
        await w.at_rest()


async def test_rref_local_value_user(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        with pytest.raises(NotOwner) as caught:
            rref.local_value()
        text = str(caught.value)
        assert "RRefId = GloballyUniqueId(created_on=0, local_id=0)" in text
        assert "ForkId = GloballyUniqueId(created_on=0, local_id=1)" in text
        assert "worker0" in text
        assert "worker1" in text
        assert caught.value.owner == "worker1"
        await rref
        del rref, caught
        await w.at_rest()


async def test_rref_str(workers: Any) -> None:
    async with workers(2) as w:
        first = RRef(1)
        assert str(first) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
        second = remote("worker1", add, args=(1,))
        assert str(second) == (
            "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=1), "
            "ForkId = GloballyUniqueId(created_on=0, local_id=2))"
        )
        assert repr(first) == "<RRef on worker0: int>"
        await second
        assert await second._get_type(blocking=False) is int
        assert repr(second) == "<RRef on worker1: int>"
        assert "worker1" in second._repr_html_()
        del second
        await w.at_rest()


KEPT: list[Any] = []


def keep_it(rref: RRef) -> None:
    KEPT.append(rref)


def drop_it() -> None:
    KEPT.clear()


async def test_rref_debug_info(workers: Any) -> None:
    async with workers(2) as w:
        local = RRef("x")
        assert w.counters() == [(0, 0), (0, 0)]
        await rpc_async("worker1", keep_it, args=(local,))
        assert w.counters() == [(1, 0), (0, 1)]
        await rpc_async("worker1", drop_it)
        await w.at_rest()
        a, b = remote("worker1", add, args=(1,)), remote("worker1", add, args=(2,))
        await asyncio.gather(a.future(), b.future())
        assert w.counters() == [(0, 2), (2, 0)]
        del a, b
        await w.at_rest()


async def test_rref_creation_future(workers: Any) -> None:
    async with workers(2):
        for func in (add, add_later, abs):
            rref = remote("worker1", func, args=(1,))
            future = rref.future()
            assert future is rref.future()
            assert await future is None
        assert await remote("worker0", add, args=(1,)).future() is None
        with pytest.raises(ValueError, match="no such luck"):
            await remote("worker1", fail).future()
        with pytest.raises(ValueError, match="no such luck"):
            await remote("worker0", fail).future()


async def test_z_creation_future_local(workers: Any) -> None:
    async with workers(1):
        future = RRef(1).future()
        assert await future is None


async def test_exc_remote(workers: Any) -> None:
    async with workers(3) as w:
        rref = remote("worker1", fail)
        for _ in range(2):  # at every use
            with pytest.raises(ValueError, match="no such luck"):
                await rref
        with pytest.raises(ValueError, match="no such luck"):
            await rref.rpc_async().anything()
        with pytest.raises(ValueError, match="no such luck"):
            await rpc_async("worker2", add_fetched, args=(rref,))
        with pytest.raises(ValueError, match="no such luck"):
            await rpc_async("worker1", add_local_values, args=(rref,))
        own = remote("worker0", add)  # wrong arity
        with pytest.raises(TypeError):
            await own.to_here()
        with pytest.raises(TypeError):
            own.local_value()
        del rref, own
        await w.at_rest()


def leave() -> None:
    raise SystemExit(3)


async def test_a_function_that_exits_leaves_a_value_that_says_so(workers: Any) -> None:
    async with workers(2):
        with pytest.raises(RemoteError, match="SystemExit"):
            await remote("worker1", leave)


async def test_rref_no_plain_pickle(workers: Any) -> None:
    async with workers(2):
        for rref in (RRef(1), remote("worker1", add, args=(1,))):
            with pytest.raises(RRefError, match="inside a call"):
                pickle.dumps(rref)
            with pytest.raises(RRefError, match="inside a call"):
                copy.copy(rref)
            with pytest.raises(RRefError, match="inside a call"):
                copy.deepcopy(rref)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_rref_type(workers: Any, gate: str, to: str) -> None:
    async with workers(2) as w:
        rref = remote(to, Counter, args=(1,))
        future = rref._get_type(blocking=False)
        assert await future is Counter
        sent = w.agents[0].loop  # the loop is the same; what counts is that nothing is sent
        assert sent is asyncio.get_running_loop()
        asked: list[str] = []
        for agent in w.agents:
            service = agent.services["rref.type"]
            agent.services["rref.type"] = lambda *a, s=service: (asked.append("x"), s(*a))[1]
        for _ in range(10):
            assert rref._get_type(blocking=False) is future
            assert rref._get_type(blocking=True) is Counter
        assert asked == []
        other = remote(to, Counter, args=(1,))
        assert await asyncio.to_thread(other._get_type) is Counter
        GATES[gate] = Gate()
        slow = remote(to, through_gate, args=(gate, 1.5))
        kind = slow._get_type(blocking=False)
        await GATES[gate].entered.wait()
        assert not kind.done()
        GATES[gate].open.set()
        assert await kind is float
        del rref, other, slow
        await w.at_rest()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_rref_type_error(workers: Any, to: str) -> None:
    async with workers(2):
        rref = remote(to, fail)
        with pytest.raises(ValueError, match="no such luck"):
            await rref._get_type(blocking=False)
        with pytest.raises(ValueError, match="no such luck"):
            await asyncio.to_thread(rref._get_type)


# ── time ────────────────────────────────────────────────────────────────────────────────────────


async def test_to_rref_creation(workers: Any, gate: str) -> None:
    async with workers(2) as w:
        GATES[gate] = Gate()
        await rpc_async("worker1", add, (1, 1))  # to connect takes time that the creation needs
        rref = remote("worker1", through_gate, args=(gate, 1), timeout=0.3)
        await GATES[gate].entered.wait()
        with pytest.raises(DeadlineExceeded):
            await rref.future()
        with pytest.raises(RRefError, match="RRef creation timed out"):
            await rref.to_here()
        with pytest.raises(RRefError, match="RRef creation timed out"):
            rpc_async("worker1", add_fetched, args=(rref,))
        with pytest.raises(RRefError, match="RRef creation timed out"):
            await rref.rpc_async().anything()
        assert w[1].counters()["owner_rrefs"] == 1  # the creation did happen
        del rref
        await w.at_rest()


async def test_a_creation_for_oneself_can_time_out_too(workers: Any, gate: str) -> None:
    async with workers(1) as w:
        GATES[gate] = Gate()
        rref = remote("worker0", through_gate, args=(gate, 1), timeout=0.02)
        with pytest.raises(DeadlineExceeded):
            await rref.future()
        with pytest.raises(RRefError, match="RRef creation timed out"):
            await rref
        with pytest.raises(RRefError, match="RRef creation timed out"):
            rref.local_value()
        await w.at_rest()


async def test_a_fetch_covers_the_wait_for_the_creation(workers: Any, gate: str) -> None:
    async with workers(2) as w:
        GATES[gate] = Gate()
        for to in ("worker0", "worker1"):
            rref = remote(to, through_gate, args=(gate, 1))
            with pytest.raises(DeadlineExceeded):
                await rref.to_here(timeout=0.02)
            with pytest.raises(ValueError, match="timeout"):
                await rref.to_here(timeout=0)
            abandoned = rref.to_here()
            await asyncio.sleep(0)
            abandoned.cancel()
        await w.until(lambda: not any(map(waiting, w.parts)))  # nobody is waited for in vain
        GATES[gate].open.set()
        assert await rref == 1


def waiting(refs: Any) -> bool:
    return any(owned.waiters for owned in refs.protocol.owner_table.records.values())


async def test_to_type_query(workers: Any, gate: str) -> None:
    async with workers(2):
        GATES[gate] = Gate()
        rref = remote("worker1", through_gate, args=(gate, 1))
        with pytest.raises(DeadlineExceeded):
            await rref._get_type(timeout=0.02, blocking=False)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(rref._get_type, 0.02)
        GATES[gate].open.set()
        assert await rref._get_type(blocking=False) is int


# ── threads ─────────────────────────────────────────────────────────────────────────────────────


def use_everything(to: str, other: str) -> int:
    """The whole life of references, in a plain function on a worker's thread."""
    made = remote(to, add, args=(1, 2))
    own = RRef(4)
    total = run_sync(made.to_here()) + run_sync(own.to_here())
    total += rpc_sync(other, add_fetched, args=(made, own))
    total += remote("worker1", add, args=(1, 1)).local_value()
    run_sync(made.future())
    assert made.confirmed_by_owner()
    run_sync(made.release())
    with pytest.raises(RRefReleased):
        run_sync(made.to_here())
    with pytest.raises(RRefReleased):
        rpc_sync(other, add_fetched, args=(made,))
    return total


async def test_everything_works_in_threads(workers: Any) -> None:
    async with workers(3) as w:
        assert await rpc_async("worker1", use_everything, args=("worker2", "worker0")) == 16
        assert await asyncio.to_thread(rpc_sync, "worker1", use_everything, ("worker0", "worker2"))
        await w.at_rest()


async def test_a_local_value_that_is_not_there_yet_is_an_error_on_the_loop(
    workers: Any, gate: str
) -> None:
    async with workers(1) as w:
        GATES[gate] = Gate()
        rref = remote("worker0", through_gate, args=(gate, 1))
        with pytest.raises(RRefError, match="await rref"):
            rref.local_value()
        waiting = asyncio.create_task(asyncio.to_thread(rref.local_value))
        await GATES[gate].entered.wait()
        GATES[gate].open.set()
        assert await waiting == 1
        await w.at_rest()


async def test_references_dropped_in_threads_are_given_back(workers: Any) -> None:
    async with workers(2) as w:

        def make_and_drop(first: int) -> None:
            for number in range(first, first + 50):
                remote("worker1", make, args=(number,))

        MADE.clear()
        await asyncio.gather(*[asyncio.to_thread(make_and_drop, i) for i in range(0, 200, 50)])
        await w.until(lambda: len(MADE) == 200)
        await w.at_rest()
        assert sorted(MADE) == list(range(200))


MADE: list[int] = []  # by all workers of a test, which live in one process


def make(number: int) -> int:
    MADE.append(number)
    return number


# ── letting go ──────────────────────────────────────────────────────────────────────────────────


async def test_a_release_returns_when_the_owner_has_let_go(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        await rref.release()
        assert w.counters() == [(0, 0), (0, 0)]
        await rref.release()  # once more does no harm
        with pytest.raises(RRefReleased, match=r"a value on worker1.*make another") as caught:
            await rref
        assert caught.value.worker == "worker1"
        with pytest.raises(RRefReleased):
            rpc_async("worker1", add_fetched, args=(rref,))
        with pytest.raises(RRefReleased):
            rref.rpc_async().anything()
        with pytest.raises(RRefReleased):
            await rref.future()


async def test_a_second_release_also_returns_when_the_owner_has_let_go(workers: Any) -> None:
    async with workers(2):
        rref = remote("worker1", add, args=(1,))
        await rref
        first = asyncio.ensure_future(rref.release())
        second = asyncio.ensure_future(rref.release())
        await second
        assert first.done()


async def test_a_release_that_was_cancelled_can_be_waited_for_again(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        first = asyncio.ensure_future(rref.release())
        await asyncio.sleep(0)
        first.cancel()
        await rref.release()
        assert w.counters() == [(0, 0), (0, 0)]


async def test_a_failed_creation_future_holds_no_reference(workers: Any) -> None:
    async def look() -> Any:
        rref = remote("worker1", fail)
        created = rref.future()
        del rref
        with pytest.raises(ValueError, match="no such luck"):
            await created
        return created  # and what its error holds

    async with workers(2) as w:
        created = await look()
        await until(lambda: w.counters() == [(0, 0), (0, 0)])
        assert created.done()


async def test_a_released_reference_is_called_so_by_local_value_too(workers: Any) -> None:
    async with workers(2):
        rref = remote("worker1", add, args=(1,))
        await rref.release()
        with pytest.raises(RRefReleased):
            rref.local_value()


async def test_an_owner_can_release_its_own_reference(workers: Any) -> None:
    async with workers(1):
        rref = RRef(1)
        await rref.release()
        with pytest.raises(RRefReleased):
            rref.local_value()
        with pytest.raises(RRefReleased):
            await rref


def lend(size: int) -> Any:
    return RRef(1), ["x" * size]


async def test_what_is_too_large_to_travel_takes_no_reference_along(workers: Any) -> None:
    async with workers(2, options=Options(max_message=1 << 20)) as w:
        for known in range(2):
            with pytest.raises(SerializationError, match="max_message"):
                await rpc_async("worker1", lend, args=(2_000_000,))
            with pytest.raises(SerializationError, match="max_message"):
                rpc_async("worker1", len, args=(lend(2_000_000),))
            await w.at_rest()
            assert w.counters() == [(0, 0), (0, 0)], known


async def test_a_block_releases_its_reference(workers: Any) -> None:
    async with workers(2) as w:
        async with remote("worker1", add, args=(1,)) as rref:
            assert await rref == 2
        assert w.counters() == [(0, 0), (0, 0)]
        with pytest.raises(RRefReleased):
            await rref


async def test_the_value_lives_as_long_as_any_user(workers: Any) -> None:
    async with workers(3) as w:
        rref = remote("worker1", add, args=(1,))
        await rpc_async("worker2", keep_it, args=(rref,))
        await rref.release()
        assert w.counters() == [(0, 0), (1, 0), (0, 1)]
        assert await KEPT[0] == 2
        KEPT.clear()
        await w.at_rest()


async def test_a_function_runs_although_nobody_keeps_its_reference(workers: Any, gate: str) -> None:
    async with workers(2) as w:
        GATES[gate] = Gate()
        remote("worker1", through_gate, args=(gate, 1))
        await GATES[gate].entered.wait()
        assert w.agents[1].links.counters()["running_calls"] == 1
        GATES[gate].open.set()
        await w.at_rest()
        assert w.agents[1].links.counters()["running_calls"] == 0


async def test_a_cancelled_call_that_returns_a_reference_leaks_nothing(workers: Any) -> None:
    async with workers(2) as w:
        call = rpc_async("worker1", make_lists)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(await rpc_async("worker1", make_lists)) == 3
        await w.at_rest()


async def test_references_in_a_cycle_are_given_back_by_the_collector(workers: Any) -> None:
    async with workers(2) as w:
        cycle: list[Any] = [remote("worker1", add, args=(1,))]
        cycle.append(cycle)
        await cycle[0]
        assert w.counters() == [(0, 1), (1, 0)]
        del cycle
        gc.collect()
        await w.at_rest()
        assert w.counters() == [(0, 0), (0, 0)]


async def test_a_thousand_dropped_references_are_one_message(workers: Any) -> None:
    async with workers(2) as w:
        rrefs = [remote("worker1", add, args=(i,)) for i in range(1000)]
        assert await asyncio.gather(*[rref.to_here() for rref in rrefs]) == list(range(1, 1001))
        await asyncio.gather(*[rref.future() for rref in rrefs])
        sizes: list[int] = []
        service = w.agents[1].services["rref.release"]
        w.agents[1].services["rref.release"] = lambda sender, releases: (
            sizes.append(len(list(unpack_forks(releases)))),
            service(sender, releases),
        )[1]
        del rrefs
        await w.at_rest()
        assert sizes == [1000]


async def round_the_ring(rref: RRef, hops: list[str]) -> int:
    if not hops:
        value: int = await rref
        return value
    found: int = await rpc_async(hops[0], round_the_ring, args=(rref, hops[1:]))
    return found


@pytest.mark.deadline(600)
async def test_references_round_a_ring_leave_nothing_behind(workers: Any) -> None:
    import os

    total, batch = int(os.environ.get("AIOGRAD_RREFS", "2000")), 100
    async with workers(4) as w:
        for start in range(0, total, batch):
            rrefs = [remote(1 + i % 3, add, args=(start + i, 0)) for i in range(batch)]
            hops = ["worker1", "worker2", "worker3", "worker0"]
            calls = [rpc_async("worker0", round_the_ring, args=(rref, hops)) for rref in rrefs]
            del rrefs
            assert await asyncio.gather(*calls) == list(range(start, start + batch))
        await w.at_rest()
        for part in w.parts:
            assert not part.protocol.user_table.children
            assert not part.protocol._shared
            assert len(part.protocol.audit) == 0


async def test_time_is_not_what_makes_a_fetch_wait(workers: Any) -> None:
    """A fetch of a value that exists takes one round trip, not a timer."""
    async with workers(2):
        rref = remote("worker1", add, args=(1,))
        await rref
        began = time.perf_counter()
        for _ in range(20):
            await rref
        assert time.perf_counter() - began < 1.0
