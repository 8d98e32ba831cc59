"""The simulator finds planted bugs.

AIOGRAD_BUGS=1 looks for all of them, by seeds or by crash points.
"""

from __future__ import annotations

import os

import pytest

from aiograd.testing.simulator.crashpoints.cases import Case, hunt, run_case
from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.planted_bugs import BUGS, planted
from aiograd.testing.simulator.run import isolated, run

QUICK = (
    *("run_twice", "late_deadline", "no_lease", "early_free", "answer_twice", "forget_context"),
    *("resend_all", "resend_nothing", "no_ack", "half_frames", "forget_overtaken"),
    *("unheeded_exit", "sound_sleep", "forgetful_sleep", "deaf_sleep"),
)
# Bugs that crash points find sooner than random seeds, and a case that finds each.
CASES = {
    "successors": "selfa/heavy-twice:16:b:replace",
    "late_loss": "fan2/heavy-root:11:c:kill",
    "kept_to_itself": "chain2/heavy-root:11:c:kill",
    "silent_abort": "chain3/once:15:d:kill",
    "dropped_posts": "mixed/pair:84:d:replace",
    "shown_early": "mixed/pair:-1::",
    "failed_in_doubt": "mixed/twice:105:b:replace",
    "all_well": "fan2/once:13:c:cut",
    "untold": "mixed/pair:-1::",
    "show_partial": "mixed/pair:84:d:replace",
}
# Only a few crash points of heavy programs find these: one is tried below, none is searched for.
RARE = {"kept_to_itself"}
HUNTED = [name for name in BUGS if name not in RARE] if os.environ.get("AIOGRAD_BUGS") else QUICK
LIMIT = 2000 if os.environ.get("AIOGRAD_BUGS") else 100


@pytest.mark.parametrize("name", HUNTED)
def test_a_planted_bug_is_found(name: str) -> None:
    if name in CASES:
        assert hunt(name, LIMIT) is not None, BUGS[name].text
        return
    with planted(name) as bug:
        assert any(not run(make_plan(seed)).ok for seed in range(LIMIT)), bug.text


@pytest.mark.parametrize("name", CASES)
def test_a_crash_point_finds_a_planted_bug_and_nothing_without_it(name: str) -> None:
    case = Case.parse(CASES[name], 0)
    with isolated() as errors:
        with planted(name) as bug:
            assert not run_case(case, errors).ok, bug.text
        result = run_case(case, errors)
        assert result.ok, "\n".join(result.violations)


def test_there_are_at_least_twelve_bugs_to_find() -> None:
    assert len(BUGS) >= 12


def test_a_planted_bug_is_gone_afterwards() -> None:
    from aiograd.rpc.link.receive import Once

    before = Once.fresh
    with planted("run_twice"):
        assert Once.fresh is not before
    assert Once.fresh is before
