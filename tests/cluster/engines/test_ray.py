"""Clusters inside a real Ray: `make cluster-ray`, with `RESTARTS=100` for many restarts.

The tests run on a Ray of two nodes, each with servers and processes of its own on this machine.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import RpcError, SerializationError, WorkerLost
from tests.support.engines import left_in, temporary_folder, wrong_end
from tests.support.waiting import until, until_not

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.deadline(120),
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # of Ray
]
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
RESTARTS = int(os.environ.get("RESTARTS", "2"))
HALF = {"CPU": 0.5}


def who() -> str:
    return ag.get_worker_info().name


async def fetch(reference):
    return await reference


@pytest.fixture(scope="module")
def folder():
    with temporary_folder() as found:
        yield found


@pytest.fixture(scope="module")
def nodes(folder):
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False},
        shutdown_at_exit=False,
    )
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
async def engine(nodes, folder):
    yield nodes
    await until_not(left_over)
    await until(lambda: ray.available_resources().get("CPU") == 4.0)
    assert left_in(folder) == []


def left_over() -> list[str]:
    """List placement groups and actors of this Ray."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    found = [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"]
    return found + [each["ActorID"] for each in actors().values() if each["State"] != "DEAD"]


async def check_gradients(cluster) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    first, second = cluster.workers[:2]
    async with ag.context() as ctx:
        y = await first.call(ag.tanh, x)
        z = await second.call(ag.sin, y)
        await ctx.backward(z.sum())
        expected = np.cos(np.tanh(x.numpy())) * (1 - np.tanh(x.numpy()) ** 2)
        assert np.allclose(ctx.gradients[x].numpy(), expected)


@one_loop
async def test_gradients_flow_through_two_nodes_and_nothing_is_left(engine):
    async with ag.cluster.RayCluster(2, HALF, "STRICT_SPREAD") as cluster:
        await check_gradients(cluster)
        assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker1"]
        places = {worker.info.labels["ray.node"] for worker in cluster}
        assert places == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        here = ray.get_runtime_context().get_node_id()
        assert len(cluster.where(**{"ray.node": here})) == 1
        assert all(cluster.pid(worker.name) for worker in cluster)
        assert "on Ray" in repr(cluster)
        pids = [cluster.pid(worker.name) for worker in cluster]
    await until(lambda: not any(map(process_runs, pids)))


def process_runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_cluster_can_be_left_by_an_error_on_either_loop(engine):
    cluster = ag.cluster.RayCluster(1, HALF)
    with pytest.raises(ZeroDivisionError):
        async with cluster:
            _ = 1 / 0
    assert repr(cluster).endswith("closed>")


@one_loop
async def test_a_start_that_is_cancelled_leaves_nothing(engine):
    cluster = ag.cluster.RayCluster(1, HALF)
    opening = asyncio.ensure_future(cluster._open())
    await until(left_over)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


@one_loop
async def test_two_clusters_share_a_ray_with_the_same_names(engine):
    async with (
        ag.cluster.RayCluster(1, HALF) as one,
        ag.cluster.RayCluster(1, HALF) as two,
    ):
        assert await one["worker0"].call(who) == await two["worker0"].call(who) == "worker0"
        assert one.pid("worker0") != two.pid("worker0")
        await two.close()
        assert await one["worker0"].call(who) == "worker0"


@one_loop
async def test_a_reference_of_ray_travels_with_its_owner(engine):
    async with ag.cluster.RayCluster(2, HALF) as cluster:
        worker, other = (each.within(20) for each in cluster)
        assert await worker.call(fetch, ray.put([1, 2])) == [1, 2]
        assert await worker.call(fetch_all, {"deep": [ray.put(3)]}) == [3]
        made = await worker.call(ray.put, "made there")
        assert await made == "made there"
        assert await other.call(fetch, made) == "made there"
        counter = Counter.remote()  # it lives as long as its owner has this
        assert await worker.call(ask, counter) == 1


