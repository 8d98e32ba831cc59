"""Successions in the simulator: seeds, crash points of an election, and planted bugs.

AIOGRAD_BUGS=1 looks for all planted bugs; `make succession COUNT=5000` runs many seeds.
"""

from __future__ import annotations

import os

import pytest

from aiograd.testing.simulator.planted_bugs import planted
from aiograd.testing.simulator.succession.bugs import BUGS
from aiograd.testing.simulator.succession.plan import KINDS, make_plan
from aiograd.testing.simulator.succession.points import Point, points, run_point
from aiograd.testing.simulator.succession.run import run

# Seeds that once failed, and what they found.
FOUND = {
    160: "a successor that was stopped at once: its members did not follow it later",
    793: "members left although others followed a successor, which was stopped",
    1092: "a lost successor that not all had heard of: nobody was elected",
    5041: "the dead counted as if they had never voted: two coordinators of one term",
    30452: "a member counted as gone for who had lost its own connection: barriers waited",
    40582: "a member waited for a successor after all who had heard of it had left",
    5397: "candidates went on for terms that others had used",
}


@pytest.mark.parametrize("seed", [*range(30), *FOUND])
def test_a_cluster_that_loses_its_coordinator_is_whole_again(seed):
    report = run(make_plan(seed))
    assert report.ok, str(report)


def test_seeds_have_rounds_of_every_kind():
    names = [f"m{i}" for i in range(5)]
    kinds = {make_plan(seed).draw_round(0, names, "m0").kind for seed in range(100)}
    assert kinds == set(KINDS)


def test_the_same_seed_gives_the_same_trace():
    assert run(make_plan(7)).digest == run(make_plan(7)).digest


def test_a_fault_at_a_boundary_of_an_election_does_not_keep_the_others_from_agreeing():
    for point in points(seed=0, share=0.02):
        result = run_point(point)
        assert result.ok, f"{point}: {result.violations[0]}"


def test_an_election_without_another_fault_has_boundaries():
    result = run_point(Point())
    assert result.ok
    assert len(result.victims) > 100
    assert set(result.victims) == {"m1", "m2", "m3", "m4"}


# Found by a few seeds each. `vote_twice` takes about 40 of them, `unwatched` about 80; few seeds
# have the order of events that `dead_voters` needs.
QUICK = {"no_majority": 10, "forget_term": 10, "shrinking": 40, "keep_roster": 40, "untold": 40}
RARE = {"dead_voters": 5041}
HUNTED = dict.fromkeys(BUGS, 1000) if os.environ.get("AIOGRAD_BUGS") else QUICK


@pytest.mark.parametrize(("name", "seed"), RARE.items())
def test_a_rare_bug_is_found_by_its_seed(name, seed):
    with planted(name, BUGS) as bug:
        assert not run(make_plan(seed)).ok, bug.text


@pytest.mark.parametrize("name", [name for name in HUNTED if name not in RARE])
def test_a_planted_bug_is_found(name):
    with planted(name, BUGS) as bug:
        assert any(not run(make_plan(seed)).ok for seed in range(HUNTED[name])), bug.text
