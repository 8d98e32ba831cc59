"""Clusters inside a real Dask: `make cluster-dask`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import RpcError, SerializationError, WorkerLost
from tests.support.waiting import until

distributed = pytest.importorskip("distributed")

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio"]),
    pytest.mark.deadline(120),
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # of Dask and its loop
]


def who() -> str:
    return ag.get_worker_info().name


@pytest.fixture
async def dask():
    async with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, asynchronous=True, dashboard_address=None
    ) as cluster:
        yield cluster


@pytest.fixture
async def client(dask):
    async with distributed.Client(dask, asynchronous=True) as client:
        yield client


async def left_over(client) -> list[str]:
    def look(dask_scheduler):
        names = [*dask_scheduler.worker_plugins, *map(str, dask_scheduler.plugins)]
        return [each for each in (*names, *dask_scheduler.tasks) if "aiograd" in each]

    return list(await client.run_on_scheduler(look))


async def test_gradients_flow_through_dask_workers_and_nothing_is_left(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        assert [worker.name for worker in cluster] == ["worker0", "worker1"]
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await cluster["worker0"].call(ag.tanh, x)
            z = await cluster["worker1"].call(ag.sin, y)
            await ctx.backward(z.sum())
            expected = np.cos(np.tanh(x.numpy())) * (1 - np.tanh(x.numpy()) ** 2)
            assert np.allclose(ctx.gradients[x].numpy(), expected)
        info = cluster["worker0"].info
        assert info.labels["dask.worker"].startswith("tcp://")
        assert cluster.where(host=info.host) == cluster.workers
        assert "on Dask" in repr(cluster)
        assert "worker1" in cluster._repr_html_()
        # To Dask they are busy, so adaptive scaling does not retire them; and they still compute.
        assert len(await left_over(client)) >= 2
        assert await client.submit(abs, -1) == 1
    await until(lambda: _none(left_over(client)))


async def _none(found) -> bool:
    return not await found


async def test_a_blocking_client_does_not_block_the_driver(dask):
    client = await asyncio.to_thread(distributed.Client, dask.scheduler_address)
    try:
        async with ag.cluster.DaskCluster(client, 1) as cluster:
            assert len(cluster) == 1
            assert await cluster["worker0"].call(who) == "worker0"
    finally:
        await asyncio.to_thread(client.close)


async def test_workers_that_dask_adds_join_and_those_it_retires_leave(dask, client):
    async with ag.cluster.DaskCluster(client) as cluster:
        dask.scale(3)
        await until(lambda: "worker3" in cluster or "worker2" in cluster, within=60)
        await until(lambda: all(cluster.state(each.name) == "running" for each in cluster), 60)
        assert len(await ag.Group(cluster.workers).call(who)) == 3
        name = cluster.workers[-1].name
        address = cluster[name].info.labels["dask.worker"]
        await client.retire_workers([address])
        await until(lambda: name not in cluster, within=30)
        assert len(cluster) == 2


async def test_a_killed_worker_is_back_under_its_name(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        pid = cluster.pid("worker0")
        call = cluster["worker0"].call(os.kill, pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await call
        await until(lambda: cluster.pid("worker0") != pid, within=60)
        await until(lambda: cluster.state("worker0") == "running", within=60)
        assert await cluster["worker0"].call(who) == "worker0"
        assert cluster["worker0"].rank == 0


async def test_restart_scale_and_kill_hold_as_in_every_cluster(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        pid = cluster.pid("worker1")
        await cluster.restart("worker1")
        await until(lambda: cluster.pid("worker1") not in (None, pid), within=30)
        assert await cluster["worker1"].call(who) == "worker1"
        await cluster.scale(1)
        assert [worker.name for worker in cluster] == ["worker0"]
        await cluster.scale(2)
        assert await ag.Group(cluster.workers).call(who) == ["worker0", cluster.workers[1].name]
        await cluster.kill("worker0")
        await until(lambda: cluster.state("worker0") == "running", within=60)


async def test_too_few_workers_are_an_error_that_says_how_many_there_are(dask):
    async with distributed.Client(dask.scheduler_address, asynchronous=True) as client:
        with pytest.raises(RpcError, match=r"Dask has 2 workers, and none is left for worker2"):
            async with ag.cluster.DaskCluster(client, 3):
                pass
        assert await left_over(client) == []


async def test_a_future_of_dask_is_refused_with_the_cure(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        future = client.submit(abs, -1)
        with pytest.raises(SerializationError, match="send its value"):
            await cluster["worker0"].call(print, [future])


async def test_the_plugin_of_a_driver_that_died_is_removed(dask, client):
    program = f"""
        import asyncio, sys
        import aiograd as ag
        from distributed import Client
        async def main():
            async with Client("{dask.scheduler_address}", asynchronous=True) as client:
                async with ag.cluster.DaskCluster(client) as cluster:
                    print("up", flush=True)
                    await asyncio.sleep(60)
        asyncio.run(main())
    """
    driver = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    )
    try:
        assert driver.stdout is not None
        assert await asyncio.to_thread(driver.stdout.readline) == b"up\n"
    finally:
        driver.kill()
        driver.communicate()
    await until(lambda: _none(left_over(client)), within=60)

    def members(dask_worker):
        found = dask_worker.__dict__.get("_aiograd_members", {}).values()
        return [member for member in found if member.running]

    async def nobody() -> bool:
        return not any((await client.run(members)).values())

    await until(nobody, within=20)


@pytest.mark.parametrize("client", [None, 7, "tcp://localhost:8786"])
async def test_a_client_that_is_none_is_a_type_error(client):
    with pytest.raises(TypeError, match=r"distributed\.Client"):
        ag.cluster.DaskCluster(client)


def test_the_program_of_the_page_runs_as_written(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "dask.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "2 (3, 2)" in done.stdout, done.stderr
    assert done.returncode == 0
