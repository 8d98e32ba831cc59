"""Snapshots of real workers: what they say, who may see it, and what they say of the silent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time

import pytest

import aiograd as ag
from aiograd.errors import NotAllowed, UnknownWorker
from aiograd.observe import Part
from aiograd.observe.snapshot import (
    BLOCKED,
    HIDDEN,
    LOST,
    RUNNING,
    SILENT,
    STOPPED,
    VERSION,
    CallRow,
    Data,
    WorkerRow,
)
from aiograd.observe.waits import find
from aiograd.rpc import scope
from tests.security import partner_functions as offer
from tests.security.conftest import workers_by_mode
from tests.support.waiting import until


def line_of(text: str) -> str:
    """Return "file:line" of the line of this file with a mark."""
    with open(__file__) as file:
        for number, line in enumerate(file, 1):
            if f"# mark: {text}" in line:
                return f"{__file__}:{number}"
    raise AssertionError(text)


async def relay(names):
    if not names:
        await asyncio.sleep(60)  # mark: sleeps
    first, *rest = names
    await ag.rpc_async(first, relay, args=(rest,))  # mark: relays


def occupy(seconds):
    time.sleep(seconds)  # mark: occupies


def nested(seconds):
    return ag.rpc_sync("worker0", occupy, args=(seconds,))  # mark: nests


async def hold(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)  # noqa: ASYNC251  # mark: holds


DOUBLED = []  # workers of one loop share the globals of this module


def double(x):
    DOUBLED.append(x * 2)
    return DOUBLED[-1].sum()


def share(count):
    return [ag.RRef(ag.zeros(1)) for _ in range(count)]


def local(count):
    return ag.LocalCluster(count, processes=False)


async def awaited(snapshot):
    return await snapshot


# ── what it says ────────────────────────────────────────────────────────────────────────────────


async def test_a_snapshot_of_this_worker_is_there_at_once():
    async with local(1):
        snapshot = ag.inspect()
        (row,) = snapshot.workers
        assert (row.name, row.rank, row.state, row.pid) == ("driver", 1, RUNNING, os.getpid())
        assert row.coordinator
        assert row.memory > 1 << 20
        assert row.cpu > 0
        assert row.counters == ag.debug_info()
        assert row.versions["python"] == ".".join(map(str, sys.version_info[:3]))
        assert "await it" in repr(snapshot)


async def test_awaited_it_has_all_workers_or_those_that_are_named():
    async with local(2):
        everybody = await ag.inspect()
        assert [row.name for row in everybody.workers] == ["worker0", "worker1", "driver"]
        assert everybody.version == VERSION
        assert "await" not in repr(everybody)
        assert (await everybody) is everybody
        some = await ag.inspect(["worker1"])
        assert [row.name for row in some.workers] == ["worker1"]
        assert ag.inspect(["worker1"]).workers == []
        assert [row.name for row in ag.inspect("driver").workers] == ["driver"]
        with pytest.raises(UnknownWorker, match="nobody"):
            await ag.inspect(["nobody"])


async def test_calls_have_function_line_age_budget_and_parent():
    async with local(2):
        names = ["worker1", "worker0"]
        future = ag.rpc_async("worker0", relay, args=(names,), timeout=30.0)  # mark: begins

        async def deep():
            return len((await ag.inspect()).running) == 3

        await until(deep)
        snapshot = await ag.inspect()
        made = {row.parent: row for row in snapshot.pending}
        first = made[None]
        second = made[first.key]
        third = made[second.key]
        assert (first.caller, first.callee, first.function) == ("driver", "worker0", "relay")
        assert (first.line, first.parent, first.budget) == (line_of("begins"), None, 30.0)
        assert (second.caller, second.line) == ("worker0", line_of("relays"))
        assert (third.caller, third.callee) == ("worker1", "worker0")
        assert 29.0 < third.budget <= 30.0
        running = {row.key: row for row in snapshot.running}
        assert running[first.key].at == running[second.key].at == line_of("relays")
        assert running[third.key].at == line_of("sleeps")
        assert 0 <= running[third.key].age <= running[first.key].age < 20
        calls = {row.key: row for row in snapshot.calls}
        assert len(calls) == len(snapshot.calls) == 3
        assert (calls[third.key].line, calls[third.key].at) == (third.line, line_of("sleeps"))
        assert calls[third.key].parent == second.key
        assert [row["key"] for row in json.loads(snapshot.to_json())["calls"]] == list(calls)
        future.cancel()


async def test_the_age_of_a_call_without_a_deadline_is_known():
    async with local(1):
        future = ag.rpc_async("worker0", asyncio.sleep, args=(60,), timeout=float("inf"))

        async def aged():
            rows = await ag.inspect()
            return [row for row in rows.running if row.age and row.age > 0.05]

        await until(aged)
        snapshot = await ag.inspect()
        assert snapshot.pending[0].budget is None
        assert 0.05 < snapshot.pending[0].age < 20
        assert snapshot.running[0].budget is None
        future.cancel()


async def test_functions_in_threads_are_seen_at_their_line():
    async with local(2):
        future = ag.rpc_async("worker1", nested, args=(0.6,))
        snapshot = None

        async def both():
            nonlocal snapshot
            snapshot = await ag.inspect()
            lines = {row.at for row in snapshot.running}
            return lines == {line_of("occupies"), line_of("nests")}

        await until(both)
        inner = next(row for row in snapshot.pending if row.function == "occupy")
        assert inner.parent == next(row.key for row in snapshot.running if row.function == "nested")
        await future


async def test_a_snapshot_can_be_taken_in_a_called_function_in_a_thread():
    async with local(1) as cluster:
        rows = await cluster["worker0"].call(lambda: ag.inspect().workers)
        assert [row.name for row in rows] == ["worker0"]


async def test_references_are_grouped_by_line_and_type_and_have_holders():
    async with local(2):
        kept = [ag.remote("worker0", ag.zeros, args=(10,)) for _ in range(5)]  # mark: made
        await asyncio.gather(*kept)
        text = ag.remote("worker0", str, args=("x" * 1000,))
        await text
        arrays, other = sorted((await ag.inspect()).references, key=lambda row: -row.count)
        assert (arrays.owner, arrays.line, arrays.count) == ("worker0", line_of("made"), 5)
        assert (arrays.type, arrays.size) == ("Tensor[10] float64", 400)
        assert arrays.holders == {"driver": 5}
        assert (other.type, other.count) == ("str", 1)
        assert other.size >= 1000
        del kept


async def test_ten_thousand_references_are_one_row_and_read_soon():
    async with local(1):
        kept = await ag.rpc_async("worker0", share, args=(10_000,))
        began = time.monotonic()
        (row,) = (await ag.inspect()).references
        assert time.monotonic() - began < 2.0
        assert (row.count, row.size, row.state) == (10_000, 80_000, "ready")
        del kept


async def test_contexts_and_passes_say_who_takes_part_and_who_waits():
    async with local(2):
        held, go = threading.Event(), threading.Event()

        def wait_here(gradient):
            held.set()
            go.wait(20)

        x = ag.ones(3, requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", double, args=(x,))
            DOUBLED.pop().register_hook(wait_here)

            async def backward():
                await ctx.backward(y)  # mark: backward

            running = asyncio.create_task(backward())
            await until(held.is_set)
            snapshot = await ag.inspect()
            go.set()
            await running
        row, other = sorted(snapshot.contexts, key=lambda row: row.worker)
        assert (row.worker, row.id, row.opened_by) == ("driver", str(ctx.id), "driver")
        assert (row.workers, row.sends, row.receives) == (["worker1"], 1, 1)
        assert (other.worker, other.opened_by) == ("worker1", "driver")
        passes = {row.worker: row for row in snapshot.passes}
        assert passes["driver"].waits_for == {"worker1": 1}
        assert passes["driver"].line == line_of("backward")
        assert passes["driver"].state == "waiting"
        assert passes["worker1"].state == "computing"
        assert passes["worker1"].originator == "driver"
        assert 0 <= passes["driver"].age < 20


async def test_links_count_bytes_both_ways():
    async with local(1):
        await ag.rpc_async("worker0", len, args=(b"x" * 1000,))
        snapshot = await ag.inspect()
        ours = next(row for row in snapshot.links if row.worker == "driver")
        theirs = next(row for row in snapshot.links if row.worker == "worker0")
        assert (ours.peer, ours.state, ours.suspect) == ("worker0", "open", False)
        assert ours.sent > 1000
        assert theirs.received >= 1000
        assert (ours.pending, ours.running) == (0, 0)


async def test_looking_changes_no_counter_of_calls():
    async with local(1):
        before = ag.debug_info()
        looks = [asyncio.ensure_future(awaited(ag.inspect())) for _ in range(5)]
        await asyncio.sleep(0)
        assert ag.debug_info()["pending_calls"] == 0
        await asyncio.gather(*looks)
        assert ag.debug_info() == before


# ── who may see it ──────────────────────────────────────────────────────────────────────────────


async def test_a_partner_sees_only_what_is_its_own():
    async with workers_by_mode("restricted", "trusted", "trusted") as (_, partner, third):
        await third.agent.call("worker0", offer.echo, ("of a third",))
        kept = await partner.agent.call("worker0", offer.lend, ("value",))

        async def as_partner():
            scope.use(partner.agent)
            return await ag.inspect(["worker0"])

        snapshot = await asyncio.create_task(as_partner())
        del kept
        (row,) = snapshot.workers
        assert (row.name, row.state) == ("worker0", HIDDEN)
        assert (row.host, row.pid, row.versions, row.counters) == ("", None, {}, {})
        assert {row.peer for row in snapshot.links} == {"worker1"}
        assert [row.holders for row in snapshot.references] == [{"worker1": 1}]
        assert [row.line for row in snapshot.references] == [""]
        text = snapshot.to_json()
        assert ".py" not in text
        assert "worker2" not in text


async def test_only_trusted_peers_let_a_worker_count_calls():
    async with workers_by_mode("restricted", "trusted") as (mine, partner):
        await partner.agent.request(mine.agent.info, "inspect", True, timeout=5.0)
        assert mine.agent.tally is None
        mine.agent.parts[Part].inspector.here(counting=True)
        assert mine.agent.tally is not None


@pytest.mark.parametrize(
    ("service", "args"),
    [
        ("inspect.all", ()),
        ("inspect.host", ([],)),
        ("inspect.stacks", ()),
        ("inspect.stacks.all", ()),
    ],
)
async def test_a_partner_may_not_ask_for_others_or_for_stacks(service, args):
    async with workers_by_mode("restricted", "trusted") as (_, partner):
        with pytest.raises(NotAllowed, match="may not look"):
            await partner.agent.request("worker0", service, *args)


def _raise(error: Exception) -> None:
    raise error


def _forged() -> str:
    """An answer about workers that are not the sender."""
    data = Data(1.0, "worker1", workers=[WorkerRow("worker0", 0, LOST, "gone")])
    data.workers.append(WorkerRow("worker1", 9, RUNNING, host="\x1b[2J", coordinator=True))
    data.pending = [CallRow(f"{n}", "worker0", "worker1", "f") for n in range(3)]
    data.pending += [CallRow(f"{n}", "worker1", "worker0", "f") for n in range(2000)]
    return data.to_json()


@pytest.mark.parametrize(
    "answer",
    [
        lambda sender: _raise(RuntimeError("of a partner")),
        lambda sender: "[" * 100_000,
        lambda sender: _forged(),
        lambda sender: None,
    ],
    ids=["an error", "nested", "forged", "nothing"],
)
async def test_a_partner_tells_of_itself_only_and_does_not_spoil_a_snapshot(answer):
    async with workers_by_mode("trusted", "restricted") as (first, partner):
        for service in ("inspect", "inspect.stacks", "inspect.record", "inspect.host"):
            partner.agent.services[service] = answer
        first.make_current()
        snapshot = await ag.inspect()
        assert [(row.name, row.rank) for row in snapshot.workers] == [
            ("worker0", 0),
            ("worker1", 1),
        ]
        assert snapshot.worker("worker0").state == RUNNING
        row = snapshot.worker("worker1")
        assert row.state in (HIDDEN, SILENT)
        assert (row.host, row.coordinator) == ("", False)
        assert all(row.caller == "worker1" for row in snapshot.pending)
        assert len(snapshot.pending) <= 1000
        inspector = first.agent.parts[Part].inspector
        assert (await inspector.stacks(None))["worker1"] == "it is a partner, and is not asked"
        assert list((await inspector.record(0.0))["silent"]) == ["worker1"]


# ── those that do not answer ────────────────────────────────────────────────────────────────────


async def test_a_stopped_worker_is_told_as_such_in_bounded_time():
    async with ag.LocalCluster(2) as cluster:
        pid = cluster.pid("worker1")
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            snapshot = await ag.inspect()
            assert time.monotonic() - began < 5.0
        finally:
            os.kill(pid, signal.SIGCONT)
        row = snapshot.worker("worker1")
        assert (row.state, row.pid) == (STOPPED, pid)
        assert f"kill -CONT {pid}" in row.why
        assert snapshot.worker("worker0").state == RUNNING


async def test_a_blocked_loop_is_told_with_its_line():
    async with ag.LocalCluster(2) as cluster:
        future = cluster["worker1"].call(hold, 7.0)
        snapshot = None

        async def noticed():
            nonlocal snapshot
            snapshot = await ag.inspect(["worker1"])
            return snapshot.worker("worker1").state == BLOCKED

        await until(noticed)
        row = snapshot.worker("worker1")
        assert row.at == line_of("holds")
        assert row.blocked > 1.0
        assert any(" in hold" in line for line in row.stack)
        assert find(snapshot)[0].guilty == line_of("holds")
        await future

        async def answers():
            return (await ag.inspect()).worker("worker1").state == RUNNING

        await until(answers)


async def test_a_killed_worker_is_lost_until_it_is_back():
    async with ag.LocalCluster(2) as cluster:
        await cluster.kill("worker1")
        snapshot = await ag.inspect()
        row = snapshot.worker("worker1")
        assert (row.state, snapshot.lost) == (LOST, [row])
        assert "its process ended" in row.why
        assert (await ag.inspect(["worker1"])).worker("worker1").state == LOST
        await cluster.restart("worker1")
        assert (await ag.inspect()).worker("worker1").state == RUNNING


async def test_a_worker_that_came_back_and_left_in_order_is_not_lost():
    async with ag.LocalCluster(2) as cluster:
        await cluster.kill("worker1")
        await cluster.restart("worker1")
        await cluster.scale(1)
        assert [row.name for row in (await ag.inspect()).workers] == ["worker0", "driver"]


async def test_a_worker_that_dies_while_it_is_asked_does_not_hold_up_the_others():
    async with ag.LocalCluster(2) as cluster:
        os.kill(cluster.pid("worker1"), signal.SIGSTOP)
        asked = asyncio.ensure_future(awaited(ag.inspect()))
        await asyncio.sleep(0)
        await cluster.kill("worker1")
        snapshot = await asked
        assert snapshot.worker("worker0").state == RUNNING
        assert snapshot.worker("worker1").state != RUNNING
