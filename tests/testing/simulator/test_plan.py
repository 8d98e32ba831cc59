"""What seeds mean."""

from __future__ import annotations

from aiograd.testing.simulator.plan import REPLACED, make_plan


def test_a_share_of_all_seeds_replaces_workers_while_threads_compute():
    plans = [make_plan(seed) for seed in range(400)]
    replaced = [plan for plan in plans if plan.profile == "replaced"]
    assert 0.5 * REPLACED < len(replaced) / len(plans) < 2 * REPLACED
    assert all(plan.themes == ["drains"] for plan in replaced)
    assert any(fault.kind == "replace" for plan in replaced for fault in plan.faults)


def test_a_plan_depends_on_its_seed_only():
    assert make_plan(17) == make_plan(17)
    assert make_plan(17) != make_plan(18)


def test_other_faults_leave_the_rest_of_a_plan_as_it_is():
    plan = make_plan(5)
    calm = plan.with_faults([])
    assert calm.faults == []
    assert calm.with_faults(plan.faults) == plan
