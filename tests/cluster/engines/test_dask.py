"""Clusters inside a real Dask: `make cluster-dask`, with `RESTARTS=100` for many restarts.

Most tests run on a Dask of three processes, which the `dask` command starts: a scheduler and two
workers with nannies, as on two hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import RpcError, SerializationError, WorkerLost
from tests.support.engines import left_in, temporary_folder, wrong_end
from tests.support.waiting import until, until_not

distributed = pytest.importorskip("distributed")

pytestmark = [
    pytest.mark.deadline(120),
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # of Dask and its loop
]
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
RESTARTS = int(os.environ.get("RESTARTS", "2"))


def who() -> str:
    return ag.get_worker_info().name


class Nodes:
    """A Dask of processes that the command `dask` has started."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self.start("scheduler", "--host", "127.0.0.1", "--scheduler-file", str(file))
        while not file.exists():
            time.sleep(0.05)
        self.address = re.findall(r"tcp://[\d.:]+", file.read_text())[0]

    def start(
        self, kind: str, *args: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `dask scheduler` or `dask worker`."""
        command = [sys.executable, "-m", "distributed.cli.dask_" + kind, *args]
        command += ["--port", "0"] if kind == "scheduler" else []
        log = (self.folder / f"{kind}{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [*command, "--no-dashboard"],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                # A group of its own, so that its children can be ended with it.
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def worker(
        self, name: str, *args: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one worker, with a nanny unless told otherwise."""
        where = ("--host", "127.0.0.1", "--local-directory", str(self.folder))
        settings = ("--nworkers", "1", "--nthreads", "1", "--name", name)
        return self.start("worker", self.address, *where, *settings, *args, environment=environment)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._processes.remove(process)

    def close(self) -> None:
        """End all of it."""
        for process in self._processes[::-1]:
            self.stop(process)


@pytest.fixture(scope="module")
def folder():
    with temporary_folder() as found:
        yield found


@pytest.fixture(scope="module")
def nodes(folder):
    nodes = Nodes(folder)
    try:
        nodes.worker("first")
        nodes.worker("second")
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
async def client(nodes, folder):
    async with distributed.Client(nodes.address, asynchronous=True) as client:
        await client.wait_for_workers(2, timeout=60)
        yield client
        await until_not(lambda: left_over(client))
        await until_not(lambda: members(client))
    assert left_in(folder) == []


@pytest.fixture
async def dask(folder):
    """A Dask of one program, which can grow."""
    async with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, asynchronous=True, dashboard_address=None
    ) as cluster:
        yield cluster


async def left_over(client) -> list[str]:
    def look(dask_scheduler):
        names = [*dask_scheduler.worker_plugins, *map(str, dask_scheduler.plugins)]
        return [each for each in (*names, *dask_scheduler.tasks) if "aiograd" in each]

    return list(await client.run_on_scheduler(look))


