"""Policies and budgets of retries; idempotent calls and control requests that are tried again."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
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
from aiograd.rpc import retry
from aiograd.rpc.extension import DROP, FAIL, SEND
from aiograd.rpc.options import Options
from aiograd.rpc.retry import Backoff, RetryBudget, RetryPolicy, is_worth_a_retry
from aiograd.testing import Faults
from tests.support.waiting import until

FAILED = ("fail", "call")
QUICK = Options(retry=RetryPolicy(first_pause=0.02))
SLOW = Options(retry=RetryPolicy(first_pause=20.0, longest_pause=20.0))
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
def nothing_ran():
    RAN.clear()


async def ran(times: int) -> None:
    await until(lambda: len(RAN) >= times)


def refuse(kind: str = "call", times: float = 1000) -> Counter[tuple[str, str]]:
    """Let messages fail as if the worker were lost; counts them."""
    ag.current_worker().faults = faults = Faults(fail={kind: times})
    return faults.hit


# ── deciding ────────────────────────────────────────────────────────────────────────────────────


def test_pauses_grow_up_to_the_longest():
    policy = RetryPolicy(first_pause=0.1, factor=3.0, longest_pause=2.0, jitter=0.0)
    pauses = [policy.delay(n, random.Random()) for n in range(5)]
    assert pauses == pytest.approx([0.1, 0.3, 0.9, 2.0, 2.0])
    assert policy.delay(100_000, random.Random()) == 2.0


def test_pauses_of_two_callers_differ():
    policy = RetryPolicy()
    for n in range(4):
        nominal = 0.2 * 2**n
        found = [policy.delay(n, random.Random(seed)) for seed in range(50)]
        assert all(0.5 * nominal <= each <= 1.5 * nominal for each in found)
        assert len(set(found)) == len(found)


def test_a_policy_without_jitter_draws_nothing():
    source = random.Random(1)
    before = source.getstate()
    RetryPolicy(jitter=0.0).delay(3, source)
    assert source.getstate() == before


def test_the_default_policy_spreads_five_attempts_over_the_time_of_a_restart():
    backoff = Backoff(RetryPolicy(jitter=0.0), random.Random(), lambda: 0.0)
    pauses = [pause for _ in range(10) if (pause := backoff.next()) is not None]
    assert (len(pauses), sum(pauses)) == (4, pytest.approx(3.0))
    assert backoff.attempts == 5


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("attempts", 0),
        ("attempts", 1.5),
        ("first_pause", -0.1),
        ("first_pause", math.inf),
        ("factor", 0.5),
        ("jitter", 1.5),
        ("longest_pause", math.nan),
        ("time_limit", -1),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(field, wrong):
    with pytest.raises(ValueError, match=f"RetryPolicy.{field}"):
        RetryPolicy(**{field: wrong})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RetryPolicy)])
def test_a_policy_consists_of_numbers(field):
    for wrong in ("3", None, True):
        with pytest.raises(TypeError, match=f"RetryPolicy.{field}"):
            RetryPolicy(**{field: wrong})


def test_a_policy_without_limit_and_pause_is_refused():
    with pytest.raises(ValueError, match="never stop"):
        RetryPolicy(attempts=math.inf, first_pause=0.0)


def test_options_carry_their_policy_to_other_processes():
    options = Options(retry=RetryPolicy(attempts=2, time_limit=1.0))
    assert pickle.loads(pickle.dumps(options)).retry == options.retry
    assert Options().retry == RetryPolicy()
    with pytest.raises(TypeError, match="RetryPolicy"):
        Options(retry=3)  # type: ignore[arg-type]


def test_the_last_pause_is_cut_so_that_it_ends_at_the_deadline():
    now = 0.0
    policy = RetryPolicy(attempts=math.inf, first_pause=1.0, jitter=0.0)
    backoff = Backoff(policy, random.Random(), lambda: now, deadline=2.5)
    pauses = []
    while (pause := backoff.next()) is not None:
        pauses.append(pause)
        now += pause
    assert pauses == [1.0, 1.5]


def test_a_pause_that_would_reach_the_deadline_is_not_begun_where_an_attempt_takes_time():
    policy = RetryPolicy(first_pause=1.0, jitter=0.0)
    assert Backoff(policy, random.Random(), lambda: 0.0, 1.0, clip=False).next() is None
    assert Backoff(policy, random.Random(), lambda: 0.0, 1.1, clip=False).next() == 1.0


def test_a_time_limit_counts_from_the_first_attempt():
    now = 10.0
    policy = RetryPolicy(attempts=math.inf, first_pause=1.0, jitter=0.0, time_limit=2.0)
    backoff = Backoff(policy, random.Random(), lambda: now, deadline=100.0)
    assert backoff.next() == 1.0
    now = 12.0
    assert backoff.next() is None


def test_a_deadline_can_be_moved():
    backoff = Backoff(RetryPolicy(jitter=0.0), random.Random(), lambda: 1.0, deadline=1.0)
    assert backoff.next() is None
    backoff.deadline = 2.0
    assert backoff.next() == 0.2


async def test_a_backoff_pauses_until_no_attempt_is_left():
    backoff = Backoff(RetryPolicy(attempts=3, first_pause=0.001), random.Random(), time.monotonic)
    assert [await backoff.pause() for _ in range(4)] == [True, True, False, False]


def test_retries_add_at_most_a_tenth_to_the_load():
    budget, retries, calls = RetryBudget(), 0, 10_000
    for _ in range(calls):
        budget.earn()
        while budget.spend():  # everything fails, and everything is tried again
            retries += 1
    assert retries <= RetryBudget.SAVED + RetryBudget.EARNED * calls
    assert retries >= RetryBudget.EARNED * calls * 0.99


def test_only_a_failure_of_the_called_worker_is_worth_a_retry():
    assert is_worth_a_retry(WorkerLost("b"), "b")
    assert is_worth_a_retry(Overloaded("b"), "b")
    for error in (WorkerLost("c"), OwnerLost("b"), DeadlineExceeded("b", "f", 1), ValueError()):
        assert not is_worth_a_retry(error, "b")


# ── idempotent calls ────────────────────────────────────────────────────────────────────────────


async def test_an_idempotent_call_goes_on_at_the_restarted_worker(cluster):
    async with cluster(2, options=Options(grace=0.1, retry=QUICK.retry)) as c:
        call = ag.rpc_async("worker1", visit, (7, False))
        assert await call == 7
        linger = c["worker1"].call(visit, 8, True)
        await ran(2)
        restarting = asyncio.create_task(c.restart("worker1"))
        await ran(3)
        await restarting
        assert RAN == [7, 8, 8]
        linger.cancel()


async def test_a_call_that_is_not_marked_idempotent_runs_at_most_once(cluster):
    async with cluster(2) as c:
        call = ag.rpc_async("worker1", visit_once, (1, True))
        await ran(1)
        await c.kill("worker1")
        with pytest.raises(WorkerLost):
            await call
        assert RAN == [1]


@pytest.mark.parametrize("attempts", [1, 3, 5])
async def test_a_call_fails_with_the_loss_after_its_last_attempt(cluster, attempts):
    policy = RetryPolicy(attempts=attempts, first_pause=0.01)
    async with cluster(1, options=Options(retry=policy)):
        refused = refuse()
        with pytest.raises(WorkerLost, match="worker0"):
            await ag.rpc_async("worker0", visit, (1, False))
        assert refused[FAILED] == attempts
        assert RAN == []


async def test_no_call_is_tried_again_past_its_deadline(cluster):
    async with cluster(1, options=Options(retry=RetryPolicy(first_pause=0.3))):
        refused = refuse()
        began = time.monotonic()
        with pytest.raises(WorkerLost):
            await ag.rpc_async("worker0", visit, (1, False), timeout=0.5)
        assert time.monotonic() - began < 4 * 0.5
        # With jitter the pauses are at least 0.15, 0.3 and 0.6 s: the third one ends too late.
        assert refused[FAILED] <= 3


async def test_an_error_of_the_function_itself_is_final(cluster):
    async with cluster(1):
        with pytest.raises(TypeError):
            await ag.rpc_async("worker0", visit, (1,))


async def test_a_retry_sends_plain_arguments_as_they_were_at_first(cluster):
    async with cluster(1, options=QUICK):
        refuse(times=2)
        array = ag.ones(3).numpy()
        call = ag.rpc_async("worker0", visit, (array, False))
        array[:] = 5.0
        assert (await call).tolist() == [1.0, 1.0, 1.0]


async def test_blocking_calls_are_tried_again(cluster):
    async with cluster(1, options=QUICK):
        refuse(times=2)
        assert await asyncio.to_thread(ag.rpc_sync, "worker0", visit, (3, False)) == 3
        assert RAN == [3]


async def test_gradients_flow_through_the_attempt_that_succeeded(cluster):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(1, options=QUICK), ag.context() as ctx:
        refuse(times=2)
        y = await ag.rpc_async("worker0", twice, (x,))
        await ctx.backward(y.sum())
        assert ctx.gradients[x].tolist() == [2.0, 2.0]


@ag.idempotent
def twice(x):
    return x + x


async def test_a_cancelled_call_is_not_tried_again(cluster):
    async with cluster(1, options=SLOW):
        call = ag.rpc_async("worker0", visit, (1, True))
        await ran(1)
        call.cancel()
        await until(no_call_runs)
        refuse()
        call = ag.rpc_async("worker0", visit, (2, False))
        await until(is_pausing)
        call.cancel()
        ag.current_worker().faults = None  # another try would get through
        await until(lambda: not is_pausing())
        assert await ag.rpc_async("worker0", visit, (3, False)) == 3
        assert RAN == [1, 3]


async def no_call_runs() -> bool:
    return not (await ag.rpc_async("worker0", ag.debug_info))["running_calls"]


def is_pausing() -> bool:
    """Whether a call waits for its next attempt."""
    pause = retry._IdempotentCall._attempt_after.__name__
    return any(task.get_coro().__name__ == pause for task in asyncio.all_tasks())


async def test_closing_ends_a_call_that_waits_for_its_next_attempt(cluster):
    async with cluster(1, options=SLOW):
        refuse()
        call = ag.rpc_async("worker0", visit, (1, False))
        await until(is_pausing)
    with pytest.raises(WorkerClosed):
        await call


async def test_an_idempotent_function_called_by_remote_runs_at_most_once(cluster):
    async with cluster(1):
        refused = refuse("remote")
        with pytest.raises(RRefError, match="lost worker worker0"):
            await ag.remote("worker0", visit, (1, False))
        assert refused == {("fail", "remote"): 1}


# ── control requests ────────────────────────────────────────────────────────────────────────────


class Plan:
    """Decide what happens to the requests of one service, one after the other."""

    def __init__(self, *verdicts):
        self.verdicts = list(verdicts)

    def on_send(self, name, to):
        if name != "echo" or not self.verdicts:
            return SEND
        return self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]


@pytest.fixture
async def echo(agents):
    async with agents(2) as (a, b):
        b.services["echo"] = lambda sender, x: x
        yield a, b
        assert not any(a.links.counters().values())


async def test_a_control_request_is_sent_until_it_is_answered(echo):
    a, _ = echo
    a.fault_injector = Plan(DROP, FAIL, SEND)
    assert await a.request("worker1", "echo", 5, retry=True) == 5


async def test_a_control_request_without_an_answer_ends_at_its_deadline(echo):
    a, _ = echo
    a.fault_injector = Plan(DROP)
    with pytest.raises(DeadlineExceeded):
        await a.request("worker1", "echo", 5, retry=True, timeout=0.3)


async def test_a_control_request_ends_with_its_session(echo):
    a, b = echo
    a.fault_injector = Plan(DROP)
    request = a.request("worker1", "echo", 5, retry=True)
    a.fault_injector = None
    await b.close()
    with pytest.raises(WorkerLost):
        await request
    with pytest.raises(WorkerLost):
        await a.request("worker1", "echo", 5, retry=True)


async def test_a_control_request_to_a_restarted_worker_is_not_sent_to_its_successor(echo):
    a, b = echo
    a.fault_injector = Plan(DROP)
    request = a.request("worker1", "echo", 5, retry=True)
    a.directory.add(dataclasses.replace(b.info, incarnation=bytes(16)))
    with pytest.raises(WorkerLost, match="restarted"):
        await request
    a.fault_injector = None


async def test_cancelling_a_control_request_cancels_every_attempt(echo):
    a, b = echo
    cancelled = []

    async def never(sender, x):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(x)

    b.services["echo"] = never
    request = a.request("worker1", "echo", 5, retry=True)
    await until(lambda: a.links.counters()["pending_calls"] >= 2)
    request.cancel()
    await until(lambda: len(cancelled) >= 2)
    assert set(cancelled) == {5}
    assert a.links.counters()["pending_calls"] == 0


async def test_a_control_request_may_be_made_in_another_thread(echo):
    a, _ = echo
    a.fault_injector = Plan(DROP, SEND)

    def ask():
        return asyncio.run_coroutine_threadsafe(
            _awaited(a.request("worker1", "echo", 7, retry=True)), a.loop
        ).result()

    assert await asyncio.to_thread(ask) == 7


async def _awaited(future):
    return await future
