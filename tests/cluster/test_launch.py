"""`aiograd run` and `aiograd worker`, as their users call them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from aiograd.__main__ import main
from aiograd.cluster.api import get_worker_info
from aiograd.cluster.launch import rank_environments
from aiograd.cluster.worker import Worker
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options


def command(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "aiograd", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


async def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = await asyncio.to_thread(process.communicate)
    return process.returncode, output, errors


def write(path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_each_rank_is_told_who_it_is():
    first, second = rank_environments(2, "/private", {"HOME": "/x", "AIOGRAD_RANK": "9"})
    assert first["HOME"] == "/x"
    assert (first["AIOGRAD_RANK"], second["AIOGRAD_RANK"]) == ("0", "1")
    assert first["AIOGRAD_RENDEZVOUS"] == second["AIOGRAD_RENDEZVOUS"]
    assert first["OMP_NUM_THREADS"] == "1"


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_run_starts_ranks_that_find_each_other(tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import asyncio, sys
        import aiograd as ag

        async def main():
            worker = await ag.init_rpc(None)
            print(sys.argv[1:], await ag.all_gather(worker.rank))
            await ag.shutdown()

        asyncio.run(main())
        """,
    )
    code, output, errors = await outcome(command("run", "-n", "2", script, "--flag", "x"))
    assert (code, "Traceback" in errors) == (0, False)
    everyone = "['--flag', 'x'] {'worker0': 0, 'worker1': 1}"
    assert sorted(output.splitlines()) == [f"[worker0] {everyone}", f"[worker1] {everyone}"]


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_run_ends_the_others_when_one_fails(tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import os, sys, time
        if os.environ["AIOGRAD_RANK"] == "1":
            sys.exit(7)
        time.sleep(60)
        """,
    )
    code, _, errors = await outcome(command("run", "-n", "3", script))
    assert code == 7
    assert "worker1 failed (exit code 7); ending worker0, worker2" in errors


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_run_passes_an_interrupt_on_and_leaves_nothing(tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import time
        try:
            print("ready")
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    process = command("run", "-n", "2", script, env={"TMPDIR": str(tmp_path)})
    for _ in range(2):
        assert "ready" in await asyncio.to_thread(process.stdout.readline)
    process.send_signal(signal.SIGINT)
    code, output, _ = await outcome(process)
    assert code == 130
    assert sorted(output.splitlines()) == ["[worker0] interrupted", "[worker1] interrupted"]
    assert os.listdir(tmp_path) == ["script.py"]


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_run_takes_a_module_too(tmp_path):
    code, output, _ = await outcome(command("run", "-n", "1", "-m", "platform"))
    assert code == 0
    assert output.startswith("[worker0] ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def name_of_worker() -> str:
    return get_worker_info().name


@pytest.mark.parametrize("ending", ["cluster", "interrupt"])
async def test_worker_joins_a_running_cluster(tmp_path, ending):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(b"0123456789abcdef\n")
    place = f"127.0.0.1:{free_port()}"
    options = Options(secret_file=str(secret), grace=3.0)
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        process = command(
            "worker", "--join", place, "--name", "helper", "--secret-file", str(secret)
        )
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
        assert boss.workers()[1].rank == 1
        assert await rpc_async("helper", name_of_worker) == "helper"
        if ending == "interrupt":
            process.send_signal(signal.SIGINT)
            await boss.member.wait_gone("helper")
    code, _, errors = await outcome(process)
    assert f"helper joined {place} as rank 1" in errors.splitlines()
    assert "Traceback" not in errors
    assert code == (0 if ending == "cluster" else 130)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_joins_with_a_secret_for_each_peer(tmp_path):
    for name in ("boss", "other"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(f"{name}0123456789abcdef")
    place = f"127.0.0.1:{free_port()}"
    options = Options(secret_file={"helper": tmp_path / "boss"}, grace=3.0)
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        files = [f"--secret-file={name}={tmp_path / name}" for name in ("boss", "other")]
        process = command("worker", "--join", place, "--name", "helper", *files)
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
        assert await rpc_async("helper", name_of_worker) == "helper"
    assert (await outcome(process))[0] == 0


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_says_why_it_cannot_join(tmp_path):
    code, _, errors = await outcome(command("worker", "--join", "nonsense"))
    assert code == 1
    assert errors.startswith("aiograd: cannot read the rendezvous 'nonsense'")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["run", "-n", "0", "x.py"],
        ["run", "nowhere.py"],
        ["worker"],
        ["worker", "--join", "a:1", "--secret-file", "one", "--secret-file", "two"],
        ["worker", "--join", "a:1", "--secret-file", "boss=one", "--secret-file", "boss=two"],
    ],
)
def test_wrong_commands_are_explained(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: aiograd" in capsys.readouterr().err
