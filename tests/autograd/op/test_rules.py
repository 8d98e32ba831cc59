"""What a rule reads is found from its bytecode; where it cannot be found, everything is saved."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from aiograd.autograd.op.rules import (
    NOTHING,
    SHAPE,
    VALUE,
    Meta,
    Plan,
    keywords,
    needs,
    needs_variadic,
)


def reads_inside(g: Any, y: Any, a: Any) -> Any:
    return [g * a for _ in range(2)], (lambda: a)


def binds_anew(g: Any, y: Any, a: Any) -> Any:
    a = g
    return a


@pytest.mark.parametrize(
    ("rule", "result", "arguments"),
    [
        (lambda g, y, a, b: g, NOTHING, (NOTHING, NOTHING)),
        (lambda g, y, a, b: g * b, NOTHING, (NOTHING, VALUE)),
        (lambda g, y, a: g * y, VALUE, (NOTHING,)),
        (lambda g, y, a: g.reshape(a.shape), NOTHING, (SHAPE,)),
        (lambda g, y, a: g.astype(a.dtype) / a.size, NOTHING, (SHAPE,)),
        (lambda g, y, a: g.reshape(a.shape) * a, NOTHING, (VALUE,)),
        (lambda g, y, a: g.reshape(a.mean()), NOTHING, (VALUE,)),
        (lambda g, y, a: a.shape and a, NOTHING, (VALUE,)),
        (lambda g, y, a, b: b.shape if a is b else g, NOTHING, (VALUE, VALUE)),
        (reads_inside, NOTHING, (VALUE,)),
        (binds_anew, NOTHING, (VALUE,)),
        (None, NOTHING, ()),
    ],
)
def test_a_rule_needs_what_its_code_reads(rule: Any, result: int, arguments: tuple[int, ...]):
    assert needs(rule) == (result, arguments)


@pytest.mark.parametrize(
    "rule", [np.multiply, functools.partial(lambda g, y, a: g, 1), lambda *everything: None]
)
def test_a_rule_that_cannot_be_read_needs_everything(rule: Any):
    own, arguments = needs(rule)
    assert own == VALUE
    assert set(arguments) == {VALUE}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (lambda g, y, i, *arrays: g[i], (NOTHING, VALUE)),
        (lambda g, y, i: g[i], (NOTHING, VALUE)),
        (lambda gs, ys, a: [gs[0]], (NOTHING, NOTHING)),
        (lambda gs, ys, a: [ys[0].reshape(a.shape)], (VALUE, SHAPE)),
        (np.add, (VALUE, VALUE)),
    ],
)
def test_one_rule_for_all_arguments_is_read_as_a_whole(rule: Any, expected: tuple[int, int]):
    assert needs_variadic(rule) == expected


def test_only_parameters_that_every_rule_knows_are_known():
    first, second = (lambda g, y, a, axis=None, k=0: g), (lambda g, y, a, axis=None: g)
    both = keywords([first, second, None])
    assert both is not None
    assert "axis" in both
    assert "k" not in both
    assert keywords([lambda g, y, a, **anything: g]) is None


def test_a_plan_lists_values_and_shapes_apart():
    plan = Plan(True, [VALUE, NOTHING, SHAPE, VALUE], None)
    assert (plan.values, plan.shapes, plan.keeps_result) == ((0, 3), (2,), True)


def test_a_shape_stands_for_its_array():
    meta = Meta(np.zeros((2, 3), np.float32))
    assert (meta.shape, meta.ndim, meta.size, meta.dtype) == ((2, 3), 2, 6, np.float32)
    assert Meta(1.5).shape == ()
