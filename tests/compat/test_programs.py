"""Whole programs for torch.distributed.rpc run on the drop-in: unmodified, and by changed imports.

They are written after the official examples: the same structure and calls, on synthetic data.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
IMPORTS = {
    "import torch.distributed.rpc as rpc": "import aiograd.compat.torch_rpc as rpc",
    "import torch.distributed.autograd as dist_autograd": (
        "from aiograd.compat.torch_rpc import autograd as dist_autograd"
    ),
    "from torch.distributed.optim import DistributedOptimizer": (
        "from aiograd.compat.torch_rpc.optim import DistributedOptimizer"
    ),
    "from torch.distributed.nn import RemoteModule": (
        "from aiograd.compat.torch_rpc.nn import RemoteModule"
    ),
}
RUNS = [
    ("recurrent", (), ["trained"]),
    ("parameter_server", ("1",), ["trained 1"]),
    ("parameter_server", ("3",), ["trained 1", "trained 2", "trained 3"]),
    ("batch_parameter_server", (), ["trained"]),
    ("reinforcement", (), ["learnt"]),
    ("pipeline", (), ["equal"]),
    ("data_parallel", (), ["trained"]),
    ("rules", (), ["called in a hook", "ended", "parameter", "refused"]),
]
IDS = ["-".join((name, *arguments)) for name, arguments, _ in RUNS]


def execute(*command: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


@pytest.mark.parametrize(("name", "arguments", "output"), RUNS, ids=IDS)
def test_an_unmodified_program_runs(
    name: str, arguments: tuple[str, ...], output: list[str], tmp_path: Path
) -> None:
    program, store = str(PROGRAMS / f"{name}.py"), str(tmp_path / "store")
    command = ("-m", "aiograd.compat.torch_rpc", program, store, *arguments)
    assert execute(*command, folder=tmp_path) == output


@pytest.mark.parametrize(("name", "arguments", "output"), RUNS, ids=IDS)
def test_a_program_runs_with_changed_imports_only(
    name: str, arguments: tuple[str, ...], output: list[str], tmp_path: Path
) -> None:
    text = (PROGRAMS / f"{name}.py").read_text()
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    assert "torch.distributed.rpc" not in text
    program = tmp_path / "program.py"
    program.write_text(text)
    assert execute(str(program), str(tmp_path / "store"), *arguments, folder=tmp_path) == output
