"""Barriers and gathers: the root's bookkeeping, and workers in one loop."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from aiograd.cluster.api import all_gather, barrier, get_worker_info
from aiograd.cluster.membership.collectives import PendingGathers
from aiograd.cluster.worker import Worker
from aiograd.errors import DeadlineExceeded, UnknownWorker, WorkerClosed, WorkerLost
from aiograd.rpc.api import rpc_async, run_sync
from aiograd.rref.rref import RRef
from tests.support.waiting import until

# ── the root's bookkeeping ────────────────────────────────────────────────────────────────────────

GROUP = (("a", b"1"), ("b", b"2"), ("c", b"3"))


def values(found):
    return [(contribution.name, contribution.value) for contribution in found]


def test_a_gather_is_complete_when_every_member_has_contributed():
    pending = PendingGathers()
    for missing, name, value in ((["b", "c"], "a", 1), (["b"], "c", 3)):
        pending.add(GROUP, name, value)
        assert pending.missing(GROUP) == missing
        assert pending.complete(GROUP) == []
    pending.add(GROUP, "b", 2)
    found = pending.complete(GROUP)
    assert values(found) == [("a", 1), ("b", 2), ("c", 3)]  # by rank, in whatever order they came
    assert list(pending) == []


def test_contributions_of_one_member_pair_up_in_their_order():
    pending, group = PendingGathers(), GROUP[:2]
    for value in ("b1", "b2"):
        pending.add(group, "b", value)
    for n in (1, 2):
        pending.add(group, "a", f"a{n}")
        assert values(pending.complete(group)) == [("a", f"a{n}"), ("b", f"b{n}")]
    assert list(pending) == []


def test_gathers_of_different_groups_do_not_mix():
    pending = PendingGathers()
    pending.add(GROUP, "a", 1)
    pending.add(GROUP[:2], "b", 2)
    assert pending.missing(GROUP) == ["b", "c"]
    assert pending.missing(GROUP[:2]) == ["a"]


def test_a_withdrawn_contribution_does_not_complete_a_gather():
    pending, group = PendingGathers(), GROUP[:2]
    first, second = pending.add(group, "a", 1), pending.add(group, "a", 1)
    pending.withdraw(first)
    pending.withdraw(first)
    assert list(pending) == [second]
    pending.add(group, "b", 2)
    assert pending.complete(group)[0] is second
    pending.withdraw(second)  # given out already
    assert list(pending) == []


def test_a_lost_worker_ends_the_gathers_of_its_groups():
    pending = PendingGathers()
    doomed = pending.add(GROUP, "a", 1)
    other = pending.add(GROUP[:2], "a", 1)
    assert pending.gone(b"3") == [doomed]
    assert pending.gone(b"nobody") == []
    assert list(pending) == [other]
    pending.withdraw(doomed)


# ── among workers ─────────────────────────────────────────────────────────────────────────────────

WORK: list[str] = []  # who has done something; the workers of a test share this process


async def _work() -> None:
    await asyncio.sleep(0)
    WORK.append(get_worker_info().name)


async def test_wait_all_workers(world):
    workers = await world.static("a", "b", "c")
    WORK.clear()

    async def run():
        if get_worker_info().rank == 0:
            for to in ("b", "c"):
                await asyncio.gather(*(rpc_async(to, _work) for _ in range(30)))
        await barrier()
        assert WORK == ["b"] * 30 + ["c"] * 30
        await barrier()

    await world.everyone(workers, run)


async def test_all_gather(world):
    names = ["a", "b", "c", "d"]
    workers = await world.static(*names)

    async def run():
        return await all_gather(get_worker_info().rank)

    assert await world.everyone(workers, run) == [dict(zip(names, range(4), strict=True))] * 4


async def test_gatherings_of_the_same_workers_pair_up_in_the_order_of_their_calls(world):
    workers = await world.static("a", "b", "c")

    async def run():
        name = get_worker_info().name
        return await asyncio.gather(*(all_gather((name, n)) for n in range(20)))

    for results in await world.everyone(workers, run):
        assert results == [{name: (name, n) for name in "abc"} for n in range(20)]


async def test_what_one_does_to_a_gathered_value_is_nothing_to_the_others(world):
    workers = await world.static("a", "b", "c")
    came = asyncio.Event()

    async def run():
        if get_worker_info().name == "a":  # the leader, who comes last
            await came.wait()
        elif get_worker_info().name == "c":
            came.set()
        values = await all_gather(np.ones(3))
        total = values["a"]
        for name in "bc":
            total += values[name]
        return total.tolist()

    assert await world.everyone(workers, run) == [[3.0] * 3] * 3


KEPT: list[RRef] = []  # references that a worker of a test was given


async def keep(rref: RRef) -> None:
    KEPT.append(rref)


async def test_a_gathering_that_brings_references_is_not_overtaken(world):
    workers = await world.static("a", "b", "c")

    async def lend():
        if get_worker_info().name == "c":
            await rpc_async("b", keep, (RRef(5),))

    async def run():
        name = get_worker_info().name
        if name == "c":
            return None
        values = (KEPT.pop() if name == "b" else "a 1", f"{name} 2")
        pair = [all_gather(value, ["a", "b"], timeout=5) for value in values]
        one, other = await asyncio.gather(*pair)
        return one["a"], type(one["b"]), other

    await world.everyone(workers, lend)
    both = {"a": "a 2", "b": "b 2"}
    assert (await world.everyone(workers, run))[:2] == [("a 1", RRef, both)] * 2


async def test_barrier(world):
    workers = await world.static("a", "b", "c", "d")
    arrived: set[str] = set()

    async def run():
        arrived.add(get_worker_info().name)
        await barrier()
        assert arrived == set("abcd")

    await world.everyone(workers, run)


async def test_barrier_of_subsets_at_once(world):
    workers = await world.static("a", "b", "c", "d")

    async def run():
        mine = ["a", "c"] if get_worker_info().rank % 2 == 0 else ["d", "b"]  # in any order
        for _ in range(5):
            await barrier(mine)
        return sorted(await all_gather(1, mine))

    assert await world.everyone(workers, run) == [["a", "c"], ["b", "d"]] * 2


async def test_barrier_of_one(world):
    workers = await world.static("a", "b", "c")

    async def run():
        name = get_worker_info().name
        await barrier(["a", "b"] if name in "ab" else ["c"])
        assert await all_gather("x", [name]) == {name: "x"}

    await world.everyone(workers, run)


async def test_barrier_many_times_at_once(world):
    a, b, c = await world.static("a", "b", "c")
    passed: list[str] = []

    async def run():
        await asyncio.gather(*(barrier() for _ in range(3)))
        passed.append(get_worker_info().name)

    waiting = [asyncio.create_task(world.run_as(worker, run)) for worker in (a, b)]
    await until(lambda: brought_to(a) == {"a", "b"})
    assert passed == []
    await asyncio.gather(*waiting, world.run_as(c, run))
    assert sorted(passed) == ["a", "b", "c"]
    assert brought_to(a) == set()


def brought_to(leader: Worker) -> set[str]:
    """Whose values wait at a worker for those of others."""
    return {contribution.name for contribution in leader.member.collectives._pending}


async def test_all_gather_timeout(world):
    a, b, c = await world.static("a", "b", "c")

    async def run():
        await all_gather(1, timeout=0.1)

    outcomes = await asyncio.gather(
        world.run_as(a, run), world.run_as(b, run), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 2
    assert [outcome.worker for outcome in outcomes] == ["c", "a"]  # the leader knows who is missing
    assert [outcome.function for outcome in outcomes] == ["all_gather"] * 2

    with pytest.raises(DeadlineExceeded) as late:  # the others have gone
        await world.run_as(c, run)
    assert late.value.worker == "a"

    async def again():
        return await all_gather(2)

    assert await world.everyone([a, b, c], again) == [dict.fromkeys("abc", 2)] * 3


class SlowToPickle:
    def __reduce__(self):
        time.sleep(0.2)
        return SlowToPickle, ()


async def test_all_gather_timeout_of_what_takes_too_long_to_send(world):
    a, b = await world.static("a", "b")

    async def run():
        await all_gather(SlowToPickle(), timeout=0.1)

    outcomes = await asyncio.gather(
        world.run_as(a, run), world.run_as(b, run), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 2


@pytest.mark.parametrize("impatient", ["a", "b"], ids=["leader", "follower"])
async def test_who_gave_up_may_come_again_and_meets_those_who_wait(world, impatient):
    workers = {worker.name: worker for worker in await world.static("a", "b", "c")}

    async def come():
        return await all_gather(get_worker_info().name)

    async def come_briefly():
        await all_gather("too early", timeout=0.05)

    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            await world.run_as(workers[impatient], come_briefly)
    cancelled = asyncio.create_task(world.run_as(workers[impatient], come))
    await until(lambda: brought_to(workers["a"]) == {impatient})
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    everyone = await world.everyone(list(workers.values()), come)
    assert everyone == [{name: name for name in "abc"}] * 3
    assert brought_to(workers["a"]) == set()


async def test_a_small_value_does_not_overtake_a_large_one(world):
    workers = await world.static("a", "b", "c")

    async def run():
        sizes = [3_000_000, 1, 200_000, 1]
        return await asyncio.gather(*(all_gather(bytes(size)) for size in sizes))

    for results in await world.everyone(workers, run):
        assert [{len(v) for v in values.values()} for values in results] == [
            {3_000_000}, {1}, {200_000}, {1},
        ]  # fmt: skip


async def test_a_barrier_ends_when_one_of_its_workers_dies(world):
    a, b, c = await world.static("a", "b", "c")

    async def wait():
        await barrier(timeout=30)

    waiting = [asyncio.create_task(world.run_as(worker, wait)) for worker in (a, b)]
    await until(lambda: brought_to(a) == {"a", "b"})
    await c.close(graceful=False)
    for each in waiting:
        with pytest.raises(WorkerLost, match="c"):
            await each


async def test_a_barrier_ends_when_its_leader_dies(world):
    a, b, _c = await world.static("a", "b", "c")

    async def wait():
        await barrier(timeout=30)

    waiting = asyncio.create_task(world.run_as(b, wait))
    await until(lambda: brought_to(a) == {"b"})
    await a.close(graceful=False)
    with pytest.raises(WorkerLost, match="a"):
        await waiting


async def test_barriers_work_on_after_a_worker_was_restarted(world):
    a, b = await world.static("a", "b")
    arrived: list[str] = []

    async def run():
        arrived.append(get_worker_info().name)
        await barrier()
        return sorted(arrived)

    for turn in (1, 2, 3):
        assert await world.everyone([a, b], run) == [[*"a" * turn, *"b" * turn]] * 2
    await b.close(graceful=False)
    await a.member.wait_gone("b")
    b = world.worker("b", 1, world_size=2)
    await b.start()
    assert await world.everyone([a, b], run) == [[*"aaaabbbb"]] * 2


async def test_only_those_who_take_part_may_name_themselves(world):
    a, _b = await world.static("a", "b")

    async def without_me():
        await barrier(["b"])

    async def stranger():
        await barrier(["a", "z"])

    async def a_string():
        await barrier("ab")

    with pytest.raises(ValueError, match="not one of"):
        await world.run_as(a, without_me)
    with pytest.raises(UnknownWorker, match="z"):
        await world.run_as(a, stranger)
    with pytest.raises(TypeError, match="several"):
        await world.run_as(a, a_string)


async def test_a_barrier_inherits_the_time_of_the_call_it_is_in(world):
    a, _b = await world.static("a", "b")
    with pytest.raises(DeadlineExceeded):
        await a.agent.call("b", barrier, (), timeout=0.1)


async def test_closing_ends_a_barrier(world):
    a, _b = await world.static("a", "b")

    async def wait():
        await barrier()

    waiting = asyncio.create_task(world.run_as(a, wait))
    await until(lambda: brought_to(a) == {"a"})
    await a.close(graceful=False)
    with pytest.raises(WorkerClosed):
        await waiting


def _barrier_in_a_thread() -> str:
    run_sync(barrier())
    return get_worker_info().name


async def test_barrier_from_several_threads_at_once(world):
    workers = await world.static("a", "b", "c")
    calls = [workers[0].agent.call(name, _barrier_in_a_thread) for name in "abc" for _ in range(3)]
    assert await asyncio.gather(*calls) == [name for name in "abc" for _ in range(3)]


async def test_a_loss_that_is_read_right_behind_a_barrier_ends_the_barrier(world):
    """Both messages may come in one read, and a coroutine begins only after it."""
    a, b, c = await world.open("a", "b", "c")
    members = [worker.agent.info for worker in (a, b, c)]
    group = tuple((peer.name, peer.incarnation) for peer in members)
    asked = a.agent.services["cluster.gather"](b.agent.info, group, None)
    a.member.collectives.gone(c.agent.info, WorkerLost("c"))
    with pytest.raises(WorkerLost) as caught:
        async with asyncio.timeout(5):
            await asked
    assert caught.value.worker == "c"


async def test_a_member_whose_connection_to_one_other_was_cut_takes_part_in_barriers(world):
    """While both are members, only their own connection is lost; the next one is dialled."""
    a, b, c = await world.open("a", "b", "c")
    for told in b.agent.lost:
        told(c.agent.info, WorkerLost("c", "unknown", "the connection was cut"))
    async with asyncio.timeout(5):
        gathers = [
            worker.member.collectives.gather(worker.name, None, 5.0, "all_gather")
            for worker in (a, b, c)
        ]
        found = await asyncio.gather(*gathers)
    assert found == [{"a": "a", "b": "b", "c": "c"}] * 3
