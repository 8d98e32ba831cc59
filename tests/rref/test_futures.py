"""Fetches that piggyback on the reply to a creation: one message out, one back."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest

from aiograd.errors import (
    DeadlineExceeded,
    OwnerLost,
    RRefError,
    SerializationError,
    WorkerClosed,
)
from aiograd.rpc.api import inline, rpc_async
from aiograd.rpc.options import Options
from aiograd.rref import remote


def add(a: Any, b: Any = 1) -> Any:
    return a + b


async def add_later(a: Any, b: Any = 1) -> Any:
    await asyncio.sleep(0)
    return a + b


@inline
def add_here(a: Any, b: Any = 1) -> Any:
    return a + b


def nothing() -> None:
    pass


def zeros(count: int) -> np.ndarray:
    return np.zeros(count)


def lock() -> Any:
    return threading.Lock()


def fail() -> None:
    raise ValueError("no such luck")


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def create_and_fetch(to: str, a: int) -> Any:
    return await remote(to, add_later, args=(a,))


NOTES: list[int] = []


@inline
def notes() -> list[int]:
    return NOTES


@inline
def note(number: int) -> None:
    NOTES.append(number)


def count_fetches(worker: Any) -> list[bytes]:
    """Watch what is asked of a worker besides creations."""
    asked: list[bytes] = []
    service = worker.services["rref.fetch"]

    def fetch(sender: Any, fork: bytes) -> Any:
        asked.append(fork)
        return service(sender, fork)

    worker.services["rref.fetch"] = fetch
    return asked


async def met(w: Any, function: Any, *args: Any) -> None:
    """Let worker1 know a function: a call of one that it must first be told of takes longer."""
    await asyncio.gather(
        rpc_async("worker1", function, args=args, timeout=0.1), return_exceptions=True
    )


@pytest.mark.parametrize("function", [add, add_later, add_here])
async def test_a_value_fetched_in_the_tick_of_its_creation_is_one_message(
    workers: Any, function: Any
) -> None:
    async with workers(2) as w:
        await met(w, function, 1)
        asked = count_fetches(w.agents[1])
        rref = remote("worker1", function, args=(1, 2))
        before = w.agents[0].link("worker1").caller.last_id
        assert await rref == 3
        assert w.agents[0].link("worker1").caller.last_id == before
        assert asked == []
        assert rref.confirmed_by_owner()
        assert await rref == 3  # a second time it must be asked for
        assert len(asked) == 1
        del rref
        await w.at_rest()


async def test_a_value_of_none_is_piggybacked(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, nothing)
        asked = count_fetches(w.agents[1])
        assert await remote("worker1", nothing) is None
        assert asked == []
        await w.at_rest()


async def test_a_large_value_is_piggybacked(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, zeros, 1)
        asked = count_fetches(w.agents[1])
        assert (await remote("worker1", zeros, args=(1_000_000,))).shape == (1_000_000,)
        assert asked == []
        await w.at_rest()


async def test_many_ops_that_are_created_first_and_fetched_then_are_piggybacked(
    workers: Any,
) -> None:
    """Only ops do: they change nothing that was made before them."""
    async with workers(2) as w:
        for agent in w.agents:
            agent.ops = {"plus": plus}
        await met(w, plus)
        asked = count_fetches(w.agents[1])
        rrefs = [remote("worker1", plus, args=(i, 1)) for i in range(500)]
        assert await asyncio.gather(*[r.to_here() for r in rrefs]) == list(range(1, 501))
        assert asked == []
        del rrefs
        await w.at_rest()


def plus(a: Any = 0, b: Any = 0) -> Any:
    return a + b


plus.op_name = "plus"  # type: ignore[attr-defined]


async def test_a_fetch_sees_the_effect_of_a_call_in_the_same_tick(workers: Any) -> None:
    """In the same tick even: the call in between has changed the value by then."""
    async with workers(2) as w:
        for agent in w.agents:
            agent.ops = {"plus": plus}
        await met(w, plus)
        rref = remote("worker1", plus, args=(np.zeros(3), 1))
        change = rpc_async("worker1", set_to_seven, args=(rref,))
        value = rref.to_here()
        await change
        assert (await value == 7).all()
        del rref
        await w.at_rest()


@inline
def set_to_seven(rref: Any) -> None:
    rref.local_value()[:] = 7


async def test_two_fetches_give_two_copies(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, zeros, 1)
        rref = remote("worker1", zeros, args=(3,))
        one, two = await asyncio.gather(rref.to_here(), rref.to_here())
        one[0] = 1.0
        assert two[0] == 0.0
        del rref
        await w.at_rest()


async def test_a_fetch_sees_the_effect_of_calls_made_before_it(workers: Any) -> None:
    """The copy would be older than the call in between, so it is not piggybacked."""
    async with workers(2) as w:
        await rpc_async("worker1", note, args=(0,))
        await met(w, notes)
        NOTES.clear()
        rref = remote("worker1", notes)
        call = rpc_async("worker1", note, args=(7,))
        assert await rref == [7]
        await call
        NOTES.clear()
        first, second = remote("worker1", notes), remote("worker1", note, args=(8,))
        assert await first == [8]
        del rref, first, second, call
        await w.at_rest()


async def test_a_value_that_cannot_travel_is_fetched_separately_and_says_why(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, lock)
        rref = remote("worker1", lock)
        with pytest.raises(SerializationError):
            await rref
        assert rref.confirmed_by_owner()
        await rref.future()
        del rref
        await w.at_rest()


async def test_the_error_of_the_function_is_the_outcome(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, fail)
        rref = remote("worker1", fail)
        with pytest.raises(ValueError, match="no such luck"):
            await rref
        del rref
        await w.at_rest()


async def test_the_fetch_ends_with_its_deadline(workers: Any) -> None:
    async with workers(2, options=Options(timeout=0.2)) as w:
        await met(w, never)
        rref = remote("worker1", never)
        with pytest.raises(DeadlineExceeded, match=r"rref\.fetch"):
            await rref
        with pytest.raises(RRefError, match="timed out"):
            await rref
        del rref
        await w.at_rest()


async def test_a_limited_creation_ends_the_fetch(workers: Any) -> None:
    async with workers(2, options=Options(timeout=60.0)) as w:
        asked = count_fetches(w.agents[1])
        w.agents[0].link("worker1")
        assert await remote("worker1", add, args=(1,)) == 2
        with pytest.raises(RRefError, match="timed out"):
            await remote("worker1", never, timeout=0.2)
        asked.clear()
        with pytest.raises(RRefError, match="timed out"):
            await remote("worker1", never, timeout=0.2)
        assert asked == []
        await w.at_rest()


async def test_a_fetch_with_a_timeout_of_its_own_is_a_request(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, add, 1)
        asked = count_fetches(w.agents[1])
        assert await remote("worker1", add, args=(1,)).to_here(timeout=5) == 2
        patient = remote("worker1", add, args=(1,), timeout=math.inf)
        assert await patient == 2  # its creation may take longer than a fetch
        assert len(asked) == 2
        del patient
        await w.at_rest()


async def test_inside_a_call_a_fetch_is_piggybacked(workers: Any) -> None:
    async with workers(2) as w:
        asked = count_fetches(w.agents[0])
        for _ in range(2):
            assert await rpc_async("worker1", create_and_fetch, args=("worker0", 1)) == 2
        assert asked == []
        await w.at_rest()


async def test_a_cancelled_fetch_lets_the_creation_go_on(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, add_later, 1)
        rref = remote("worker1", add_later, args=(1,))
        fetch = rref.to_here()
        assert fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert await rref == 2
        del rref
        await w.at_rest()


async def test_a_fetch_may_be_cancelled_by_a_thread(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, never)
        rref = remote("worker1", never)
        fetch = rref.to_here()
        thread = threading.Thread(target=fetch.cancel)
        thread.start()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        thread.join()


@pytest.mark.parametrize("turns", [0, 5])
async def test_a_fetch_ends_when_its_worker_closes_while_the_function_runs(cluster, turns):
    async with cluster(1, options=Options(grace=0.1)):
        await rpc_async("worker0", max, args=(1, 2))
        known = remote("worker0", never).to_here()
        known.cancel()
        fetch = remote("worker0", never).to_here()
        for _ in range(turns):  # until it has arrived
            await asyncio.sleep(0)
    with pytest.raises((WorkerClosed, OwnerLost)):
        await asyncio.wait_for(fetch, 5)


async def test_the_future_of_a_creation_ends_with_an_error_when_its_worker_closes(cluster):
    async with cluster(1, options=Options(grace=0.1)):
        created = remote("worker0", never).future()
        await asyncio.sleep(0)
    with pytest.raises(WorkerClosed, match="driver was shut down"):
        await asyncio.wait_for(created, 5)


async def test_a_piggybacked_fetch_ends_with_the_loss_of_its_owner(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, never)
        rref = remote("worker1", never)
        fetch = rref.to_here()
        await asyncio.sleep(0)
        await w.agents[1].close()
        with pytest.raises(OwnerLost, match="worker1"):
            await fetch
        with pytest.raises(OwnerLost, match="worker1"):
            await rref


async def test_a_dropped_reference_lives_until_its_value_has_come(workers: Any) -> None:
    async with workers(2) as w:
        await met(w, add_later, 1)
        assert await remote("worker1", add_later, args=(1,)).to_here() == 2
        await w.at_rest()
