"""Runs of a plan: the same seed gives the same trace, and a failing run can be made smaller."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.planted_bugs import planted
from aiograd.testing.simulator.run import minimize, run, shrink


@pytest.mark.parametrize("seed", [3, 5, 11])
def test_the_same_seed_gives_the_same_trace(seed):
    first, second = run(make_plan(seed)), run(make_plan(seed))
    assert first.digest == second.digest
    assert first.outcomes == second.outcomes


def test_another_seed_gives_another_trace():
    assert run(make_plan(3)).digest != run(make_plan(5)).digest


def test_traces_do_not_depend_on_the_hash_seed_of_python():
    code = (
        "from aiograd.testing.simulator.plan import make_plan\n"
        "from aiograd.testing.simulator.run import run\n"
        "print([run(make_plan(seed)).digest for seed in (1, 2, 6, 13)])"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "7")
    }
    assert len(traces) == 1


def test_minimize_keeps_the_items_that_a_failure_needs():
    tried = []

    def fails(items: list[int]) -> bool:
        tried.append(items)
        return {3, 11} <= set(items)

    assert minimize(range(16), fails) == [3, 11]
    assert len(tried) < 60


def test_minimize_of_a_failure_without_faults_is_nothing():
    assert minimize(range(8), lambda items: True) == []


def test_shrinking_leaves_out_faults_that_do_not_matter():
    with planted("no_lease"):
        seed = next(
            seed
            for seed in range(200)
            if len(make_plan(seed).faults) > 2 and not run(make_plan(seed)).ok
        )
        report = shrink(make_plan(seed))
    assert not report.ok
    assert len(report.plan.faults) < len(make_plan(seed).faults)


def test_the_report_of_a_failing_seed_names_invariant_and_last_events():
    with planted("late_deadline"):
        report = next(r for s in range(50) if not (r := run(make_plan(s))).ok)
    assert f"seed {report.plan.seed}: FAILED" in str(report)
    assert "I1" in str(report)
    assert 0 < len(report.trace) <= 50
    assert "VIOLATION" in report.trace[-1]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_leaves_frozen_objects_frozen(frozen):
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        run(make_plan(0))
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.freeze()
