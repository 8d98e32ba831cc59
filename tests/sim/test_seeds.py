"""The library under simulated trouble: every seed keeps every invariant.

AIOGRAD_SEEDS=20000 runs more of them; `python -m aiograd.testing.simulator SEED` replays one.
"""

from __future__ import annotations

import os

import pytest

from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.run import run

SEEDS = int(os.environ.get("AIOGRAD_SEEDS", "300"))
PORTION = 25  # seeds per test: small enough to be spread over processes

# Seeds that once found a bug; they run with every commit, whatever else changes.
FOUND = {
    4: "a call cancelled before its first step kept running_calls up",
    7: "a large message that arrives in one read was completed before it was announced",
    3: "dialling a host without power went on for minutes",
    34: "a result that brings a reference had no deadline while it waited for its owner",
    65: "a context lived on when its originator was lost and the worker had called itself",
    24: "a worker taken for lost was told that its secret is wrong",
    1112: "questions about forks inherited the deadline of a call that had long ended",
    1140: "a fork was given up while the call that carries it waited for its turn",
    295: "a creation that was given up left room behind at the owner",
}


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_every_seed_keeps_every_invariant(first: int) -> None:
    for seed in range(first, min(first + PORTION, SEEDS)):
        report = run(make_plan(seed))
        assert report.ok, f"{report}\n" + "\n".join(report.trace)


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_seeds_that_found_a_bug_find_none_now(seed: int) -> None:
    report = run(make_plan(seed))
    assert report.ok, f"{FOUND[seed]}\n{report}\n" + "\n".join(report.trace)
