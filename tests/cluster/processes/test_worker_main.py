"""Worker processes: what they inherit, print and leave behind, and how they end."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from aiograd.cluster import local
from aiograd.cluster.api import barrier
from aiograd.cluster.config import THREAD_VARIABLES
from aiograd.errors import RpcError, WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options
from tests.support.processes import alive, ask, gone, pid, read, who
from tests.support.waiting import until


async def test_workers_are_processes_of_their_own_and_end_with_the_cluster(cluster):
    async with cluster(2, processes=True) as c:
        pids = await asyncio.gather(*(worker.call(pid) for worker in c))
        assert len({os.getpid(), *pids}) == 3
        assert pids == [c.pid("worker0"), c.pid("worker1")]
        assert await rpc_async("worker0", ask, ("worker1",)) == pids[1]
        assert await rpc_async("worker1", ask, ("driver",)) == os.getpid()
    assert not any(alive(each) for each in pids)


async def test_several_clusters_of_processes_at_once(cluster):
    first, second = await asyncio.gather(
        cluster(1, processes=True)._open(), cluster(2, processes=True)._open()
    )
    pids = await asyncio.gather(*(worker.call(pid) for c in (first, second) for worker in c))
    assert len(set(pids)) == 3
    await asyncio.gather(first.close(), second.close())
    assert not any(alive(each) for each in pids)


async def test_lambdas_and_closures_need_no_main_guard(cluster):
    async with cluster(1, processes=True) as c:
        offset = 10
        assert await c["worker0"].call(lambda x: x + offset, 5) == 15


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_both_transports_carry_a_cluster(cluster, transport):
    async with cluster(2, processes=True, options=Options(transport=transport)) as c:
        assert await c["worker0"].call(ask, "worker1") == c.pid("worker1")


async def test_a_killed_process_that_nobody_has_called_is_lost_within_a_second(cluster):
    async with cluster(2, processes=True, options=Options(resume=20.0)) as c:
        waiting = asyncio.ensure_future(barrier())
        agent = c.driver.agent
        await until(lambda: len(agent.links.all()) == 2)
        began = time.monotonic()
        os.kill(c.pid("worker1"), signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            await waiting
        assert time.monotonic() - began < 4.0  # without knocking at its door, it would be 20
        assert caught.value.worker == "worker1"
        assert str(caught.value).count("lost worker") == 1


async def test_a_killed_process_is_lost_within_a_second(cluster):
    async with cluster(2, processes=True) as c:
        waiting = c["worker1"].call(asyncio.sleep, 60)
        await c["worker0"].call(ask, "worker1")
        there = c["worker0"].call(wait_there, "worker1")
        await c["worker1"].call(who)
        start = time.monotonic()
        os.kill(c.pid("worker1"), signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            await waiting
        assert caught.value.worker == "worker1"
        with pytest.raises(WorkerLost):
            await there
        assert time.monotonic() - start < 4.0
        await c.driver.member.wait_gone("worker1")
        with pytest.raises(WorkerLost):
            await c["worker1"].call(who)
        await c.restart("worker1")
        assert await c["worker0"].call(ask, "worker1") == c.pid("worker1")


async def wait_there(to: str) -> None:
    await rpc_async(to, asyncio.sleep, (60,))


async def test_what_workers_print_is_shown_with_their_name_and_kept(cluster, capsys):
    async with cluster(2, processes=True) as c:
        await c["worker0"].call(print, "hello\nworld")
        await c["worker1"].call(complain, "oh no")
    shown = capsys.readouterr()
    assert "[worker0] hello\n[worker0] world\n" in shown.out
    assert "[worker1] oh no\n" in shown.err
    assert c.logs("worker0") == "hello\nworld"
    assert c.logs("worker1") == "oh no"


def complain(text: str) -> None:
    sys.stderr.write(text)  # without a line end: shown at the latest when the process ends


async def test_workers_inherit_environment_folder_and_path(cluster, monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.setenv("AIOGRAD_TEST_VARIABLE", "x")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import only_here  # type: ignore[import-not-found]

    async with cluster(1, processes=True) as c:
        assert await c["worker0"].call(only_here.answer) == 42
        assert await c["worker0"].call(os.getcwd) == str(tmp_path)
        environment = await c["worker0"].call(lambda: dict(os.environ))
        assert environment["AIOGRAD_TEST_VARIABLE"] == "x"


@pytest.mark.parametrize(
    ("cores", "said", "threads"), [(2, None, "1"), (7, None, "3"), (7, "5", "5")]
)
async def test_libraries_of_a_worker_compute_on_its_part_of_the_cores(
    cluster, monkeypatch, cores, said, threads
):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(local, "_cores", lambda: cores)  # one of them is for the driver
    async with cluster(2, processes=True) as c:
        for worker in c:
            assert (await worker.call(lambda: dict(os.environ)))["OMP_NUM_THREADS"] == threads


async def test_the_secret_is_neither_in_arguments_nor_in_the_environment(cluster):
    secret = b"a secret of many bytes, quite so"
    async with cluster(1, processes=True, options=Options(secret=secret)) as c:
        process = c.pid("worker0")
        for name in ("cmdline", "environ"):
            seen = read(f"/proc/{process}/{name}")
            assert secret not in seen
            assert secret.hex().encode() not in seen


async def test_workers_have_a_session_of_their_own_and_an_empty_input(cluster):
    async with cluster(1, processes=True) as c:
        assert os.getsid(c.pid("worker0")) == c.pid("worker0")
        assert await c["worker0"].call(lambda: sys.stdin.read()) == ""


async def test_worker_processes_use_uvloop_where_installed(cluster):
    async with cluster(1, processes=True) as c:
        assert "uvloop" in await c["worker0"].call(loop_module)
    async with cluster(1, processes=True, options=Options(loop="asyncio")) as c:
        assert "uvloop" not in await c["worker0"].call(loop_module)


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


async def test_an_idle_worker_has_few_threads_and_little_memory(cluster):
    async with cluster(1, processes=True) as c:
        await c["worker0"].call(who)
        process = c.pid("worker0")
        # The loop, the one that waits for the parent's end, the watchdog, and one for functions.
        assert len(os.listdir(f"/proc/{process}/task")) <= 4
        resident = re.search(rb"VmRSS:\s*(\d+) kB", read(f"/proc/{process}/status"))
        assert int(resident[1]) <= 80 * 1024


@pytest.fixture(params=[1, 3])
def n_workers(request) -> int:
    """One worker has a process of its own; several come from a forkserver."""
    return request.param


@pytest.fixture
def boot(monkeypatch):
    """Let new processes run something else instead of a worker or a forkserver."""

    def set_boot(program: str) -> None:
        monkeypatch.setattr("aiograd.cluster.processes.spawn.BOOT", program)
        monkeypatch.setattr("aiograd.cluster.processes.forkserver.BOOT", program)

    return set_boot


async def test_a_worker_that_cannot_start_is_reported_with_its_output(cluster, boot, n_workers):
    boot("import sys; sys.exit('this is why it failed')")
    with pytest.raises(RpcError, match="this is why it failed") as caught:
        await cluster(n_workers, processes=True)
    assert "exit code 1" in str(caught.value)


async def test_a_worker_that_dies_before_it_joins_is_reported(cluster, boot, n_workers):
    boot(
        "import marshal, os, sys; sys.path[:] = marshal.load(sys.stdin.buffer)\n"
        "import aiograd.cluster.processes.worker_main as process\n"
        "def serve(plan):\n"
        "    print(f'{plan.name} gives up', flush=True)\n"
        "    os._exit(3)\n"
        "process.serve = serve\n"
        "import aiograd.cluster.processes.forkserver as forkserver\n"
        "forkserver.serve_forks() if sys.argv[1] == 'aiograd-forkserver' else process.main()"
    )
    with pytest.raises(RpcError, match=r"worker\d gives up") as caught:
        await cluster(n_workers, processes=True)
    assert "exit code 3" in str(caught.value)


async def test_a_start_that_is_cancelled_leaves_no_process(cluster, boot, n_workers):
    boot("import time; time.sleep(60)")
    c = cluster(n_workers, processes=True)
    start = asyncio.create_task(c._open())
    while len(c) < n_workers:
        await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [c.state(worker.name) for worker in c] == ["closed"] * n_workers


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux tells how it schedules")
@pytest.mark.parametrize(("cores", "policy"), [(2, "SCHED_BATCH"), (3, "SCHED_OTHER")])
async def test_workers_that_share_cores_do_not_preempt_a_sender(
    cluster, monkeypatch, cores, policy
):
    monkeypatch.setattr(local, "_cores", lambda: cores)
    before = os.sched_getscheduler(0)
    async with cluster(2, processes=True) as c:
        policies = [await worker.call(os.sched_getscheduler, 0) for worker in c]
    assert policies == [getattr(os, policy)] * 2
    assert os.sched_getscheduler(0) == before  # the driver belongs to its user


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux tells how it schedules")
def test_a_scheduling_policy_that_was_set_before_is_kept():
    script = """
