"""Every example runs alone, as a user would start it, and shows what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STORIES = sorted(EXAMPLES.glob("[0-9]*.py"))
TINY = r"(?:0(?:\.0)?e\+00|[0-9.]+e-1[2-9])"  # a difference of at most 1e-11

# What the reader must see.
PROMISES = {
    "00_train_conv": [r"9\d% right|100% right"],
    "00_train_locally": [r"\d"],
    "01_first_call": [r"One call: hello from worker0", r"raised by divide\(\) on worker1"],
    "02_remote_value": [r"kept 2 values for others, and after the release 0"],
    "03_backward": [
        rf"from the same model in one process: {TINY}",
        r"failure.worker='worker1'",
        r"to the last bit: True",
    ],
    "04_parameter_server": [r"lost worker trainer1", r"to the last bit the same: True"],
    "05_split_learning": [
        r"asks for columns: NotAllowed: only exposed functions",
        r"joining as lab with clinic.key: AuthError: lab and registry cannot connect",
        r"joining as clinic with guess.key: AuthError: clinic and registry cannot connect",
        r"clinic asks lab: AuthError: clinic and lab share no secret",
        r"lab asks clinic: AuthError: lab and clinic share no secret",
        *(
            rf"{name}: \S+ MB went out, with 151 arrays of 4 numbers per row for registry\n.* "
            "4,000 of 4,000 numbers of its last embeddings and 0 of 15,000 of its columns"
            for name in ("clinic", "lab")
        ),
    ],
    "06_actor_learner": [r"worker1.*hiring", r"worker5.*hiring", r"solved in"],
    "07_pipeline": [
        r"one after another .* faster",
        rf"in one process: {TINY}",
        r"inference alone: .* the same result: True",
    ],
    "08_meta_learning": [rf"against one process: {TINY}"],
}


def run(path: Path, folder: Path) -> str:
    """Run a script in an empty folder, on its own; what it said."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AIOGRAD_")}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # threads that wait for each other cost more here
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir()), "an example must leave no file behind"
    return done.stdout


def figures(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern!r} is not in:\n{text}"
    return [float(group.replace(",", "")) for group in found.groups()]


def check_figures(story: str, said: str) -> None:
    """Numbers that have a bar of their own."""
    if story == "04_parameter_server":
        assert figures(r"\(([0-9,]+) times less\)", said)[0] > 1000
        losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", said)]
        assert losses[-1] < losses[0]
    if story == "05_split_learning":
        split, pooled = figures(r"split ([0-9.]+)%, all columns in one place ([0-9.]+)%", said)
        assert split >= pooled - 0.5
    if story == "06_actor_learner":
        assert max(float(x) for x in re.findall(r"mean reward +([0-9.]+)", said)) >= 195
        ahead, grown = figures(r"more than (\d+) episodes ahead, .* grown by ([0-9.]+) MB", said)
        assert 0 < ahead <= 16
        assert grown < 8  # one more megabyte each would be none
        assert figures(r"solved in ([0-9.]+) s", said)[0] < 120
    if story == "07_pipeline":
        assert figures(r"([0-9.]+)× faster", said)[0] > 1.1  # 2.8 on an idle machine
    if story == "08_meta_learning":
        losses = [float(x) for x in re.findall(r"adapting: ([0-9.]+)", said)]
        assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_an_example_runs_alone_and_prints_what_it_promises(path: Path, tmp_path: Path) -> None:
    said = run(path, tmp_path)
    for promise in PROMISES[path.stem]:
        assert re.search(promise, said), f"{promise!r} is not in:\n{said}"
    check_figures(path.stem, said)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_an_example_has_at_most_60_lines(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= 60


def test_the_demo_trains_a_model(tmp_path: Path) -> None:
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", run(EXAMPLES / "demo.py", tmp_path))]
    assert losses[-1] < losses[0] / 10
