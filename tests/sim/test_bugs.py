"""The simulator finds bugs that were planted; `make sim BUGS=1` hunts all of them."""

from __future__ import annotations

import os

import pytest

from aiograd.testing.simulator.bugs import BUGS, planted
from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.run import run

QUICK = (
    *("run_twice", "late_deadline", "no_lease", "early_free", "answer_twice", "forget_context"),
    *("resend_all", "resend_nothing", "no_ack", "half_frames", "forget_overtaken"),
    "unheeded_exit",
)
HUNTED = list(BUGS) if os.environ.get("AIOGRAD_BUGS") else QUICK
LIMIT = 2000 if os.environ.get("AIOGRAD_BUGS") else 100


@pytest.mark.parametrize("name", HUNTED)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name) as bug:
        assert any(not run(make_plan(seed)).ok for seed in range(LIMIT)), bug.text


def test_there_are_at_least_twelve_bugs_to_find() -> None:
    assert len(BUGS) >= 12


def test_a_planted_bug_is_gone_afterwards() -> None:
    from aiograd.rpc.inbox import Once

    before = Once.fresh
    with planted("run_twice"):
        assert Once.fresh is not before
    assert Once.fresh is before
