"""F1: a worker is killed. F2: a worker is stopped, and continues or not."""

from __future__ import annotations

import asyncio
import math
import os
import signal

import pytest

import aiograd as ag
from aiograd.cluster.membership.coordinator import Coordinator
from aiograd.errors import DeadlineExceeded, WorkerLost, WorkerUnresponsive
from tests.failures.conftest import PACE
from tests.failures.work import (
    alive,
    echo,
    fork_helper,
    fork_helper_in_c,
    kill,
    linger,
    linger_through,
    outcome,
    running_calls,
    stopped,
    until,
)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_f1_every_call_to_a_killed_worker_is_lost(cluster, figure, transport):
    async with cluster(3, transport=transport) as c:
        await asyncio.gather(*(ag.rpc_async(worker, echo, (1,)) for worker in c))
        calls = [ag.rpc_async("worker1", linger) for _ in range(20)]
        nested = ag.rpc_async("worker0", linger_through, (["worker1"],))
        await running_calls("worker1", 21)  # the nested one, too
        killed = kill(c, "worker1")
        found = await asyncio.gather(*map(outcome, [*calls, nested]))
        for error, _ in found:
            assert type(error) is WorkerLost
            assert error.worker == "worker1"
            assert error.executed == "unknown"
        how = "Unix socket" if transport == "unix" else "TCP"
        slowest = max(when for _, when in found) - killed
        figure("F1", f"a worker is killed ({how}): `WorkerLost`", 0.5, slowest)
        error, _ = await outcome(ag.rpc_async("worker1", echo, (1,)))
        assert type(error) is WorkerLost
        assert error.executed == "no"
        assert await ag.rpc_async("worker2", echo, (2,)) == 2


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("told_by", ["the end of the connection", "the end of the process"])
async def test_f1_a_killed_worker_is_lost_although_a_child_that_it_forked_lives(
    cluster, figure, monkeypatch, transport, told_by
):
    """The child has copies of the worker's descriptors. Either way alone must tell of the loss."""
    fork = fork_helper_in_c
    if told_by == "the end of the connection":
        fork = fork_helper
        monkeypatch.setattr(Coordinator, "process_ended", lambda self, peer, why: None)
    async with cluster(2, transport=transport) as c:
        helper = await ag.rpc_async("worker1", fork)
        try:
            own = ag.rpc_async("worker1", linger, timeout=20.0)
            peers = ag.rpc_async("worker0", linger_through, (["worker1"],), timeout=20.0)
            await running_calls("worker1", 2)
            killed = kill(c, "worker1")
            found = await asyncio.gather(outcome(own), outcome(peers))
            assert alive(helper)
            for error, _ in found:
                assert type(error) is WorkerLost
                assert error.worker == "worker1"
            slowest = max(when for _, when in found) - killed
            what = f"… and a child that it forked lives: `WorkerLost`, known by {told_by}"
            figure("F1", what, 1.0, slowest)
            assert [info.name for info in ag.workers()] == ["worker0", "driver"]
            await c.restart("worker1")
            assert await ag.rpc_async("worker1", echo, (1,)) == 1
        finally:
            os.kill(helper, signal.SIGKILL)


async def test_f1_a_worker_that_forked_a_helper_is_killed_by_its_cluster(cluster):
    async with cluster(2) as c:
        helper = await ag.rpc_async("worker1", fork_helper_in_c)
        try:
            await c.kill("worker1")
            assert [info.name for info in ag.workers()] == ["worker0", "driver"]
        finally:
            os.kill(helper, signal.SIGKILL)


@pytest.mark.deadline(60)
async def test_f2_a_stopped_worker_is_suspect_and_its_calls_end(cluster, figure, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.caller.calls.UNRESPONSIVE", 30.0 / PACE)
    async with cluster(2) as c:
        agent = c.driver.agent
        await asyncio.gather(*(ag.rpc_async(worker, echo, (1,)) for worker in c))
        with stopped(c, "worker1"):
            began = asyncio.get_running_loop().time()
            timed = asyncio.create_task(outcome(ag.rpc_async("worker1", echo, (1,), timeout=0.5)))
            endless = asyncio.create_task(
                outcome(ag.rpc_async("worker1", echo, (1,), timeout=math.inf))
            )
            suspected = await until(lambda: "worker1" in agent.links.suspects())
            # A heartbeat may have come just before, and one more is needed to miss it.
            promise = 6.0 / PACE
            figure("F2", "a worker is stopped: suspect", promise, suspected - began)
            error, when = await timed
            assert isinstance(error, DeadlineExceeded)
            assert error.worker == "worker1"
            figure(
                "F2",
                "… a call to it: `DeadlineExceeded` past its deadline",
                0.25,
                when - began - 0.5,
            )
            error, when = await endless
            assert isinstance(error, WorkerUnresponsive)
            assert error.worker == "worker1"
            promise = 31.0 / PACE
            figure("F2", "… without a deadline: `WorkerUnresponsive`", promise, when - began)


async def test_f2_a_stopped_worker_that_continues_in_time_answers_its_calls(cluster, figure):
    async with cluster(2) as c:
        agent = c.driver.agent
        assert await ag.rpc_async("worker1", echo, (1,)) == 1
        with stopped(c, "worker1"):
            calls = [ag.rpc_async("worker1", echo, (i,), timeout=math.inf) for i in range(10)]
            await until(lambda: "worker1" in agent.links.suspects())
        woken = asyncio.get_running_loop().time()
        assert await asyncio.gather(*calls) == list(range(10))
        answered = asyncio.get_running_loop().time()
        figure("F2", "… it wakes: its calls are answered", 1.0, answered - woken)
        await until(lambda: not agent.links.suspects())