import os
from aiograd.cluster.processes.worker_main import use_batch_scheduling
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
use_batch_scheduling()
print(os.sched_getscheduler(0))
"""
    ended = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE)
    assert int(ended.stdout) == os.SCHED_IDLE


@pytest.mark.parametrize("count", [1, 3])
async def test_garbage_collections_skip_the_modules_of_a_worker(cluster, count):
    async with cluster(count, processes=True) as c:
        assert await c[0].call(gc.get_freeze_count) > 10_000


async def test_a_worker_that_ignores_its_dismissal_is_killed(cluster, caplog, tmp_path):
    async with cluster(1, processes=True, options=Options(grace=0.3)) as c:
        process = c.pid("worker0")
        blocked = tmp_path / "blocked"
        call = c["worker0"].call(block_the_loop, blocked)
        call.add_done_callback(lambda future: future.exception())
        await until(blocked.exists)
        begin = time.monotonic()
    assert time.monotonic() - begin < 4 * (0.3 + 1.0)  # four times what is promised
    assert not alive(process)
    assert "killed" in caplog.text


async def block_the_loop(blocked: Path) -> None:
    blocked.touch()  # noqa: ASYNC240
    time.sleep(60)  # noqa: ASYNC251 - that is what it is about


async def test_a_stopped_worker_does_not_hold_up_the_end(cluster):
    async with cluster(1, processes=True, options=Options(grace=0.2)) as c:
        process = c.pid("worker0")
        os.kill(process, signal.SIGSTOP)
    assert not alive(process)


# ── scripts ─────────────────────────────────────────────────────────────────────────────────────


def script(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


async def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    return await asyncio.to_thread(process.communicate)


DRIVER = """
import asyncio, multiprocessing, os, signal, sys, time
from aiograd.cluster.local import LocalCluster

