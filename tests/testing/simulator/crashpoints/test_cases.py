"""Cases of crash points: which there are, and that each is the same run every time."""

from __future__ import annotations

from collections import Counter

import pytest

from aiograd.testing.simulator.crashpoints.cases import (
    DEADLY,
    FAULTS,
    Case,
    Result,
    cases,
    describe,
    run_case,
)
from aiograd.testing.simulator.run import isolated


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
    failed = Result(case, [], ["I3: something"], {}, "")
    assert f"CASE={case} SEED=4" in describe(failed)