async def fetch_all(values):
    return [await reference for reference in values["deep"]]


@ray.remote(num_cpus=0)
class Counter:
    def add(self):
        return 1


async def ask(counter):
    return await counter.add.remote()


@one_loop
async def test_a_reference_of_ray_is_refused_by_workers_outside_of_it(engine):
    async with ag.LocalCluster(1) as cluster:
        with pytest.raises(SerializationError, match="not in a Ray cluster: send the value"):
            await cluster["worker0"].within(20).call(fetch, ray.put(1))


@one_loop
async def test_what_ray_says_is_the_cause_of_a_loss(engine):
    async with ag.cluster.RayCluster(1, HALF) as cluster:
        call = cluster["worker0"].call(time.sleep, 60)
        os.kill(cluster.pid("worker0"), signal.SIGKILL)
        began = asyncio.get_running_loop().time()
        with pytest.raises(WorkerLost, match="ActorDiedError") as caught:
            await call
        assert asyncio.get_running_loop().time() - began < 2
        assert isinstance(caught.value.__cause__, ray.exceptions.RayActorError)
        assert cluster.state("worker0") == "dead"
        await cluster.restart("worker0")
        assert await cluster["worker0"].call(who) == "worker0"


@one_loop
async def test_scale_restart_and_kill_hold_as_in_every_cluster(engine):
    async with ag.cluster.RayCluster(1, HALF) as cluster:
        await cluster.scale(3)
        assert [worker.name for worker in cluster] == ["worker0", "worker1", "worker2"]
        assert [worker.rank for worker in cluster] == [0, 2, 3]
        await cluster.kill("worker1")
        assert cluster.state("worker1") == "dead"
        await cluster.restart("worker1")
        await check_gradients(cluster)
        await cluster.scale(1)
        assert await ag.Group(cluster.workers).call(who) == ["worker0"]
        # What they had is free again, for others and for a later growth.
        await until(lambda: ray.available_resources().get("CPU") == 3.5)
        await cluster.scale(2)
        assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker3"]


@pytest.mark.deadline(60 + 30 * RESTARTS)
@one_loop
async def test_restarts_leave_nothing_behind(engine, folder):
    async with ag.cluster.RayCluster(1, HALF) as cluster:
        before = left_in(folder)
        for _ in range(RESTARTS):
            pid = cluster.pid("worker0")
            await cluster.restart("worker0")
            assert cluster.pid("worker0") not in (None, pid)
            assert await cluster["worker0"].call(who) == "worker0"
            await until(lambda pid=pid: not process_runs(pid))
        await until(lambda: len(left_in(folder)) == len(before))
        await until(lambda: len(left_over()) == 2)  # one placement group, and its actor
    for _ in range(RESTARTS):
        async with ag.cluster.RayCluster(1, HALF) as cluster:
            assert await cluster["worker0"].call(who) == "worker0"


@one_loop
async def test_a_node_that_is_lost_takes_its_worker_and_another_one_brings_it_back(engine):
    third = engine.add_node(num_cpus=1, resources={"third": 1})
    try:
        async with ag.cluster.RayCluster(1, {"third": 1}) as cluster:
            call = cluster["worker0"].call(time.sleep, 60)
            engine.remove_node(third)
            third = None
            with pytest.raises(WorkerLost, match="worker0"):
                await call
            third = engine.add_node(num_cpus=1, resources={"third": 1})
            await cluster.restart("worker0")
            assert await cluster["worker0"].call(who) == "worker0"
    finally:
        if third is not None:
            engine.remove_node(third)


# ── what does not fit ───────────────────────────────────────────────────────────────────────────


