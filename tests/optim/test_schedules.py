"""Learning rates over time."""

from __future__ import annotations

import math
from typing import Any

import pytest

import aiograd as ag


def optimizer(lr: float = 0.1) -> Any:
    return ag.optim.SGD([ag.zeros(1, requires_grad=True)], lr=lr)


CURVES: list[tuple[Any, list[float]]] = [
    (lambda o: ag.optim.StepLR(o, 2, 0.5), [0.1, 0.1, 0.05, 0.05, 0.025]),
    (lambda o: ag.optim.MultiStepLR(o, [1, 3], 0.1), [0.1, 0.01, 0.01, 0.001, 0.001]),
    (lambda o: ag.optim.ExponentialLR(o, 0.5), [0.1, 0.05, 0.025, 0.0125, 0.00625]),
    (
        lambda o: ag.optim.CosineAnnealingLR(o, T_max=4, eta_min=0.02),
        [0.02 + 0.04 * (1 + math.cos(math.pi * t / 4)) for t in range(5)],
    ),
    (lambda o: ag.optim.LinearLR(o, 0.5, 1.0, 2), [0.05, 0.075, 0.1, 0.1, 0.1]),
    (lambda o: ag.optim.LambdaLR(o, lambda t: 1 / (t + 1)), [0.1, 0.05, 0.1 / 3, 0.025, 0.02]),
]


@pytest.mark.parametrize(("make", "expected"), CURVES)
def test_each_schedule_has_its_curve(make: Any, expected: list[float]) -> None:
    target = optimizer()
    schedule = make(target)
    seen = []
    for _ in expected:
        seen.append(target.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [seen[-1]]
        schedule.step()
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize(("make", "expected"), CURVES)
def test_a_saved_schedule_continues(make: Any, expected: list[float]) -> None:
    first = make(optimizer())
    first.step()
    first.step()
    second = make(optimizer(lr=0.1))
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.get_last_lr() == pytest.approx([expected[3]])


def test_groups_keep_their_proportions() -> None:
    a, b = ag.zeros(1, requires_grad=True), ag.zeros(1, requires_grad=True)
    target = ag.optim.SGD([{"params": [a]}, {"params": [b], "lr": 1.0}], lr=0.1)
    ag.optim.ExponentialLR(target, 0.5).step()
    assert [group["lr"] for group in target.param_groups] == [0.05, 0.5]
    with pytest.raises(ValueError, match="groups"):
        ag.optim.LambdaLR(target, [lambda t: 1.0])


def test_a_plateau_lowers_the_rate() -> None:
    target = optimizer()
    schedule = ag.optim.ReduceLROnPlateau(target, factor=0.5, patience=1, cooldown=1, min_lr=0.03)
    rates = []
    for value in [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]:
        schedule.step(value)
        rates.append(target.param_groups[0]["lr"])
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.03, 0.03, 0.03]
    copy = ag.optim.ReduceLROnPlateau(optimizer())
    copy.load_state_dict(schedule.state_dict())
    assert (copy.best, copy.factor) == (4.0, 0.5)


def test_a_plateau_can_be_one_of_a_value_that_should_grow() -> None:
    target = optimizer()
    schedule = ag.optim.ReduceLROnPlateau(target, "max", patience=0, threshold_mode="abs")
    for value in (1.0, 2.0, 3.0):
        schedule.step(ag.tensor(value))
    assert schedule.get_last_lr() == [0.1]
    schedule.step(3.0)
    assert schedule.get_last_lr() == pytest.approx([0.01])
    with pytest.raises(ValueError, match="factor"):
        ag.optim.ReduceLROnPlateau(target, factor=1.0)
    with pytest.raises(ValueError, match="mode"):
        ag.optim.ReduceLROnPlateau(target, mode="up")
