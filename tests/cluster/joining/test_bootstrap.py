"""A start that cannot succeed: every rank hears why, whenever it comes and wherever they meet."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

import aiograd as ag
from aiograd.cluster.config import WorkerPlan, plan_worker
from aiograd.cluster.joining import bootstrap
from aiograd.cluster.joining.rendezvous import Refusal, RendezvousFile
from aiograd.cluster.membership import coordinator
from aiograd.cluster.membership.member import Member
from aiograd.cluster.worker import Worker
from aiograd.errors import AuthError, ProtocolError, RpcError, WorkerLost
from aiograd.rpc.options import Options
from aiograd.wire.handshake import VERSION, Identity
from tests.support.waiting import until

QUICK = Options(grace=2.0, timeout=10.0)

# What three ranks say of themselves: name, rank, world size. And what each of them must be told.
WRONG = {
    "one name": ([("x", 0, 3), ("y", 1, 3), ("y", 2, 3)], ["'y'", "ranks 1 and 2"]),
    "rank 0's name": ([("x", 0, 3), ("x", 1, 3), ("y", 2, 3)], ["'x'", "ranks 0 and 1"]),
    "names in other letters": ([("x", 0, 3), ("y", 1, 3), ("Y", 2, 3)], ["'y'", "'Y'"]),
    "one rank": ([("x", 0, 3), ("y", 1, 3), ("z", 1, 3)], ["'y'", "'z'", "rank 1"]),
    "a smaller world": ([("x", 0, 3), ("y", 1, 2), ("z", 2, 3)], ["'x'", "3", "'y'", "2"]),
    "a larger world": ([("x", 0, 3), ("y", 1, 4), ("z", 2, 3)], ["'x'", "3", "'y'", "4"]),
    "no world": ([("x", 0, 3), ("y", 1, None), ("z", 2, 3)], ["'x'", "3", "'y'", "no world size"]),
}


async def refusal(worker: Worker) -> str:
    with pytest.raises(RpcError) as caught:
        await worker.start()
    assert type(caught.value) is RpcError
    return str(caught.value)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("wrong", WRONG)
async def test_every_rank_hears_why_in_whatever_order_they_come(world, wrong, order):
    given, words = WRONG[wrong]
    starts = []
    for each in order:
        starts.append(asyncio.create_task(refusal(world.worker(*given[each]))))
        for _ in range(20):  # ticks: so long that this one has come, or waits for rank 0
            await asyncio.sleep(0)
    told = await asyncio.gather(*starts)
    assert len(set(told)) == 1
    for word in words:
        assert word in told[0]


@pytest.fixture(params=["memory", "unix", "file"])
def plan(request, world, tmp_path):
    """Plans of workers that meet in one of three ways."""

    def make(name: str, rank: int, world_size: int | None, **settings) -> WorkerPlan:
        if request.param == "memory":
            return replace(world.worker(name, rank, world_size)._plan, **settings)
        place = f"{request.param}:{tmp_path}/meet"
        options = replace(QUICK, secret=b"0123456789abcdef")
        return replace(plan_worker(name, rank, world_size, place, options, {}), **settings)

    return make


async def test_rank_0_tells_a_rank_that_comes_when_all_others_have_gone(plan):
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(refusal(Worker.from_plan(plan("x", 0, 3))))
    why = await refusal(Worker.from_plan(plan("x", 1, 3)))
    began = loop.time()
    assert await refusal(Worker.from_plan(plan("z", 2, 3))) == why
    assert await first == why
    assert loop.time() - began < 4.0  # and not when the last one has lost its join_timeout


@pytest.fixture
def held_join(monkeypatch):
    """Holds the `join` of the worker "late": it is connected, and rank 0 has not heard it yet."""
    connected, released = asyncio.Event(), asyncio.Event()
    join = Member.join

    async def held(member: Member, timeout: float) -> None:
        if member.agent.name == "late":
            connected.set()
            await released.wait()
        await join(member, timeout)

    monkeypatch.setattr(Member, "join", held)
    return connected, released


async def test_rank_0_stays_for_a_connected_rank_whose_join_is_on_its_way(plan, held_join):
    connected, released = held_join
    first = asyncio.create_task(refusal(Worker.from_plan(plan("x", 0, 3))))
    late = asyncio.create_task(refusal(Worker.from_plan(plan("late", 1, 3))))
    await connected.wait()
    why = await refusal(Worker.from_plan(plan("x", 2, 3)))
    assert not first.done()
    released.set()
    assert await asyncio.gather(first, late) == [why, why]


async def test_a_rank_that_loses_rank_0_before_its_join_reads_the_refusal_in_the_file(
    tmp_path, held_join, monkeypatch
):
    monkeypatch.setattr(coordinator, "CONFIRM_TIMEOUT", 0.01)
    connected, released = held_join
    first = asyncio.create_task(refusal(Worker.from_plan(file_plan(tmp_path, "x", 0))))
    late = asyncio.create_task(refusal(Worker.from_plan(file_plan(tmp_path, "late", 1))))
    await connected.wait()
    why = await refusal(Worker.from_plan(file_plan(tmp_path, "x", 2)))
    assert await first == why
    released.set()
    assert await late == why


async def test_a_rank_that_loses_rank_0_without_a_refusal_gets_the_loss(tmp_path, held_join):
    connected, released = held_join
    first = Worker.from_plan(file_plan(tmp_path, "x", 0))
    start = asyncio.create_task(first.start())
    late = asyncio.create_task(Worker.from_plan(file_plan(tmp_path, "late", 1)).start())
    await connected.wait()
    start.cancel()
    await asyncio.wait([start])
    released.set()
    with pytest.raises(WorkerLost):
        await late


async def test_rank_0_does_not_stay_for_ever_for_ranks_that_never_come(plan):
    loop = asyncio.get_running_loop()
    began = loop.time()
    told = await asyncio.gather(
        *(refusal(Worker.from_plan(plan("x", rank, 8))) for rank in range(2))
    )
    assert len(set(told)) == 1
    assert loop.time() - began < 2.0 + 4.0


async def test_the_next_start_does_not_hear_the_refusal_of_the_last(plan):
    await asyncio.gather(*(refusal(Worker.from_plan(plan("x", rank, 2))) for rank in range(2)))
    ranks = [Worker.from_plan(plan(f"w{rank}", rank, 2)) for rank in range(2)]
    others = asyncio.create_task(ranks[1].start())
    for _ in range(20):
        await asyncio.sleep(0)  # it looks before rank 0 is there
    await asyncio.gather(ranks[0].start(), others)
    assert [info.name for info in ranks[0].workers()] == ["w0", "w1"]
    await asyncio.gather(*(worker.close() for worker in ranks))


async def test_those_who_wait_hear_that_the_world_was_not_complete(plan):
    told = await asyncio.gather(
        refusal(Worker.from_plan(plan("x", 0, 3, join_timeout=0.3))),
        refusal(Worker.from_plan(plan("y", 1, 3, join_timeout=0.3))),
    )
    assert len(set(told)) == 1
    assert "no word from rank 2" in told[0]


async def test_a_second_rank_0_at_a_file_ends_the_start_of_everyone(tmp_path):
    first = asyncio.create_task(refusal(Worker.from_plan(file_plan(tmp_path, "a", 0))))
    await until(lambda: (tmp_path / "meet").exists())
    other = asyncio.create_task(refusal(Worker.from_plan(file_plan(tmp_path, "b", 1))))
    why = await refusal(Worker.from_plan(file_plan(tmp_path, "c", 0)))
    assert why == "ranks must be unique: 'a' and 'c' both have rank 0"
    assert await asyncio.gather(first, other) == [why, why]


async def test_a_file_that_a_dead_rank_0_left_is_replaced(tmp_path):
    RendezvousFile((f"unix:{tmp_path}/gone", "tcp:127.0.0.1:1"), b"s" * 32).write(
        f"{tmp_path}/meet"
    )
    ranks = [Worker.from_plan(file_plan(tmp_path, f"w{rank}", rank)) for rank in range(3)]
    await asyncio.gather(*(worker.start() for worker in ranks))
    assert [info.name for info in ranks[2].workers()] == ["w0", "w1", "w2"]
    await asyncio.gather(*(worker.close() for worker in ranks))


# ── what is told in a file ──────────────────────────────────────────────────────────────────────


def file_plan(tmp_path, name: str, rank: int, **settings) -> WorkerPlan:
    options = replace(QUICK, secret=b"0123456789abcdef")
    made = plan_worker(name, rank, 3, f"file:{tmp_path}/meet", options, {})
    return replace(made, **settings)


@pytest.mark.parametrize(("age", "told"), [(60.0, ()), (-60.0, ()), (0.0, (0, 1))])
async def test_a_refusal_of_another_start_is_waited_out(tmp_path, monkeypatch, age, told):
    monkeypatch.setattr(bootstrap, "REPLACE_GRACE", 0.0)
    now = bootstrap.Runtime().wall_time()
    RendezvousFile((), refusal=Refusal("no", now - age, told)).write(f"{tmp_path}/meet")
    why = await refusal(Worker.from_plan(file_plan(tmp_path, "b", 1, join_timeout=0.1)))
    assert "did not write its address" in why
    assert "an earlier start was refused: no" in why


async def test_a_refusal_is_heard_only_when_no_new_rank_0_replaces_it(tmp_path):
    now = bootstrap.Runtime().wall_time()
    RendezvousFile((), refusal=Refusal("no", now, (0, 2))).write(f"{tmp_path}/meet")
    assert await refusal(Worker.from_plan(file_plan(tmp_path, "b", 1))) == "no"


def test_a_refusal_is_for_ranks_that_were_not_told_yet_and_for_duplicates():
    found = Refusal("no", 100.0, (0, 1, 1))
    assert found.applies_to(2, 101.0)
    assert found.applies_to(1, 101.0)  # a third one of that rank
    assert found.applies_to(None, 101.0)
    assert not found.applies_to(0, 101.0)
    assert not found.applies_to(2, 111.0)
    assert not found.applies_to(2, 89.0)


def test_a_refusal_carries_neither_secret_nor_address(tmp_path):
    path = f"{tmp_path}/meet"
    RendezvousFile((), refusal=Refusal("no", 1.0, (0, 1))).write(path)
    assert RendezvousFile.read(path) == RendezvousFile((), None, Refusal("no", 1.0, (0, 1)))


# ── secrets and versions ────────────────────────────────────────────────────────────────────────


async def test_rank_0_says_that_somebody_came_with_another_secret(world):
    first = asyncio.create_task(refusal(world.worker("a", 0, 2, join_timeout=1.0)))
    other = world.worker("b", 1, 2)
    stranger = Worker.from_plan(replace(other._plan, secret=b"another secret of 16"))
    with pytest.raises(AuthError, match="secret"):
        await stranger.start()
    why = await first
    assert "no word from rank 1" in why
    assert "'b'" not in why  # it has proven no name
    assert "somebody at " in why
    assert "does not know a secret of this worker" in why


async def test_versions_that_do_not_fit_are_named_on_both_sides(world, monkeypatch):
    first = asyncio.create_task(refusal(world.worker("a", 0, 2, join_timeout=1.0)))
    await asyncio.sleep(0)

    def older(name: str, *rest: Any) -> Identity:
        found = Identity(name, *rest)
        return replace(found, version=VERSION - 1) if name == "b" else found

    monkeypatch.setattr("aiograd.rpc.agent.Identity", older)
    with pytest.raises(ProtocolError, match=f"speaks {VERSION}, we speak {VERSION - 1}"):
        await world.worker("b", 1, 2).start()
    assert f"speaks {VERSION - 1}, we speak {VERSION}" in await first


async def test_a_successor_writes_the_file_and_the_lost_coordinator_does_not_remove_it(tmp_path):
    where = f"file:{tmp_path}/meet"
    options = Options(grace=1.0)
    first = ag.Worker("a", rank=0, rendezvous=where, options=options)
    await first.start()
    others = [await ag.join(where, name, options=options) for name in "bcd"]
    try:
        # It ends without a word, and cleans up when another one leads already.
        first.agent.listener.close()
        for link in list(first.agent.links.all()):
            assert link.connection is not None
            link.connection.transport.abort()
        first.agent.dialer.close()
        await until(lambda: {each.member.leader.name for each in others} == {"b"}, 15)
        await first.close(graceful=False)
        content = RendezvousFile.read(str(tmp_path / "meet"))
        assert content is not None
        assert content.author.startswith("b on ")
        async with await ag.join(where, "e", options=options) as newcomer:
            assert [each.name for each in newcomer.workers()] == list("bcde")
    finally:
        for worker in (*reversed(others), first):
            await worker.close(graceful=False)
    assert not (tmp_path / "meet").exists()
