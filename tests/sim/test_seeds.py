"""The library under simulated faults: every seed keeps every invariant.

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


# Seeds that found a bug of the library or of the simulator, each fixed since. "judge": the
# simulator took right behaviour for wrong.
FOUND = {
    463: "two cuts during a first handshake were reported as a refusal",
    2002179: "judge: a pause longer than the resume timeout did not justify a loss",
    3002435: "judge: a clog followed by a pause did not justify a loss",
    3002441: "judge: work as long as its timeout counted as quick",
    5000868: "judge: a worker restarted after a pass was asked for gradients of its former start",
    5005277: "judge: a reference shelved by the last call of a dead worker counted as a leak",
    5014096: "a lost fork was never reclaimed when latency exceeds the lease",
    5018994: "judge: a call cancelled before its worker was connected counted as late",
    7004158: "judge: a creation refused by a full window did not justify failing uses",
    7006496: "simulator: the kernel never probed the closed window of a vanished host",
    7008008: "judge: a connection reset too often to resume did not justify a loss",
    12000201: "edges to a worker that the directory did not know yet counted as lost",
    12000117: "simulator: the coordinator announced three restarts out of order",
    13002701: "judge: a suspect about to resume after a late reset counted as stuck",
    13005653: "five resets in a row during a first handshake were reported as a wrong secret",
    3002079: "a call cancelled before its first step kept its arguments for ever",
    15000162: "a method call abandoned before its first step left an unretrieved error",
}


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_a_bug_passes_since_its_fix(seed: int) -> None:
    report = run(make_plan(seed))
    assert report.ok, f"{FOUND[seed]}\n{report}\n" + "\n".join(report.trace)


def test_faults_meet_every_kind_of_message_and_many_kinds_of_failure() -> None:
    """The faults of a message kind that was renamed would never be triggered again."""
    reports = [run(make_plan(seed)) for seed in range(60)]
    messages = {kind for report in reports for kind in report.messages}
    outcomes = {kind for report in reports for kind in report.outcomes}
    assert messages >= set(MESSAGES)
    assert outcomes >= {"ok", "cancelled", "Boom", "WorkerLost", "OwnerLost"}
    assert outcomes >= {"DeadlineExceeded", "BackwardFailed"}
