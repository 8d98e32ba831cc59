"""Programs meet through torch's store in all ways that torch offers: run in real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "programs" / "meeting.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(*command: str, folder: Path, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("met"))


@pytest.mark.parametrize(
    ("way", "start"), [("file", "fork"), ("tcp", "fork"), ("env", "fork"), ("tcp", "spawn")]
)
def test_processes_meet_by_file_tcp_and_environment(way: str, start: str, tmp_path: Path) -> None:
    port = free_port()
    method = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}", "env": "env"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = ("-m", "aiograd.compat.torch_rpc", PROGRAM, method[way], start)
    assert run(*command, folder=tmp_path, **address) == ["met 0", "met 1"]


def test_processes_of_torchrun_meet(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    program = ("-m", "aiograd.compat.torch_rpc", PROGRAM, "torchrun")
    assert run(*torchrun, *address, *program, folder=tmp_path) == ["met 0", "met 1"]


def test_a_program_may_end_without_shutdown_while_its_worker_computes(tmp_path: Path) -> None:
    program = str(Path(PROGRAM).with_name("unfinished.py"))
    command = ("-m", "aiograd.compat.torch_rpc", program, f"{tmp_path}/store")
    assert run(*command, folder=tmp_path) == ["met 0"]


def test_rank_0_does_not_leave_before_the_others_are_in(tmp_path: Path) -> None:
    program = str(Path(PROGRAM).with_name("leaving.py"))
    command = ("-m", "aiograd.compat.torch_rpc", program, f"{tmp_path}/store")
    assert run(*command, folder=tmp_path) == ["met 0", "met 1"]
