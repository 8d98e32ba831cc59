"""A rank of a program is killed: every other process ends by itself within bounded time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "programs" / "lost.py")


@pytest.mark.parametrize(
    ("scenario", "victim"),
    [
        ("shutdown", 0),
        ("shutdown", 1),
        ("shutdown", 2),
        ("call", 0),
        ("backward", 2),
        ("averaged", 1),
        ("start", 2),
    ],
)
def test_every_other_process_ends_with_an_error(scenario: str, victim: int, tmp_path: Path) -> None:
    command = ("-m", "aiograd.compat.torch_rpc", PROGRAM, str(tmp_path / "store"))
    done = subprocess.run(
        [sys.executable, *command, scenario, str(victim)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    statuses = ["3"] * 3
    statuses[victim] = "-9"
    assert done.stdout.split() == statuses, done.stderr
