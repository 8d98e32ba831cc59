"""An `srun` that starts its tasks on this machine, with the variables that Slurm gives them."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

__all__ = ["batch_environment", "fake_srun"]

SRUN = """#!{python}
import os, signal, subprocess, sys
words, count = sys.argv[1:], int(os.environ["SLURM_NTASKS"])
while words and words[0].startswith("-"):
    word = words.pop(0)
    if word.startswith("--ntasks="):
        count = int(word.partition("=")[2])
tasks = []
def term(number, frame):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGTERM, term)
for rank in range(count):
    step = dict(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0")
    step |= dict(SLURM_STEP_ID="0", SLURM_STEPID="0", SLURM_STEP_NUM_TASKS=str(count))
    step |= dict(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST=os.uname().nodename)
    tasks.append(subprocess.Popen(words, env={{**os.environ, **step}}))
codes = [task.wait() for task in tasks]
sys.exit(max(codes, key=abs) if any(codes) else 0)
"""


def fake_srun(folder: Path) -> Path:
    """Write `srun`, and `python` and `aiograd` of this interpreter; gives their folder."""
    bin = folder / "bin"
    bin.mkdir()
    commands = {
        "srun": SRUN.format(python=sys.executable),
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "aiograd": f'#!/bin/sh\nexec {sys.executable} -m aiograd "$@"\n',
    }
    for name, text in commands.items():
        (bin / name).write_text(text)
        (bin / name).chmod(stat.S_IRWXU)
    return bin


def batch_environment(folder: Path, bin: Path, tasks: int) -> dict[str, str]:
    """Return the environment of a batch script, as `sbatch --ntasks=n` gives it."""
    home = folder / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("AIOGRAD")}
    return {
        **inherited,
        "PATH": f"{bin}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(home),
        "TMPDIR": str(folder),
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODELIST": os.uname().nodename,
        "SLURM_JOB_NODELIST": os.uname().nodename,
        "SLURM_PROCID": "0",  # of the batch script
        "SLURM_NODEID": "0",
        "SLURM_CPUS_PER_TASK": "1",
    }
