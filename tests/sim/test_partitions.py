"""Pairs are cut off for longer than the resume timeout, while programs run.

No process ends, so after the cuts every pair must be able to call again (I9).
"""

from __future__ import annotations

import random

import pytest

from aiograd.rpc.link.links import Links
from aiograd.testing.simulator.plan import Plan, make_plan
from aiograd.testing.simulator.run import run
from aiograd.testing.simulator.schedule import Fault


def partitioned(seed: int) -> Plan:
    """The programs of a seed, with long cuts instead of its own faults."""
    plan, chance = make_plan(seed), random.Random(f"{seed} partitions")
    faults = []
    for _ in range(chance.randint(1, 3)):
        a, b = chance.sample(plan.names, 2)
        kind = chance.choice(("cut", "cut", "cut_one_way"))
        faults.append(Fault(chance.uniform(0.0, 6.0), kind, a, b, chance.uniform(6.0, 14.0)))
        if chance.random() < 0.3:
            faults.append(Fault(faults[-1].at + 0.1, "reset", a, b))
    return plan.with_faults(faults)


@pytest.mark.parametrize("theme", ["calls", "references", "gradients"])
def test_every_pair_can_call_again_after_long_cuts(theme: str) -> None:
    plans = [plan for seed in range(200) if (plan := partitioned(seed)).themes == [theme]]
    lost = 0
    for plan in plans[:25]:
        report = run(plan)
        assert report.ok, f"{report}\n" + "\n".join(report.trace)
        lost += sum(report.outcomes.get(kind, 0) for kind in ("WorkerLost", "OwnerLost"))
    assert lost  # otherwise no cut had any effect


def test_a_pair_that_stays_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "_worth_a_dial", lambda links, peer, loss: False)
    reports = [run(partitioned(seed)) for seed in range(10)]
    assert any("I9" in text for report in reports for text in report.violations)
