"""Jobs of Slurm, as far as their processes can tell: the variables, the shared folder, SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiograd as ag
from aiograd.errors import WorkerClosed
from tests.support.hosts import network, possible
from tests.support.slurm import batch_environment, fake_srun
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.deadline(60)
loop = pytest.mark.asyncio(loop_factories=["asyncio"])

RANKS = """
    import asyncio, os, signal, sys
    import aiograd as ag

    async def main():
        worker = await ag.init_rpc()
        worker.leave_on(signal.SIGTERM)
        print("ranks", await ag.all_gather(int(os.environ["SLURM_PROCID"])), flush=True)
        if "wait" in sys.argv:
            try:
                await asyncio.Event().wait()
            finally:
                print("cleaned up", flush=True)
        await ag.shutdown()

    LOOP
"""


@contextlib.contextmanager
def job(
    short_path: Path, tasks: int, script: str, program: str, *words: str
) -> Iterator[subprocess.Popen]:
    """Run a batch script as Slurm does, on a simulated cluster of one host."""
    bin = fake_srun(short_path)
    (short_path / "program.py").write_text(textwrap.dedent(program))
    process = subprocess.Popen(
        ["bash", str(ROOT / "deploy/slurm" / script), str(short_path / "program.py"), *words],
        env=batch_environment(short_path, bin, tasks),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=short_path,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def left_behind(short_path: Path) -> list[str]:
    """What the job left in the shared folder and in the temporary one."""
    home = [each for each in os.listdir(short_path / "home") if each.startswith(".aiograd-4711")]
    return home + [each for each in os.listdir(short_path) if re.fullmatch(r"aiograd-\w{8}", each)]


def test_ranks_of_srun_meet_at_a_file_and_leave_nothing(short_path):
    program = RANKS.replace("LOOP", "asyncio.run(main())")
    with job(short_path, 3, "ranks.sbatch", program) as process:
        output, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    everyone = "ranks {'worker0': 0, 'worker1': 1, 'worker2': 2}"
    assert output.splitlines() == [everyone] * 3
    assert left_behind(short_path) == []


def test_the_program_of_the_page_runs_as_written(short_path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/slurm.md").read_text(), re.DOTALL)
    with job(short_path, 2, "ranks.sbatch", program) as process:
        output, errors = process.communicate(timeout=50)
    assert sorted(output.splitlines()) == ["worker0 of 2", "worker1 of 2"], errors
    assert process.returncode == 0


@pytest.mark.parametrize("run", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"])
def test_ranks_leave_in_order_when_slurm_sends_sigterm(short_path, run):
    with job(short_path, 3, "ranks.sbatch", RANKS.replace("LOOP", run), "wait") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert all(line.startswith("ranks") for line in lines), process.communicate()
        os.killpg(process.pid, signal.SIGTERM)  # as `scancel`: to all processes of the job
        output, errors = process.communicate(timeout=30)
    assert output.splitlines() == ["cleaned up"] * 3
    assert "Traceback" not in errors
    assert "lost" not in errors
    assert errors.count("leaves on SIGTERM") == 3
    # The ranks end with 143; bash, which was signalled as well, says so of itself or of srun.
    assert process.returncode in (143, -signal.SIGTERM)
    assert left_behind(short_path) == []


def test_the_file_of_a_job_that_was_killed_does_not_mislead_the_next_one(short_path):
    program = RANKS.replace("LOOP", "asyncio.run(main())")
    with job(short_path, 2, "ranks.sbatch", program, "wait") as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().startswith("ranks")
    assert left_behind(short_path) != []  # killed, so nothing could be removed
    for path in (short_path / "bin").iterdir():
        path.unlink()
    (short_path / "bin").rmdir()
    with job(short_path, 2, "ranks.sbatch", program) as process:  # requeued under the same id
        output, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    assert output.splitlines() == ["ranks {'worker0': 0, 'worker1': 1}"] * 2
    assert left_behind(short_path) == []


DRIVER = """
    import asyncio, os
    import aiograd as ag

    async def main():
        worker = await ag.init_rpc("driver", rank=0, rendezvous=os.environ["CLUSTER"])
        while len(ag.workers()) < 3:
            await worker.member.changed.wait()
        names = [each.name for each in ag.workers() if each.name != "driver"]
        ranks = await ag.Group(names).call(os.getenv, "SLURM_PROCID")
        print(sorted(ranks), [each.rank for each in ag.workers()], flush=True)
        await ag.shutdown()

    asyncio.run(main())
"""


def test_workers_that_join_from_tasks_of_slurm_are_not_ranks_of_the_job(short_path):
    # Each has SLURM_PROCID and a size of the world; the coordinator gives them other ranks.
    with job(short_path, 2, "driver.sbatch", DRIVER) as process:
        output, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    assert output == "['0', '1'] [0, 1, 2]\n"
    assert left_behind(short_path) == []


@pytest.mark.skipif(not possible(), reason="making network namespaces takes root and `ip`")
@loop
async def test_ranks_on_several_hosts_meet_at_a_file_whatever_its_file_system_is(tmp_path):
    place = f"file:{tmp_path}/meet"
    async with network(2) as hosts:
        ranks = [await host.program() for host in hosts]
        starts = []
        for rank, program in enumerate(ranks):
            environment = {
                "SLURM_PROCID": f"{rank}",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_ID": "0",
                "AIOGRAD_RENDEZVOUS": place,
            }
            starts.append(
                program.start(f"""
                    import os
                    os.environ.update({environment})
                    worker = await ag.init_rpc()
                    return await ag.all_gather(worker.addresses[-1].split(":")[1])
                """)
            )
        found = await asyncio.gather(*starts)
        told = {f"worker{rank}": host.address for rank, host in enumerate(hosts)}
        assert found == [told, told]


# ── leaving on a signal ─────────────────────────────────────────────────────────────────────────

LEAVER = """
    import asyncio, signal, sys
    import aiograd as ag

    async def main():
        async with await ag.join(sys.argv[1], "leaver") as worker:
            worker.leave_on(signal.SIGTERM, signal.SIGINT)
            print("ready", flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


async def _slow() -> str:
    await asyncio.sleep(0.3)
    return "done"


@loop
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_gets_a_signal_finishes_its_calls_and_is_not_lost(tmp_path, number):
    (tmp_path / "leaver.py").write_text(textwrap.dedent(LEAVER))
    place = f"file:{tmp_path}/meet"
    async with ag.Worker("boss", rank=0, rendezvous=place, options=ag.Options(grace=3)) as boss:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, str(tmp_path / "leaver.py"), place],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        reasons = []
        boss.member.departed.append(lambda peer, why: reasons.append(why))
        call = ag.rpc_async("leaver", _slow)
        await until(lambda: ag.rpc_async("leaver", _running))
        process.send_signal(number)
        assert await call == "done"
        _, errors = await asyncio.to_thread(process.communicate)
        assert process.returncode == 128 + number
        assert "Traceback" not in errors
        await boss.member.wait_gone("leaver")
        assert reasons == [None]  # it left, nobody lost it


async def _running() -> bool:
    return ag.debug_info()["running_calls"] > 1


@loop
async def test_closing_a_worker_gives_its_signals_back():
    before = signal.getsignal(signal.SIGTERM)
    async with ag.Worker("alone", rank=0, world_size=1) as worker:
        worker.leave_on(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(WorkerClosed):
        worker.leave_on(signal.SIGTERM)
