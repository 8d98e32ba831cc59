"""Calls of idempotent functions are made again when a worker is lost; all others run once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

import aiograd as ag
from aiograd.errors import (
    DeadlineExceeded,
    Overloaded,
    OwnerLost,
    RRefError,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.caller import retry
from aiograd.rpc.caller.retry import EARNED, RETRIES, SAVED, Allowance, pause_before, worth_another
from aiograd.testing import Faults
from tests.support.waiting import until

FAILED = ("fail", "call")
RAN: list[object] = []  # workers of these tests live in this process


@ag.idempotent
async def visit(what, linger):
    RAN.append(what)
    if linger:
        await asyncio.sleep(30.0)
    return what


async def visit_once(what, linger):
    return await visit(what, linger)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    RAN.clear()
    monkeypatch.setattr(retry, "_FIRST", 0.02)


async def ran(times: int) -> None:
    while len(RAN) < times:
        await asyncio.sleep(0)


def refuse(kind: str = "call", times: float = 1000) -> Counter[tuple[str, str]]:
    """Let messages fail as if the worker were lost; counts them."""
    ag.current_worker().faults = faults = Faults(fail={kind: times})
    return faults.hit


# ── deciding ────────────────────────────────────────────────────────────────────────────────────


def test_retries_add_at_most_a_tenth_to_the_load():
    allowance, retries, calls = Allowance(), 0, 10_000
    for _ in range(calls):
        allowance.earn()
        while allowance.spend():  # everything fails, and everyone tries again
            retries += 1
    assert retries <= SAVED + EARNED * calls
    assert retries >= EARNED * calls * 0.99


def test_pauses_grow_and_differ():
    pauses = [[pause_before(n, random.Random(seed)) for n in range(RETRIES)] for seed in range(50)]
    for n in range(RETRIES):
        nominal = retry._FIRST * 2**n
        found = [each[n] for each in pauses]
        assert all(0.5 * nominal <= each <= 1.5 * nominal for each in found)
        assert len(set(found)) == len(found)


def test_only_what_that_worker_did_to_the_call_is_worth_another_try():
    assert worth_another(WorkerLost("b"), "b")
    assert worth_another(Overloaded("b"), "b")
    for error in (WorkerLost("c"), OwnerLost("b"), DeadlineExceeded("b", "f", 1), ValueError()):
        assert not worth_another(error, "b")


# ── trying ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_call_goes_on_at_the_restarted_worker(cluster):
    async with cluster(2, options=ag.Options(grace=0.1)) as c:
        call = ag.rpc_async("worker1", visit, (7, False))
        assert await call == 7
        linger = c["worker1"].call(visit, 8, True)
        await ran(2)
        restarting = asyncio.create_task(c.restart("worker1"))
        await ran(3)
        await restarting
        assert RAN == [7, 8, 8]
        linger.cancel()


async def test_a_call_that_is_not_marked_runs_at_most_once(cluster):
    async with cluster(2) as c:
        call = ag.rpc_async("worker1", visit_once, (1, True))
        await ran(1)
        await c.kill("worker1")
        with pytest.raises(WorkerLost):
            await call
        assert RAN == [1]


async def test_after_four_retries_the_loss_is_told(cluster):
    async with cluster(1):
        refused = refuse()
        with pytest.raises(WorkerLost, match="worker0"):
            await ag.rpc_async("worker0", visit, (1, False))
        assert refused[FAILED] == 1 + RETRIES
        assert RAN == []


async def test_nothing_is_tried_past_the_deadline(cluster, monkeypatch):
    monkeypatch.setattr(retry, "_FIRST", 0.3)
    async with cluster(1):
        refused = refuse()
        began = time.monotonic()
        with pytest.raises(WorkerLost):
            await ag.rpc_async("worker0", visit, (1, False), timeout=0.5)
        assert time.monotonic() - began < 4 * 0.5
        assert refused[FAILED] <= 2


async def test_an_error_of_the_function_itself_is_final(cluster):
    async with cluster(1):
        with pytest.raises(TypeError):
            await ag.rpc_async("worker0", visit, (1,))


async def test_plain_arguments_are_those_of_the_first_try(cluster):
    async with cluster(1):
        refuse(times=2)
        array = ag.ones(3).numpy()
        call = ag.rpc_async("worker0", visit, (array, False))
        array[:] = 5.0
        assert (await call).tolist() == [1.0, 1.0, 1.0]


async def test_blocking_callers_are_served_alike(cluster):
    async with cluster(1):
        refuse(times=2)
        assert await asyncio.to_thread(ag.rpc_sync, "worker0", visit, (3, False)) == 3
        assert RAN == [3]


async def test_gradients_flow_through_the_try_that_succeeded(cluster):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(1), ag.context() as ctx:
        refuse(times=2)
        y = await ag.rpc_async("worker0", twice, (x,))
        await ctx.backward(y.sum())
        assert ctx.gradients[x].tolist() == [2.0, 2.0]


@ag.idempotent
def twice(x):
    return x + x


async def test_a_cancelled_call_is_not_tried_again(cluster, monkeypatch):
    monkeypatch.setattr(retry, "_FIRST", 0.5)
    async with cluster(1):
        call = ag.rpc_async("worker0", visit, (1, True))
        await ran(1)
        call.cancel()
        while (await ag.rpc_async("worker0", ag.debug_info))["running_calls"]:
            await asyncio.sleep(0)
        refuse()
        call = ag.rpc_async("worker0", visit, (2, False))
        await until(is_pausing)
        call.cancel()
        ag.current_worker().faults = None  # another try would get through
        await until(lambda: not is_pausing())
        assert await ag.rpc_async("worker0", visit, (3, False)) == 3
        assert RAN == [1, 3]


def is_pausing() -> bool:
    """Whether a call waits for its next try."""
    pause = retry.Persistence._wait_and_attempt.__name__
    return any(task.get_coro().__name__ == pause for task in asyncio.all_tasks())


async def test_closing_ends_a_call_that_waits_for_its_next_try(cluster, monkeypatch):
    monkeypatch.setattr(retry, "_FIRST", 20.0)
    async with cluster(1):
        refused = refuse()
        call = ag.rpc_async("worker0", visit, (1, False))
        while not refused[FAILED]:
            await asyncio.sleep(0)
    with pytest.raises(WorkerClosed):
        await call


async def test_what_stays_at_a_worker_is_made_once(cluster):
    async with cluster(1):
        refused = refuse("remote")
        with pytest.raises(RRefError, match="lost worker worker0"):
            await ag.remote("worker0", visit, (1, False))
        assert refused == {("fail", "remote"): 1}
