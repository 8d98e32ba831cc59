"""The fork server: workers that it forks, and what remains when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import weakref

import numpy as np

from aiograd.rpc.link.link import Link
from aiograd.rpc.options import Options
from tests.support.processes import alive, ask, gone, parent_of, who
from tests.support.waiting import until


async def test_workers_end_when_their_fork_server_is_killed(cluster):
    async with cluster(2, processes=True, options=Options(grace=0.5)) as c:
        pids = [c.pid(worker.name) for worker in c]
        forkserver = parent_of(pids[0])
        assert forkserver != os.getpid()
        os.kill(forkserver, signal.SIGKILL)
        await asyncio.gather(*(c._started[worker.name].ended for worker in c))
        assert not any(alive(each) for each in pids)


async def test_killed_workers_leave_nothing_in_the_drivers_memory(cluster):
    async with cluster(2, processes=True) as c:
        agent, forkserver, killed = c.driver.agent, c._hosts._forkserver, []
        links: list[weakref.ref[Link]] = []
        for _ in range(3):
            await c["worker1"].call(who)
            killed.append(weakref.ref(c._started["worker1"]))
            links.append(weakref.ref(agent.link("worker1")))
            await c.kill("worker1")
            await c.restart("worker1")
        await until(lambda: len(agent.links.losses) == 3)
        assert len(forkserver._workers) == 2
        gc.collect()
        assert [host() for host in killed if host() is not None] == []  # with all it has written
        assert [link() for link in links if link() is not None] == []


async def test_later_workers_get_the_environment_of_that_time(cluster, monkeypatch, tmp_path):
    async with cluster(2, processes=True) as c:
        monkeypatch.setenv("AIOGRAD_TEST_VARIABLE", "later")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.chdir(tmp_path)
        for name in ("worker0", "worker2"):
            await (c.scale(3) if name == "worker2" else c.restart(name))
            folder, path, variable = await c[name].call(surroundings)
            assert (folder, path, variable) == (str(tmp_path), sys.path, "later")
        assert (await c["worker1"].call(surroundings))[2] is None


def surroundings() -> tuple[str, list[str], str | None]:
    return os.getcwd(), sys.path, os.environ.get("AIOGRAD_TEST_VARIABLE")


async def test_a_worker_can_be_restarted_after_its_fork_server_was_killed(cluster, caplog):
    async with cluster(2, processes=True, options=Options(resume=0.3)) as c:
        process = c.pid("worker0")
        os.kill(parent_of(process), signal.SIGKILL)
        await gone(process)
        await c.restart("worker0")
        await c.restart("worker1")
        assert await c["worker0"].call(ask, "worker1") == c.pid("worker1")
    assert "ended unexpectedly" in caplog.text


async def test_forked_workers_draw_different_random_numbers(cluster):
    async with cluster(3, processes=True) as c:
        drawn = await asyncio.gather(*(worker.call(draw) for worker in c))
    assert len({first for first, _ in drawn}) == 3
    assert len({second for _, second in drawn}) == 3


def draw() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


async def test_each_worker_holds_only_pipes_of_its_own(cluster):
    async with cluster(3, processes=True) as c:
        pipes = [await worker.call(open_pipes) for worker in c]
        assert not pipes[0] & pipes[1]
        assert not pipes[1] & pipes[2]
        assert all(pipes)


def open_pipes() -> set[str]:
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{each}")
            if target.startswith("pipe:"):
                found.add(target)
    return found


async def test_workers_are_not_forked_if_array_libraries_have_threads(cluster, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    async with cluster(2, processes=True) as c:
        for worker in c:
            assert parent_of(c.pid(worker.name)) == os.getpid()
