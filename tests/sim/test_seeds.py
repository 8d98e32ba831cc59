"""The library under simulated trouble: every seed keeps every invariant.

AIOGRAD_SEEDS=20000 runs more of them; `python -m aiograd.testing.simulator SEED` replays one.
"""

from __future__ import annotations

import os

import pytest

from aiograd.testing.simulator.plan import MESSAGES, make_plan
from aiograd.testing.simulator.run import run

SEEDS = int(os.environ.get("AIOGRAD_SEEDS", "300"))
PORTION = 25  # seeds per test: small enough to be spread over processes


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_every_seed_keeps_every_invariant(first: int) -> None:
    for seed in range(first, min(first + PORTION, SEEDS)):
        report = run(make_plan(seed))
        assert report.ok, f"{report}\n" + "\n".join(report.trace)


# Seeds that have found something in the library or in the judge, each mended since.
FOUND = {
    463: "two cuts of a first handshake were taken for a refusal",
    2002179: "judge: a pause longer than the time to come back was no reason for a loss",
    3002435: "judge: nor was a clog that went over into a pause",
    3002441: "judge: work that takes all the time it has was taken for quick",
    5000868: "judge: a worker restarted after a pass was asked for what the old one had",
    5005277: "judge: what a last call of a dead worker put on a shelf stayed there",
    5014096: "a reference that got lost was never given up where the way is longer than the lease",
    5018994: "judge: a call that was cancelled before its worker was connected ended late",
    7004158: "judge: a creation that found no room in time was no reason for its uses to fail",
    7006496: "the simulated kernel never asked a vanished host whether its window had been opened",
    7008008: "judge: a connection that was reset too often to come back was no reason for a loss",
    12000201: "edges to a worker that the directory did not know yet counted as lost",
    12000117: "the simulated coordinator told of three restarts out of their order",
    13002701: "judge: a reset in the last moment left a suspect that was about to resume",
    13005653: "five resets of a first handshake in a row were taken for a wrong secret",
    3002079: "a call that was cancelled before its first step kept its arguments for ever",
}


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_has_found_something_finds_it_no_more(seed: int) -> None:
    report = run(make_plan(seed))
    assert report.ok, f"{FOUND[seed]}\n{report}\n" + "\n".join(report.trace)


def test_faults_meet_every_kind_of_message_and_many_kinds_of_failure() -> None:
    """A message that got another name would never trigger its faults again."""
    reports = [run(make_plan(seed)) for seed in range(60)]
    messages = {kind for report in reports for kind in report.messages}
    outcomes = {kind for report in reports for kind in report.outcomes}
    assert messages >= set(MESSAGES)
    assert outcomes >= {"ok", "cancelled", "Boom", "WorkerLost", "OwnerLost"}
    assert outcomes >= {"DeadlineExceeded", "BackwardFailed"}
