"""Notebooks run from top to bottom, and again in the same kernel."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


def _execute(notebook: Any) -> list[dict[str, Any]]:
    """Run all cells; what they showed, by kind of display."""
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["data"] for output in outputs if "data" in output]


def _pictures(shown: list[dict[str, Any]]) -> list[str]:
    return [data["image/svg+xml"] for data in shown if "image/svg+xml" in data]


@pytest.mark.deadline(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_autograd_notebook_runs_within_a_minute_and_again() -> None:
    notebook = jupytext.read(FOLDER / "distributed_autograd.py")
    again = copy.deepcopy(notebook.cells)
    for cell in again:
        cell["id"] += "-again"
    once = len(notebook.cells)
    notebook.cells += again
    start = time.perf_counter()
    shown = _execute(notebook)
    assert time.perf_counter() - start < 60
    pictures = _pictures(shown)
    assert len(pictures) == 2
    assert all(name in pictures[1] for name in ("driver", "worker0", "worker1", "Send", "Recv"))
    text = "".join(o.get("text", "") for c in notebook.cells[once:] for o in c.get("outputs", []))
    assert "BackwardFailed on worker1\nbecause of WorkerLost(" in text
    assert "the same gradient: True" in text


# How many pictures each of the others shows, and what it must say.
OTHERS = {
    "learning_to_adapt": (2, []),
    "parameter_server": (
        2,
        [
            "after 40 steps: WorkerLost: lost worker trainer1",
            "staleness=None: 24 steps taken, 0 refused",
            "staleness=0: 8 steps taken, 16 refused",
        ],
    ),
    "pipeline_in_pictures": (3, []),
    "split_learning": (2, ["noise 0.0: ", "{(800, 4)}"]),
}


@pytest.mark.deadline(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_a_notebook_runs_and_shows_pictures(name: str) -> None:
    notebook = jupytext.read(FOLDER / f"{name}.py")
    pictures, promises = OTHERS[name]
    assert len(_pictures(_execute(notebook))) == pictures
    text = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    for promise in promises:
        assert promise in text


def test_every_notebook_is_tested() -> None:
    told = {"distributed_autograd", *OTHERS}
    assert {path.stem for path in NOTEBOOKS} == told
    page = (FOLDER.parents[1] / "docs" / "index.md").read_text()
    assert all(f"notebooks/{name}" in page for name in told)
