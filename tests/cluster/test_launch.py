"""`aiograd run` and `aiograd worker`, as their users call them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import aiograd
from aiograd.__main__ import main
from aiograd.cluster.api import get_worker_info
from aiograd.cluster.launch import rank_environments
from aiograd.cluster.worker import Worker
from aiograd.errors import WorkerLost
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
async def test_run_names_the_rank_that_failed_and_not_the_one_that_lost_it(tmp_path):
    # The exit of worker1 is held back until worker0, which fails for its loss, has exited.
    script = write(
        tmp_path / "script.py",
        """
        import asyncio, os, signal, sys, time
        import aiograd as ag

        async def forever():
            await asyncio.Event().wait()

        async def main():
            worker = await ag.init_rpc(None)
            pids = await ag.all_gather(os.getpid())
            if worker.rank == 0:
                await ag.rpc_async("worker1", forever)
            elif worker.rank == 2:
                await forever()
            async def running():
                while ag.debug_info()["running_calls"] < 1:
                    await asyncio.sleep(0.01)
            await running()
            global first
            first = pids["worker0"]
            raise RuntimeError("boom")

        try:
            asyncio.run(main())
        except RuntimeError:
            while os.path.exists(f"/proc/{first}"):
                time.sleep(0.01)
            sys.exit(9)
        """,
    )
    code, _, errors = await outcome(command("run", "-n", "3", script))
    last = errors.splitlines()[-1]
    assert code == 9
    assert last == (
        "[aiograd] worker1 failed (exit code 9); worker0 failed as well; ending worker2"
    )
    # A lost worker, and not the cancellation of the function that ran there.
    assert "lost worker worker1 (its event loop was shut down)" in errors
    assert "CancelledError" not in errors


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


async def joined(process: subprocess.Popen[str]) -> str:
    """Wait until a worker says that it has joined: the coordinator knows that before it does."""
    assert process.stderr is not None
    while "joined" not in (line := await asyncio.to_thread(process.stderr.readline)):
        # On a busy machine its watchdog may speak before that.
        assert line, "the worker has ended"
    return line


async def name_of_worker() -> str:
    return get_worker_info().name


@pytest.fixture
def secret(tmp_path) -> str:
    """Path of a file with a secret."""
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_bytes(b"0123456789abcdef\n")
    return str(file)


@pytest.mark.parametrize("ending", ["cluster", "interrupt"])
async def test_worker_joins_a_running_cluster(secret, ending):
    place = f"127.0.0.1:{free_port()}"
    options = Options(secret_file=secret, grace=3.0)
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        process = command("worker", "--join", place, "--name", "helper", "--secret-file", secret)
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
        assert boss.workers()[1].rank == 1
        assert await rpc_async("helper", name_of_worker) == "helper"
        assert await joined(process) == f"helper joined {place} as rank 1\n"
        if ending == "interrupt":
            process.send_signal(signal.SIGINT)
            await boss.member.wait_gone("helper")
    code, _, errors = await outcome(process)
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


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_worker_obeys_a_signal_while_it_waits_for_rank_0(number, secret):
    # Nothing listens there; the worker would try for a minute.
    place = f"127.0.0.1:{free_port()}"
    process = command("worker", "--join", place, "--name", "helper", "--secret-file", secret)
    line = await asyncio.to_thread(process.stderr.readline)
    assert line == f"helper waits for rank 0 at {place}\n"
    process.send_signal(number)
    code, _, errors = await outcome(process)
    assert (code, errors) == (128 + number, "")


async def _block() -> None:
    print("blocked", flush=True)  # noqa: T201
    time.sleep(600)  # noqa: ASYNC251


@pytest.mark.deadline(60)
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_worker_obeys_a_signal_while_a_function_blocks_its_loop(number, kind, secret):
    place = f"127.0.0.1:{free_port()}"
    options = Options(secret_file=secret, grace=1.0)
    # A grace that is short, and a loop: the command line has neither.
    program = f"""
        import sys
        from aiograd.cluster.config import plan_join
        from aiograd.cluster.launch import join_cluster
        from aiograd.rpc.options import Options
        options = Options(secret_file={secret!r}, grace=0.5, loop={kind!r})
        sys.exit(join_cluster(plan_join({place!r}, "helper", {{}}, options, 20, {{}})))
    """
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
        call = rpc_async("helper", _block)
        assert await asyncio.to_thread(process.stdout.readline) == "blocked\n"
        begun = time.monotonic()
        process.send_signal(number)
        code, _, errors = await outcome(process)
        assert code == 128 + number
        assert 2.0 < time.monotonic() - begun < 10
        assert "a function blocks the loop" in errors
        with pytest.raises(WorkerLost):
            await call


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_worker_obeys_a_signal_while_a_partner_is_silent(number, secret):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        process = command("worker", "--join", place, "--name", "helper", "--secret-file", secret)
        assert "waits for" in await asyncio.to_thread(process.stderr.readline)
        begun = time.monotonic()
        process.send_signal(number)
        code, _, errors = await outcome(process)
        assert (code, errors) == (128 + number, "")
        assert time.monotonic() - begun < 3


def test_worker_that_is_interrupted_while_it_reads_its_secret_shows_no_traceback(monkeypatch):
    class Terminal:
        @property
        def buffer(self) -> Terminal:
            return self

        def readline(self) -> bytes:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["worker", "--join", "127.0.0.1:1", "--secret-file", "-"]) == 130


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_what_a_killed_worker_left_is_removed_by_the_next_one(secret, short_path):
    place, options = f"127.0.0.1:{free_port()}", Options(secret_file=secret)
    (short_path / "run").mkdir(mode=0o700)
    environment = {"TMPDIR": str(short_path), "XDG_RUNTIME_DIR": str(short_path / "run")}
    join = ("worker", "--join", place, "--secret-file", secret, "--name")

    def left() -> set[str]:
        # Not what the watchdog of a busy machine notes there.
        found = {*short_path.glob("aiograd-*"), *short_path.glob("run/aiograd/w-*")}
        return {str(each) for each in found}

    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        for name in ("first", "second"):
            before = left()
            process = command(*join, name, env=environment)
            try:
                await joined(process)
                assert len(left()) == 2  # a folder of sockets and a record
                assert not before & left()  # none of the one before
            finally:
                process.kill()
                await outcome(process)
            await boss.member.wait_gone(name)
            assert len(left()) == 2  # nobody could remove them


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_fails_with_the_reason_when_it_loses_the_coordinator(secret):
    place = f"127.0.0.1:{free_port()}"
    boss = Worker("boss", rank=0, rendezvous=place, options=Options(secret_file=secret))
    await boss.start()
    process = command("worker", "--join", place, "--name", "helper", "--secret-file", secret)
    while len(boss.workers()) < 2:
        await boss.member.changed.wait()
    await joined(process)
    await boss.close(graceful=False)
    code, _, errors = await outcome(process)
    assert code == 1
    assert errors.splitlines()[-1].startswith("helper left: lost the coordinator boss (rank 0, ")


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_joins_again_if_it_was_asked_to(secret):
    place, options = f"127.0.0.1:{free_port()}", Options(secret_file=secret)
    join = ("--join", place, "--name", "helper", "--secret-file", secret, "--rejoin")
    boss = await Worker("boss", rank=0, rendezvous=place, options=options).start()
    process = command("worker", *join, "--label", "gpu=2")
    while len(boss.workers()) < 2:
        await boss.member.changed.wait()
    await joined(process)
    await boss.close(graceful=False)
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
        assert boss.get_worker_info("helper").labels == {"gpu": "2"}
    code, _, errors = await outcome(process)
    assert code == 0
    lines = [line for line in errors.splitlines() if "waits for" not in line]
    assert lines[0].startswith("helper left: lost the coordinator boss")
    assert lines[1] == "helper joins again"
    assert lines[-1] == "helper left: the cluster is closed"


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_that_joins_again_obeys_a_signal_between_two_attempts(secret):
    place = f"127.0.0.1:{free_port()}"
    join = ("--join", place, "--name", "helper", "--secret-file", secret)
    process = command("worker", *join, "--rejoin", "--patience", "0.1")
    for _ in range(2):
        line = await asyncio.to_thread(process.stderr.readline)
    assert line == "helper joins again\n"
    process.send_signal(signal.SIGTERM)
    assert (await outcome(process))[0] == 128 + signal.SIGTERM


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_with_another_secret_does_not_join_again_and_again(secret, tmp_path):
    place, wrong = f"127.0.0.1:{free_port()}", tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("another secret of 16 bytes")
    async with Worker("boss", rank=0, rendezvous=place, options=Options(secret_file=secret)):
        process = command("worker", "--join", place, "--secret-file", str(wrong), "--rejoin")
        code, _, errors = await outcome(process)
    assert code == 1
    assert "secret" in errors


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_takes_the_secret_from_standard_input():
    place = f"127.0.0.1:{free_port()}"
    options = Options(secret=b"a secret that no file has", grace=3.0)
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        arguments = ("worker", "--join", place, "--name", "helper", "--secret-file", "-")
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "aiograd", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process.stdin.write("a secret that no file has\n")
        process.stdin.flush()
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
    assert (await outcome(process))[0] == 0


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_worker_logs_what_happens_with_v(secret):
    place = f"127.0.0.1:{free_port()}"
    options = Options(secret_file=secret, grace=3.0)
    async with Worker("boss", rank=0, rendezvous=place, options=options) as boss:
        process = command(
            "worker", "-v", "--join", place, "--name", "helper", "--secret-file", secret
        )
        while len(boss.workers()) < 2:
            await boss.member.changed.wait()
    code, _, errors = await outcome(process)
    assert code == 0
    assert " INFO aiograd.cluster: helper joined as rank 1; 2 members" in errors
    assert errors.splitlines()[-1] == "helper left: the cluster is closed"


def test_the_version_is_that_of_the_library_and_of_its_wire(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"aiograd {aiograd.__version__} (Python 3.")


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