@one_loop
async def test_resources_that_ray_has_not_are_named(engine):
    text = r"could not place 2 bundles of .*99.* within 1 s; it has .* free on .*add nodes"
    with pytest.raises(RpcError, match=text):
        async with ag.cluster.RayCluster(2, {"CPU": 99}, patience=1):
            pass
    async with ag.cluster.RayCluster(1, HALF, patience=10) as cluster:
        with pytest.raises(RpcError, match="could not place 9 bundles"):
            await cluster.scale(10)
        assert await cluster["worker0"].call(who) == "worker0"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("python", r"has python 3\.99\.0, .* run it with python 3"),
        ("numpy", r"has numpy 9\.0\.0, .* run it with numpy 2"),
        ("aiograd", r"has aiograd 9\.9\.0, .* run it with aiograd 0"),
        (
            "no aiograd",
            r"Ray could not start 'worker0'.*named 'aiograd.*every node needs",
        ),
        ("hangs", r"'worker0' did not join from Ray within 3 s; its actor is on "),
    ],
)
@one_loop
async def test_a_node_that_does_not_fit_is_named(engine, folder, wrong, text):
    environment = {"env_vars": wrong_end(folder, wrong)}
    patience = 3 if wrong == "hangs" else 60
    with pytest.raises(RpcError, match=text) as caught:
        async with ag.cluster.RayCluster(1, HALF, runtime_env=environment, patience=patience):
            pass
    assert os.uname().nodename in str(caught.value) or wrong == "no aiograd"


def test_a_wrong_strategy_or_amount_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="strategy"):
        ag.cluster.RayCluster(1, strategy="ANY")
    with pytest.raises(ValueError, match="resources"):
        ag.cluster.RayCluster(1, {"CPU": 0})


@one_loop
async def test_nothing_is_left_of_a_driver_that_died(engine, folder):
    program = f"""
        import asyncio, os, sys
        import aiograd as ag
        import ray
        async def main():
            async with ag.cluster.RayCluster(2, {HALF}) as cluster:
                print(*(cluster.pid(worker.name) for worker in cluster), flush=True)
                await asyncio.sleep(60)
        ray.init(address="{engine.address}", log_to_driver=False)
        asyncio.run(main())
    """
    driver = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    )
    try:
        assert driver.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(driver.stdout.readline)).split()]
        assert len(pids) == 2
    finally:
        driver.kill()
        driver.communicate()
    await until(lambda: not any(map(process_runs, pids)), within=60)
    await until_not(left_over, within=60)


# ── programs with a Ray of their own ────────────────────────────────────────────────────────────


def run(folder: Path, program: str, *args: str, **environment: str) -> str:
    """Run a program to its end; gives what it printed."""
    script = folder / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "local", **environment},  # none that runs here already
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_the_page_runs_as_written(tmp_path, folder):
    page = Path(__file__).parents[3] / "docs" / "ray.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert run(tmp_path, program).splitlines() == ["2 (3, 2)"]
    assert left_in(folder) == []


LOOPS = """
import asyncio
import sys
import aiograd as ag
import aiograd.errors
import ray

async def loop_kind():
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]

async def main():
    try:
        async with ag.cluster.RayCluster(1):
            pass
    except ag.errors.RpcError as error:
        assert "ray.init" in str(error), error
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    async with ag.cluster.RayCluster(2) as cluster:
        x = ag.ones(2, requires_grad=True)
        async with ag.context() as ctx:
            y = await cluster["worker0"].call(ag.tanh, x)
            z = await cluster["worker1"].call(ag.sin, y)
            await ctx.backward(z.sum())
            assert ctx.gradients[x].shape == (2,)
        print(await loop_kind(), *await ag.Group(cluster.workers).call(loop_kind))
        ray.shutdown()  # too early: leaving does not hang, and has nothing left to remove

if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        import uvloop
        uvloop.run(main())
    else:
        asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_it_works_with_uvloop_and_where_there_is_none(tmp_path, folder, loop):
    environment = wrong_end(folder, "no uvloop") if loop == "asyncio" else {}
    assert run(tmp_path, LOOPS, loop, **environment).split() == [loop] * 3
    assert left_in(folder) == []
