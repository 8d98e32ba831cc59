"""Clusters inside a real Ray: `make cluster-ray`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import RpcError, WorkerLost
from tests.support.waiting import until

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio"]),
    pytest.mark.deadline(120),
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # of Ray
]
HALF = {"CPU": 0.5}


def who() -> str:
    return ag.get_worker_info().name


async def fetch(reference):
    return await reference


@pytest.fixture(scope="module")
def engine():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def left_over() -> list[str]:
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    return [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"]


async def test_gradients_flow_through_actors_and_nothing_is_left(engine):
    async with ag.cluster.RayCluster(2, HALF) as cluster:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await cluster["worker0"].call(ag.tanh, x)
            z = await cluster["worker1"].call(ag.sin, y)
            await ctx.backward(z.sum())
            expected = np.cos(np.tanh(x.numpy())) * (1 - np.tanh(x.numpy()) ** 2)
            assert np.allclose(ctx.gradients[x].numpy(), expected)
        assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker1"]
        assert len(cluster.where(**{"ray.node": ray.get_runtime_context().get_node_id()})) == 2
        assert "on Ray" in repr(cluster)
    assert left_over() == []
    await until(lambda: ray.available_resources().get("CPU") == 2.0)


async def test_a_reference_of_ray_travels_with_its_owner(engine):
    async with ag.cluster.RayCluster(1, HALF) as cluster:
        assert await cluster["worker0"].within(20).call(fetch, ray.put([1, 2])) == [1, 2]


async def test_what_ray_says_is_the_cause_of_a_loss(engine):
    async with ag.cluster.RayCluster(1, HALF) as cluster:
        call = cluster["worker0"].call(time.sleep, 60)
        os.kill(cluster.pid("worker0"), 9)
        began = asyncio.get_running_loop().time()
        with pytest.raises(WorkerLost, match="ActorDiedError") as caught:
            await call
        assert asyncio.get_running_loop().time() - began < 2
        assert isinstance(caught.value.__cause__, ray.exceptions.RayActorError)
        assert cluster.state("worker0") == "dead"
        await cluster.restart("worker0")
        assert await cluster["worker0"].call(who) == "worker0"


async def test_scale_restart_and_kill_hold_as_in_every_cluster(engine):
    async with ag.cluster.RayCluster(1, HALF) as cluster:
        await cluster.scale(3)
        assert [worker.name for worker in cluster] == ["worker0", "worker1", "worker2"]
        assert [worker.rank for worker in cluster] == [0, 2, 3]
        await cluster.kill("worker1")
        assert cluster.state("worker1") == "dead"
        await cluster.restart("worker1")
        await cluster.scale(1)
        assert await ag.Group(cluster.workers).call(who) == ["worker0"]
    assert left_over() == []


async def test_resources_that_ray_has_not_are_named(engine):
    with pytest.raises(
        RpcError, match=r"could not place 2 bundles of .*99.* it has .* free on"
    ) as e:
        async with ag.cluster.RayCluster(2, {"CPU": 99}, patience=1):
            pass
    assert "add nodes" in str(e.value)
    assert left_over() == []


async def test_a_wrong_strategy_or_amount_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="strategy"):
        ag.cluster.RayCluster(1, strategy="ANY")
    with pytest.raises(ValueError, match="resources"):
        ag.cluster.RayCluster(1, {"CPU": 0})


async def test_ray_that_is_not_running_says_so():
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(RpcError, match=r"ray\.init"):
        async with ag.cluster.RayCluster(1):
            pass


def test_the_program_of_the_page_runs_as_written(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "ray.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "2 (3, 2)" in done.stdout, done.stderr
    assert done.returncode == 0