async def members(client) -> list[str]:
    """List the Dask workers that are members of any cluster."""

    def look(dask_worker):
        found = dask_worker.__dict__.get("_aiograd_members", {}).values()
        return [member.key for member in found if member.running]

    found = await client.run(look)
    return [key for keys in found.values() for key in keys]


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
async def test_gradients_flow_through_two_nodes_and_nothing_is_left(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        assert [worker.name for worker in cluster] == ["worker0", "worker1"]
        await check_gradients(cluster)
        info = cluster["worker0"].info
        assert info.labels["dask.worker"].startswith("tcp://")
        assert {worker.info.labels["dask.name"] for worker in cluster} == {"first", "second"}
        assert len({cluster.pid(worker.name) for worker in cluster}) == 2
        assert cluster.where(host=info.host) == cluster.workers
        assert "on Dask" in repr(cluster)
        assert "worker1" in cluster._repr_html_()
        # To Dask they are busy, so adaptive scaling does not retire them; and they still compute.
        assert len(await left_over(client)) >= 2
        assert await client.submit(abs, -1) == 1


async def test_a_cluster_can_be_left_by_an_error_on_either_loop(client):
    cluster = ag.cluster.DaskCluster(client)
    with pytest.raises(ZeroDivisionError):
        async with cluster:
            _ = 1 / 0
    assert repr(cluster).endswith("closed>")
    assert len(await client.run(abs, -1)) == 2, "Dask itself stays"


@one_loop
async def test_a_start_that_is_cancelled_leaves_nothing(client):
    for _ in range(5):
        cluster = ag.cluster.DaskCluster(client)
        opening = asyncio.ensure_future(cluster._open())
        await until(lambda: left_over(client))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert await left_over(client) == []


@one_loop
async def test_two_clusters_share_a_dask_with_the_same_names(client):
    async with ag.cluster.DaskCluster(client) as one, ag.cluster.DaskCluster(client, 1) as two:
        assert await one["worker0"].call(who) == await two["worker0"].call(who) == "worker0"
        assert len(one) == 2
        assert len(two) == 1
        await two.close()
        await check_gradients(one)


@one_loop
async def test_a_blocking_client_does_not_block_the_driver(nodes, client):
    blocking = await asyncio.to_thread(distributed.Client, nodes.address)
    try:
        async with ag.cluster.DaskCluster(blocking, 1) as cluster:
            assert len(cluster) == 1
            assert await cluster["worker0"].call(who) == "worker0"
        with pytest.raises(ZeroDivisionError):
            async with ag.cluster.DaskCluster(blocking):
                _ = 1 / 0
    finally:
        await asyncio.to_thread(blocking.close)


@one_loop
async def test_a_node_that_comes_joins_and_one_that_is_retired_leaves(nodes, client):
    async with ag.cluster.DaskCluster(client) as cluster:
        third = nodes.worker("third", "--no-nanny")
        try:
            await until(lambda: len(cluster) == 3, within=60)
            await until(lambda: all(cluster.state(each.name) == "running" for each in cluster))
            assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker1", "worker2"]
            address = cluster["worker2"].info.labels["dask.worker"]
            await client.retire_workers([address])
            await until(lambda: "worker2" not in cluster, within=30)
            assert len(cluster) == 2
        finally:
            nodes.stop(third)


@one_loop
async def test_a_killed_worker_is_back_under_its_name(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        for _ in range(2):  # a nanny restarts it, and then once more
            pid = cluster.pid("worker0")
            call = cluster["worker0"].call(os.kill, pid, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await call
            await until(lambda pid=pid: cluster.pid("worker0") not in (None, pid), within=60)
            assert await cluster["worker0"].call(who) == "worker0"
            assert cluster["worker0"].rank == 0
        await check_gradients(cluster)


@pytest.mark.deadline(60 + 30 * RESTARTS)
@one_loop
async def test_restarts_leave_nothing_behind(client, folder):
    async with ag.cluster.DaskCluster(client) as cluster:
        before = set(left_in(folder))
        for _ in range(RESTARTS):
            pid = cluster.pid("worker1")
            await cluster.restart("worker1")
            await until(lambda pid=pid: cluster.pid("worker1") not in (None, pid), within=60)
            assert await cluster["worker1"].call(who) == "worker1"
            assert not process_runs(pid)
        assert len(left_in(folder)) == len(before)
        # One task for each member, not for each start.
        await until(lambda: _held(client, 2))
    for _ in range(RESTARTS):
        async with ag.cluster.DaskCluster(client) as cluster:
            assert len(await ag.Group(cluster.workers).call(who)) == 2


def process_runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def _held(client, count: int) -> bool:
    return sum("-worker" in each for each in await left_over(client)) == count


@one_loop
async def test_scale_restart_and_kill_hold_as_in_every_cluster(dask):
    async with (
        distributed.Client(dask, asynchronous=True) as client,
        ag.cluster.DaskCluster(client) as cluster,
    ):
        await cluster.scale(3)  # Dask is asked for one more
        assert [worker.name for worker in cluster] == ["worker0", "worker1", "worker2"]
        await cluster.scale(1)
        assert [worker.name for worker in cluster] == ["worker0"]
        await cluster.scale(2)  # a Dask worker that is there
        assert await ag.Group(cluster.workers).call(who) == ["worker0", cluster.workers[1].name]
        pid = cluster.pid("worker0")
        await cluster.kill("worker0")
        await until(lambda: cluster.pid("worker0") not in (None, pid), within=60)
        await until(lambda: cluster.state("worker0") == "running", within=60)


@one_loop
async def test_a_dask_without_workers_is_a_cluster_that_can_grow(folder):
    async with (
        distributed.LocalCluster(
            n_workers=0, threads_per_worker=1, asynchronous=True, dashboard_address=None
        ) as dask,
        distributed.Client(dask, asynchronous=True) as client,
        ag.cluster.DaskCluster(client) as cluster,
    ):
        assert len(cluster) == 0
        await cluster.scale(1)
        assert await cluster["worker0"].call(who) == "worker0"


@one_loop
async def test_adaptive_scaling_does_not_retire_members(dask):
    async with (
        distributed.Client(dask, asynchronous=True) as client,
        ag.cluster.DaskCluster(client) as cluster,
    ):
        adaptive = dask.adapt(minimum=0, maximum=2, interval="20ms", wait_count=2)
        looks = []
        recommend = adaptive.recommendations

        async def count(target):
            looks.append(target)
            return await recommend(target)

        adaptive.recommendations = count
        await until(lambda: len(looks) > 20)
        assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker1"]
        adaptive.stop()


@one_loop
async def test_dask_workers_of_this_process_are_members_too(folder):
    async with (
        distributed.LocalCluster(
            n_workers=2, processes=False, asynchronous=True, dashboard_address=None
        ) as dask,
        distributed.Client(dask, asynchronous=True) as client,
    ):
        async with ag.cluster.DaskCluster(client) as cluster:
            await check_gradients(cluster)
            await cluster.kill("worker1")  # the member alone: this process is the driver's
            assert cluster.state("worker1") == "dead"
        assert await left_over(client) == []


# ── what does not fit ───────────────────────────────────────────────────────────────────────────


@one_loop
async def test_too_few_workers_are_an_error_that_says_how_many_there_are(client):
    with pytest.raises(RpcError, match=r"Dask has 2 workers, and none is left for worker2: add "):
        async with ag.cluster.DaskCluster(client, 3):
            pass
    assert await left_over(client) == []


@one_loop
async def test_a_worker_that_never_comes_is_an_error_within_the_patience(client):
    client.cluster = SimpleNamespace(scale=lambda n: None)  # promises what it does not do
    began = time.monotonic()
    with pytest.raises(RpcError, match=r"'worker2' on any of its 2 workers within 1 s"):
        async with ag.cluster.DaskCluster(client, 3, patience=1):
            pass
    assert time.monotonic() - began < 10
    async with ag.cluster.DaskCluster(client, 2, patience=1) as cluster:
        with pytest.raises(RpcError, match="'worker2'"):
            await cluster.scale(3)
        await check_gradients(cluster)
    client.cluster = None


@one_loop
async def test_versions_that_do_not_fit_are_named_with_their_host(nodes, client, folder):
    kinds = ["python", "numpy", "aiograd", "no aiograd"]
    async with ag.cluster.DaskCluster(client) as cluster:
        started = [
            nodes.worker(f"wrong-{kind}", "--no-nanny", environment=wrong_end(folder, kind))
            for kind in kinds
        ]
        try:
            # They come late: no Dask worker fails because of it, and the cluster goes on.
            await client.wait_for_workers(6, timeout=60)
            await check_gradients(cluster)
            await until(lambda: len(cluster) == 2)
            with pytest.raises(RpcError) as caught:
                async with ag.cluster.DaskCluster(client, patience=20):
                    pass
            text = str(caught.value)
            assert "No module named 'aiograd" in text
            for wrong, cure in (
                ("python 3.99.0", "run it with python 3."),
                ("numpy 9.0.0", "run it with numpy 2"),
                ("aiograd 9.9.0", f"run it with aiograd {ag.__version__.rpartition('.')[0]}"),
            ):
                assert wrong in text
                assert cure in text
            assert text.count(os.uname().nodename) >= 4
            assert len(await client.run(abs, -1)) == 6
        finally:
            for process in started:
                nodes.stop(process)
            await until(lambda: _count(client, 2), within=60)


async def _count(client, count: int) -> bool:
    def look(dask_scheduler):
        return len(dask_scheduler.workers)

    return await client.run_on_scheduler(look) == count


@one_loop
async def test_a_dask_worker_that_does_not_answer_is_named(client):
    pids = await client.run(os.getpid)
    address, pid = next(iter(pids.items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(RpcError, match=f"not heard of .*{address}") as caught:
            async with ag.cluster.DaskCluster(client, patience=4):
                pass
        assert time.monotonic() - began < 15
        assert "no answer within 4 s" in str(caught.value)
    finally:
        os.kill(pid, signal.SIGCONT)


@one_loop
async def test_a_scheduler_that_is_gone_is_an_error_and_no_hang(folder):
    nodes = Nodes(folder / "gone")
    try:
        async with distributed.Client(nodes.address, asynchronous=True) as client:
            nodes.close()
            with pytest.raises(RpcError, match="Dask did not run_on_scheduler"):
                async with ag.cluster.DaskCluster(client, patience=2):
                    pass
    finally:
        nodes.close()


@one_loop
async def test_a_future_of_dask_is_refused_with_the_cure(client):
    async with ag.cluster.DaskCluster(client) as cluster:
        future = client.submit(abs, -1)
        for argument in (future, [future], {"key": (future,)}):
            with pytest.raises(SerializationError, match="send its value"):
                await cluster["worker0"].call(print, argument)
        with pytest.raises(SerializationError, match="send its value"):
            await cluster["worker0"].call(submit_there, client.scheduler.address)


async def submit_there(address):
    async with distributed.Client(address, asynchronous=True) as client:
        return client.submit(abs, -2)


@one_loop
async def test_nothing_is_left_of_a_driver_that_died(nodes, client, folder):
    program = f"""
        import asyncio, sys
        import aiograd as ag
        from distributed import Client
        async def main():
            async with Client("{nodes.address}", asynchronous=True) as client:
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
    await until_not(lambda: left_over(client), within=60)
    await until_not(lambda: members(client))
    await until(lambda: left_in(folder) == [])
    assert len(await client.run(abs, -1)) == 2, "Dask itself stays"


# ── programs ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("client", [None, 7, "tcp://localhost:8786"])
def test_a_client_that_is_none_is_a_type_error(client):
    with pytest.raises(TypeError, match=r"distributed\.Client"):
        ag.cluster.DaskCluster(client)


def test_the_program_of_the_page_runs_as_written(tmp_path, folder):
    page = Path(__file__).parents[3] / "docs" / "dask.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert run(tmp_path, program).splitlines() == ["2 (3, 2)"]
    assert left_in(folder) == []


@one_loop
async def test_the_commands_of_the_page_start_a_dask_with_two_workers(folder):
    page = Path(__file__).parents[3] / "docs" / "dask.md"
    (commands,) = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # One shell, in a group of its own: its children end with it.
    shell = subprocess.Popen(  # noqa: ASYNC220
        ["sh", "-c", commands.replace("8786", port) + "\nwait"],
        env={**os.environ, "PATH": path},
        cwd=folder,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        client = await distributed.Client(f"127.0.0.1:{port}", asynchronous=True, timeout=60)
        async with client:
            await client.wait_for_workers(2, timeout=60)
            async with ag.cluster.DaskCluster(client) as cluster:
                await check_gradients(cluster)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


LOOPS = """
import asyncio
import sys
import aiograd as ag
from distributed import Client, LocalCluster

async def loop_kind():
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]

async def main():
    async with LocalCluster(n_workers=2, asynchronous=True, dashboard_address=None) as dask:
        async with Client(dask, asynchronous=True) as client:
            async with ag.cluster.DaskCluster(client) as cluster:
                x = ag.ones(2, requires_grad=True)
                async with ag.context() as ctx:
                    y = await cluster["worker0"].call(ag.tanh, x)
                    z = await cluster["worker1"].call(ag.sin, y)
                    await ctx.backward(z.sum())
                    assert ctx.gradients[x].shape == (2,)
                print(await loop_kind(), *await ag.Group(cluster.workers).call(loop_kind))

if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        import uvloop
        uvloop.run(main())
    else:
        asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_it_works_with_uvloop_and_where_there_is_none(tmp_path, folder, loop):
    environment = {"DASK_DISTRIBUTED__ADMIN__EVENT_LOOP": loop}
    if loop == "asyncio":
        environment |= wrong_end(folder, "no uvloop")
    assert run(tmp_path, LOOPS, loop, **environment).split() == [loop] * 3
    assert left_in(folder) == []


def run(folder: Path, program: str, *args: str, **environment: str) -> str:
    """Run a program to its end; gives what it printed."""
    script = folder / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
