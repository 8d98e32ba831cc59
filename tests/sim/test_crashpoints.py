"""Small programs with one fault at any of their boundaries; `make crashpoints` runs all cases.

AIOGRAD_CRASHPOINTS=20000 runs more of them here.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from aiograd.testing.simulator.crashpoints.cases import (
    DEADLY,
    FAULTS,
    Case,
    cases,
    describe,
    run_case,
    run_portion,
    sample,
)
from aiograd.testing.simulator.crashpoints.programs import PROGRAMS
from aiograd.testing.simulator.run import isolated

CASES = int(os.environ.get("AIOGRAD_CRASHPOINTS", "600"))
SHAPES = list(dict.fromkeys(name.partition("/")[0] for name in PROGRAMS))


@pytest.mark.parametrize("shape", SHAPES)
def test_workers_agree_on_every_outcome_wherever_a_fault_falls(shape: str) -> None:
    programs = [name for name in PROGRAMS if name.startswith(f"{shape}/")]
    for portion in sample(CASES, 0, programs):
        tally = run_portion(portion)
        assert tally.points > 0
        assert not tally.failed, "\n".join(map(describe, tally.failed[:5]))


def test_there_are_two_hundred_programs_of_every_kind() -> None:
    assert len(PROGRAMS) >= 200
    variants = Counter(name.partition("/")[2] for name in PROGRAMS)
    assert set(variants.values()) == {len(SHAPES)}
    assert {"once", "twice", "create", "second", "waste", "heavy-first", "rref"} <= set(variants)
    assert {"chain3", "fan2", "diamond", "selfa", "shared"} <= set(SHAPES)


@pytest.mark.parametrize("program", ["chain2/once", "shared/twice", "single/led-heavy"])
def test_a_case_is_the_same_run_every_time_and_differs_only_after_its_fault(program: str) -> None:
    with isolated() as errors:
        calm = run_case(Case(program), errors)
        assert calm.points == run_case(Case(program), errors).points
        every = list(cases(program, calm.points))
        for case in every[:: len(every) // 8]:
            first, second = run_case(case, errors), run_case(case, errors)
            assert first.digest == second.digest
            assert first.points == calm.points[: case.at + 1]


def test_every_fault_comes_at_every_callback_and_deaths_also_at_writes() -> None:
    with isolated() as errors:
        points = run_case(Case("chain2/once"), errors).points
    found = Counter((case.at, case.victim, case.fault) for case in cases("chain2/once", points))
    assert set(found.values()) == {1}
    for at, point in enumerate(points):
        here = {(victim, fault) for number, victim, fault in found if number == at}
        if point.kind == "write":
            assert here == {(point.worker, fault) for fault in DEADLY}
            continue
        assert here >= {(point.worker, fault) for fault in FAULTS}
        # What is left out was tried just before, when the run would have gone on in the same way.
        for victim in {worker for worker in "abc" if (worker, "kill") not in here}:
            before = max(n for n, who, fault in found if n < at and (who, fault) == (victim, "cut"))
            assert points[before].time == point.time
            assert not {"write"} & {each.kind for each in points[before:at]}
            assert victim not in {each.worker for each in points[before:at]}
    assert {point.kind for point in points} == {"callback", "write"}
    assert {point.worker for point in points} == set("abc")


def test_a_case_is_replayed_from_its_name() -> None:
    case = Case("chain3/once", 57, "c", "kill", 4)
    assert Case.parse(str(case), 4) == case
    assert f"CASE={case} SEED=4" in describe(_failed(case))


def _failed(case: Case):
    from aiograd.testing.simulator.crashpoints.cases import Result

    return Result(case, [], ["I3: something"], {}, "")
