"""The examples with torch tensors run alone; `make torch` has the venv that they need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jupytext
import nbclient
import pytest

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="needs torch: `make torch` runs it in a venv that has it"
)
FOLDER = Path(__file__).parents[2] / "examples" / "torch"
NOTEBOOK = FOLDER / "in_pictures.py"
STORIES = sorted(path for path in FOLDER.glob("*.py") if path != NOTEBOOK)


def run(path: Path, folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AIOGRAD_")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert not list(folder.iterdir()), "an example must leave no file behind"
    return done.stdout


@pytest.mark.deadline(150)
def test_three_trainers_share_a_torch_model(tmp_path: Path) -> None:
    said = run(FOLDER / "parameter_server.py", tmp_path)
    right = [float(number) for number in re.findall(r"([0-9.]+)% right", said)]
    assert len(right) == 4
    assert right[-1] > 80 > right[0]


@pytest.mark.deadline(150)
def test_a_split_model_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    said = run(FOLDER / "split_model.py", tmp_path)
    assert re.search(r"in one process: (0\.0e\+00|[0-9.]+e-(0[6-9]|1\d))", said), said
    losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", said)]
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_an_example_has_at_most_60_lines(path: Path) -> None:
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 60


@pytest.mark.deadline(150)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_notebook_runs_and_shows_torch_nodes() -> None:
    notebook = jupytext.read(NOTEBOOK)
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [o["data"]["image/svg+xml"] for o in outputs if "image/svg+xml" in o.get("data", {})]
    assert len(pictures) == 1
    assert all(name in pictures[0] for name in ("TanhBackward0", "worker0", "worker1", "Send"))
    text = "".join(output.get("text", "") for output in outputs)
    assert "in one process: True | .grad: None" in text
    assert "weights close to one: True" in text
    assert "ctx.backward" in text
