"""What clusters on other engines share, on an engine of this loop that obeys, hangs or refuses."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import pytest

import aiograd as ag
from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.engines.engine import (
    KILL_TIMEOUT,
    EngineCluster,
    EngineHosts,
    EngineWorker,
    HostedWorker,
    refuse,
)
from aiograd.errors import RpcError, WorkerClosed, WorkerLost
from aiograd.rpc.options import Options
from tests.support.waiting import until

OPTIONS = Options(grace=1.0)


class LoopHosts(EngineHosts):
    """An engine whose processes are tasks of this loop."""

    kind = "in a test"

    def __init__(self, how: str = "obeys", patience: float = 10.0) -> None:
        super().__init__(OPTIONS, patience)
        self.how = how
        self.hosted: dict[str, HostedWorker] = {}
        self.notes: list[str] = []

    async def count(self) -> int:
        return 2

    async def nodes(self) -> Sequence[tuple[str, str]]:
        return []

    async def start(self, cluster, places):
        invitation = self.attach(cluster)
        starts = []
        for name, rank in places:
            plan = WorkerPlan(name=name, rank=rank, options=OPTIONS, invitation=invitation)
            self.hosted[name] = hosted = HostedWorker(plan)
            start = EngineWorker(plan, lambda hosted=hosted: self._kill(hosted))
            self.starts[name] = start
            starts.append(start)
            if self.how == "refuses":
                start.fail(RpcError(f"no room for {name}: add some"))
            elif self.how != "never starts":
                self.spawn(hosted.start())
        return starts

    def _kill(self, hosted: HostedWorker) -> None:
        self.notes.append("kill")
        if self.how == "obeys":
            self.spawn(hosted.leave(graceful=False))

    def joined(self, start, peer):
        self.notes.append(f"{peer.name} joined")

    async def close(self) -> None:
        for hosted in self.hosted.values():
            await hosted.leave(graceful=False)
        await super().close()


def cluster_on(hosts: LoopHosts, n: int | None = 2) -> EngineCluster:
    return EngineCluster(hosts, n, OPTIONS, hosts.patience)


def who() -> str:
    return ag.get_worker_info().name


async def test_processes_are_known_as_soon_as_the_cluster_is_open():
    hosts = LoopHosts()
    async with cluster_on(hosts, None) as cluster:
        assert [cluster.pid(worker.name) for worker in cluster] == [os.getpid()] * 2
        assert sorted(hosts.notes) == ["worker0 joined", "worker1 joined"]
        assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker1"]


@pytest.mark.parametrize("how", ["obeys", "hangs"])
async def test_a_cluster_that_is_left_by_an_error_does_not_wait_for_its_engine(how):
    hosts = LoopHosts(how)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        async with cluster_on(hosts):
            _ = 1 / 0
    assert time.monotonic() - began < 10 + KILL_TIMEOUT
    assert all(start.ended.done() for start in hosts.starts.values())
    assert not any(hosted.running for hosted in hosts.hosted.values())


async def test_what_an_engine_says_of_a_failed_start_is_the_error():
    hosts = LoopHosts("refuses")
    with pytest.raises(RpcError, match="no room for worker0: add some"):
        async with cluster_on(hosts):
            pass


async def test_workers_that_never_come_are_an_error_within_the_patience():
    hosts = LoopHosts("never starts", patience=0.1)
    with pytest.raises(RpcError, match=r"worker0' was silent for 1\.1 s"):
        async with cluster_on(hosts):
            pass
    assert hosts.notes.count("kill") >= 2


async def test_only_a_kill_of_the_user_condemns_the_process():
    hosts = LoopHosts()
    async with cluster_on(hosts) as cluster:
        await cluster.kill("worker1")
        assert hosts.starts["worker1"].condemned
        assert not hosts.starts["worker0"].condemned
        with pytest.raises(WorkerLost):
            await cluster["worker1"].call(who)


async def test_a_hosted_worker_leaves_while_it_joins():
    async with ag.LocalCluster(0, processes=False):
        plan = WorkerPlan(
            name="late",
            rank=None,
            options=OPTIONS,
            invitation=ag.Invitation(addresses=("tcp:127.0.0.1:1",), secret=b"0" * 32),
        )
        hosted = HostedWorker(plan)
        starting = asyncio.ensure_future(hosted.start())
        await until(lambda: hosted.running)
        await hosted.leave()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not hosted.running
        assert hosted.over.is_set()


async def test_a_hosted_worker_says_why_it_left():
    hosts = LoopHosts()
    async with cluster_on(hosts) as cluster:
        hosted = hosts.hosted["worker0"]
        waiting = asyncio.ensure_future(hosted.wait())
        await cluster.scale(1)
        second = hosts.hosted["worker1"]
        assert "asked it to leave" in await second.wait()
        assert not second.running
        assert not hosted.leaving
    assert "closed" in await waiting
    assert hosted.over.is_set()
    await hosted.leave()  # without effect


async def test_a_task_that_fails_is_logged_and_one_that_runs_ends_with_the_hosts(caplog):
    hosts = LoopHosts()

    async def fail() -> None:
        raise OSError("the engine is gone")

    hosts.spawn(fail())
    hosts.spawn(asyncio.sleep(60))
    with caplog.at_level(logging.WARNING, "aiograd.cluster"):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await hosts.close()
    assert "the engine is gone" in caplog.text


async def test_a_refusal_has_the_engine_the_cause_and_the_cure():
    cause = OSError("no route")
    error = refuse("Ray did not answer", cause, "is it running?")
    assert str(error) == "Ray did not answer: no route; is it running?"
    assert error.__cause__ is cause


async def test_one_secret_per_member_is_refused():
    with pytest.raises(ValueError, match="one party"):
        EngineHosts(Options(secret={"a": b"0" * 32}))


async def test_a_cluster_that_was_closed_says_so():
    hosts = LoopHosts()
    async with cluster_on(hosts, 1) as cluster:
        pass
    with pytest.raises(WorkerClosed):
        await cluster.kill("worker0")