async def block():
    print("blocked", flush=True)
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it

async def main():
    async with LocalCluster(2) as cluster:
        pids = [cluster.pid(worker.name) for worker in cluster]
        print(*pids, flush=True)
        if "{how}" == "blocked":
            cluster["worker0"].call(block)
        if "{how}" == "forked":
            fork = multiprocessing.get_context("fork")
            helper = fork.Process(target=time.sleep, args=(60,))
            helper.start()
            print(helper.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["idle", "blocked", "forked"])
async def test_workers_end_when_their_driver_is_killed(how, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    driver = script(DRIVER.format(how=how))
    pids = [int(each) for each in (await line_of(driver)).split()]
    helper = None
    if how == "blocked":
        assert await line_of(driver) == "[worker0] blocked\n"
    if how == "forked":  # a child with copies of the lifelines lives on
        helper = int(await line_of(driver))
    start = time.monotonic()
    driver.kill()
    try:
        for each in pids:
            await gone(each)
        assert helper is None or alive(helper)
    finally:
        if helper is not None:
            os.kill(helper, signal.SIGKILL)
    assert time.monotonic() - start < 6.0
    await finish(driver)
    assert os.listdir(tmp_path) == []


async def test_an_interrupt_reaches_the_driver_only_and_ends_everything(tmp_path):
    driver = script(DRIVER.format(how="idle"))
    pids = [int(each) for each in (await line_of(driver)).split()]
    driver.send_signal(signal.SIGINT)
    _, errors = await finish(driver)
    assert driver.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert "[worker" not in errors
    for each in pids:
        assert not alive(each)


async def test_a_script_forwards_output_and_leaves_nothing_in_the_temporary_folder(tmp_path):
    program = script(
        f"""
        import asyncio, tempfile
        tempfile.tempdir = {str(tmp_path)!r}
        from aiograd.cluster.local import LocalCluster

        async def main():
            for n in range(2):  # again and again, in one process
                async with LocalCluster(1, names=[f"w{{n}}"]) as cluster:
                    await cluster[f"w{{n}}"].call(print, "hello", n)

        asyncio.run(main())
        """
    )
    output, errors = await finish(program)
    assert (output, errors, program.returncode) == ("[w0] hello 0\n[w1] hello 1\n", "", 0)
    assert os.listdir(tmp_path) == []


def test_no_thread_of_ours_is_left():
    assert [each for each in threading.enumerate() if each.name.startswith("aiograd")] == []
