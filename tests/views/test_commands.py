"""The commands that look at a cluster, run as a user runs them, on clusters with planted faults."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import pytest

import aiograd as ag
from aiograd.observe.snapshot import from_json
from aiograd.views.commands import duration
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A run folder of the test's own: other clusters of this user run on this host, too."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AIOGRAD_RENDEZVOUS", raising=False)


async def aiograd(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the command line in a process of its own; exit code and both outputs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aiograd",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def line_of(text: str) -> str:
    """Return "file:line", as it is printed, of the line of this file with a mark."""
    with open(__file__) as file:
        for number, line in enumerate(file, 1):
            if f"# mark: {text}" in line:
                return f"{os.path.basename(__file__)}:{number}"
    raise AssertionError(text)


# ── planted faults ──────────────────────────────────────────────────────────────────────────────


@ag.serial
class Stage:
    def link(self, following):
        self.following = following

    async def step(self):
        return await self.following.rpc_async().step()  # mark: cycle


class Locked:
    def __init__(self):
        self.lock = asyncio.Lock()

    def link(self, following):
        self.following = following

    async def step(self):
        async with self.lock:  # mark: lock
            return await self.following.rpc_async().step()


async def hold(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)  # noqa: ASYNC251  # mark: blocked


async def meet():
    await ag.barrier(["worker0", "worker1", "worker2"], timeout=30)  # mark: barrier


async def ring(kind):
    stages = [ag.remote(f"worker{i}", kind) for i in range(3)]
    for i, stage in enumerate(stages):
        await stage.rpc_async().link(stages[(i + 1) % 3])
    return stages


@pytest.mark.deadline(60)
async def test_stuck_names_the_line_of_a_cycle_of_calls_over_three_workers():
    async with ag.LocalCluster(3):
        stages = await ring(Stage)
        future = stages[0].rpc_async(timeout=50).step()
        await until(lambda: _running(4))
        code, out, err = await aiograd("stuck", "--older", "0")
        assert (code, err) == (1, "")
        title, *hops = out.splitlines()
        assert title.startswith("cycle of 3 calls")
        assert [hop.split()[0] for hop in hops] == ["worker0", "worker1", "worker2"]
        assert all("Stage.step" in hop and line_of("cycle") in hop for hop in hops)
        future.cancel()
        del stages


@pytest.mark.deadline(60)
async def test_stuck_names_the_lock_that_a_chain_of_calls_comes_back_to():
    async with ag.LocalCluster(3):
        stages = await ring(Locked)
        future = stages[0].rpc_async(timeout=50).step()
        await until(lambda: _running(4))
        code, out, _ = await aiograd("stuck", "--older", "0")
        assert code == 1
        title, *hops = out.splitlines()
        assert "comes back to Locked.step on worker0" in title
        assert line_of("lock") in hops[-1]
        future.cancel()
        del stages


@pytest.mark.deadline(60)
async def test_stuck_names_the_line_that_blocks_a_loop():
    async with ag.LocalCluster(2) as cluster:
        future = cluster["worker1"].call(hold, 12.0)
        code, out, _ = await aiograd("stuck")
        assert code == 1
        assert "worker1 is blocked: its event loop has been blocked for" in out
        assert line_of("blocked") in out.splitlines()[1]
        await future


@pytest.mark.deadline(60)
async def test_stuck_names_who_never_reached_a_barrier():
    async with ag.LocalCluster(3) as cluster:
        futures = [cluster[f"worker{i}"].call(meet) for i in (0, 2)]
        await until(lambda: _gathering(2))
        code, out, _ = await aiograd("stuck", "--older", "0")
        assert code == 1
        title, first, second, missing = out.splitlines()
        assert title == "worker1 never reached the barrier of worker0, worker1, worker2"
        assert line_of("barrier") in first
        assert line_of("barrier") in second
        assert missing.split()[0] == "worker1"
        for future in futures:
            future.cancel()


@pytest.mark.deadline(60)
async def test_stuck_names_the_stopped_worker_that_a_pass_waits_for():
    async with ag.LocalCluster(2) as cluster:
        w = ag.ones(3, requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", ag.tanh, args=(w,))
            pid = cluster.pid("worker1")
            os.kill(pid, signal.SIGSTOP)

            async def train():
                await ctx.backward(y.sum())  # mark: backward

            task = asyncio.create_task(train())
            code, out, _ = await aiograd("stuck", "--older", "0")
            os.kill(pid, signal.SIGCONT)
            await task
        assert code == 1
        title, hop = out.splitlines()[:2]
        assert title.startswith(f"worker1 is stopped: process {pid} is stopped")
        assert hop.split()[:2] == ["driver", "backward"]
        assert line_of("backward") in hop
        assert "waits for 1 edge of worker1" in hop


async def _running(count):
    return len((await ag.inspect()).running) == count


async def _gathering(count):
    return sum(len(row.arrived) for row in (await ag.inspect()).collectives) == count


# ── the other commands ──────────────────────────────────────────────────────────────────────────


@pytest.mark.deadline(60)
async def test_status_is_a_table_and_fails_when_a_worker_is_lost():
    async with ag.LocalCluster(2) as cluster:
        code, out, err = await aiograd("status")
        assert (code, err) == (0, "")
        label, head, *rows = out.splitlines()
        assert f"process {os.getpid()}" in label
        assert head.split()[:3] == ["worker", "rank", "state"]
        assert [row.split()[0] for row in rows] == ["worker0", "worker1", "driver"]
        await cluster.kill("worker1")
        code, out, _ = await aiograd("status")
        assert code == 1
        assert "worker1 is lost: its process ended" in out
        code, out, _ = await aiograd("status", "--json")
        assert code == 1
        assert [row.name for row in from_json(out).lost] == ["worker1"]


@pytest.mark.deadline(60)
async def test_a_guest_is_no_member_and_leaves_nothing():
    async with ag.LocalCluster(1):
        before = ag.debug_info()
        assert (await aiograd("status"))[0] == 0
        assert [worker.name for worker in ag.workers()] == ["worker0", "driver"]
        await until(lambda: ag.debug_info() == before)
        assert {row.peer for row in ag.inspect().links} == {"worker0"}


@pytest.mark.deadline(60)
async def test_nothing_is_stuck_in_an_idle_cluster_and_others_are_asked_for():
    async with ag.LocalCluster(1):
        code, out, _ = await aiograd("stuck")
        assert (code, out) == (0, "nothing waits for longer than 1 s\n")
        async with ag.LocalCluster(1):
            code, _, err = await aiograd("stuck")
            assert code == 2
            assert err.count(f"--pid {os.getpid()}") == 2
    code, _, err = await aiograd("stuck")
    assert code == 2
    assert "no cluster of this user runs on this host; --join" in err
    code, _, err = await aiograd("stuck", "--pid", "1")
    assert (code, err.startswith("aiograd: no cluster 1 ")) == (2, True)


@pytest.mark.deadline(60)
async def test_a_cluster_is_looked_at_by_its_rendezvous_and_secret(tmp_path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    options = ag.Options(secret_file=str(secret), transport="tcp")
    where = "127.0.0.1:0"
    async with ag.Worker(
        "solo", rank=0, world_size=None, rendezvous=where, options=options
    ) as solo:
        address = solo.agent.info.addresses[0].removeprefix("tcp:")
        code, out, err = await aiograd("status", "--join", address, "--secret-file", str(secret))
        assert (code, err) == (0, "")
        assert "solo" in out
        # From the run folder, too: the record names the file, not the secret.
        assert (await aiograd("status"))[0] == 0
        wrong = tmp_path / "wrong"
        wrong.touch(mode=0o600)
        wrong.write_text("another secret of thirty-two byte")
        code, _, err = await aiograd("status", "--join", address, "--secret-file", str(wrong))
        assert code == 2
        assert "secret" in err or "proof" in err
        environment = {"AIOGRAD_RENDEZVOUS": address, "AIOGRAD_SECRET_FILE": str(secret)}
        assert (await aiograd("status", **environment))[0] == 0


@pytest.mark.deadline(60)
async def test_logs_stacks_record_and_top(tmp_path):
    async with ag.LocalCluster(1) as cluster:
        await cluster["worker0"].call(print, "hello \x1b[31m there")
        await until(lambda: "hello" in cluster.logs("worker0"))
        code, out, _ = await aiograd("logs")
        assert (code, out) == (0, "[worker0] hello ?[31m there\n")
        assert (await aiograd("logs", "nobody"))[0] == 1
        waiting = cluster["worker0"].call(asyncio.sleep, 50)
        code, out, _ = await aiograd("stacks", "worker0")
        assert code == 0
        assert out.startswith("── worker0\n")
        assert "in sleep" in out
        page, trace = tmp_path / "x.html", tmp_path / "x.json"

        async def call():
            while True:
                await cluster["worker0"].call(divmod, 7, 2)
                await asyncio.sleep(0.01)

        task = asyncio.create_task(call())
        code, out, _ = await aiograd("record", "300ms", "-o", str(trace))
        assert code == 0
        names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
        assert any("divmod" in name for name in names)
        code, out, _ = await aiograd("record", "0.2", "-o", str(page))
        assert "spans of 2 workers" in out
        assert "divmod" in page.read_text()
        code, out, _ = await aiograd("top", "--count", "2", "--every", "0.2", "--sort", "cpu")
        assert code == 0
        assert out.count("calls/s") == 2
        assert "sleep" in out
        task.cancel()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.deadline(60)
async def test_logs_can_be_followed():
    async with ag.LocalCluster(1) as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiograd", "logs", "-f", "worker0"),
            stdout=asyncio.subprocess.PIPE,
        )
        for text in ("first", "second"):
            await cluster["worker0"].call(print, text)
            assert await process.stdout.readline() == f"[worker0] {text}\n".encode()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


@pytest.mark.deadline(60)
async def test_a_blocked_driver_is_told_and_its_workers_are_asked_directly(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, time, aiograd as ag\n"
        "async def main():\n"
        "    async with ag.LocalCluster(1):\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(15)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert await process.stdout.readline() == b"ready\n"
        code, out, _ = await aiograd("status")
        assert code == 1
        rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
        assert rows["worker0"][2] == "running"
        code, out, _ = await aiograd("stuck")
        assert code == 1
        assert "driver is blocked" in out
        assert "program.py:5" in out
    finally:
        process.kill()
        await process.communicate()


async def test_doctor_says_what_there_is():
    code, out, _ = await aiograd("doctor")
    assert code == 0
    found = {line.split()[1]: line.split()[0] for line in out.splitlines()}
    assert found["aiograd"] == found["numpy"] == found["uvloop"] == "ok"


@pytest.mark.parametrize(
    ("text", "found"), [("10s", 10.0), ("500ms", 0.5), ("2m", 120.0), ("1.5", 1.5), ("1min", 60.0)]
)
def test_times_are_written_as_people_do(text, found):
    assert duration(text) == found


@pytest.mark.parametrize("text", ["", "ten", "-1s", "1h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        duration(text)
