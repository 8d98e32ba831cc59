"""How far gradients are behind, counted without any workers."""

from __future__ import annotations

import gc

import aiograd as ag
from aiograd.optim.owned import History


def test_only_later_steps_of_other_contexts_count():
    history, param = History(), ag.zeros(2)
    for step, context in enumerate([7, 8, 8, 9], start=1):
        history.add([param], step, context, oldest=0)
    assert [history.behind([param], since, 9) for since in range(5)] == [3, 2, 1, 0, 0]
    assert history.behind([param], 0, 8) == 2
    assert history.behind([ag.zeros(2)], 0, 8) == 0
    assert history.behind([], 0, 8) == 0


def test_the_most_changed_parameter_decides():
    history, often, once = History(), ag.zeros(1), ag.zeros(1)
    history.add([often], 1, 1, 0)
    history.add([often, once], 2, 1, 0)
    assert history.behind([once], 0, 5) == 1
    assert history.behind([once, often], 0, 5) == 2


def test_what_every_context_saw_is_forgotten_and_so_are_parameters_that_are_gone():
    history, param = History(), ag.zeros(1)
    for step in range(1, 100):
        history.add([param], step, 1, oldest=step - 3)
    assert history.behind([param], 0, 2) == 3
    del param
    gc.collect()
    assert not history._steps
