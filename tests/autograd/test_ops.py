"""Every operation of every table in `ops/` against small differences, first and second order.

One sample list for all tables (`samples.py`), and a test that no operation is missing from it. What
is special to one table is tested beside it, in `tests/autograd/ops/`.
"""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.autograd import OPS, Tensor
from aiograd.testing import gradcheck, gradgradcheck
from tests.autograd.samples import DISCRETE, SAMPLES, Sample

CALLS = [
    pytest.param(name, sample, id=f"{name}-{i}")
    for name, samples in SAMPLES.items()
    if name not in DISCRETE
    for i, sample in enumerate(samples)
]


def test_every_op_has_a_gradient_sample():
    assert SAMPLES.keys() == OPS.keys()


@pytest.mark.parametrize(("name", "sample"), CALLS)
def test_gradient_agrees_with_differences(name: str, sample: Sample):
    assert gradcheck(sample.function(OPS[name]), sample.inputs())


@pytest.mark.parametrize(("name", "sample"), [c for c in CALLS if c.values[1].second])
def test_second_derivative_agrees_with_differences(name: str, sample: Sample):
    assert gradgradcheck(sample.function(OPS[name]), sample.inputs(), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "sample"),
    [c for c in CALLS if all(array.kind == "d" for array in c.values[1].arrays())],
)
def test_single_precision_stays_single(name: str, sample: Sample):
    singles = [Tensor(t.data, requires_grad=True, dtype=np.float32) for t in sample.inputs()]
    outputs = sample.function(OPS[name])(*singles)
    for y in outputs if isinstance(outputs, tuple) else [outputs]:
        if y.requires_grad:
            y.backward(np.ones(y.shape, y.dtype), retain_graph=True)
    for t in singles:
        assert t.grad is None or t.grad.dtype == np.float32


@pytest.mark.parametrize("name", sorted(DISCRETE))
def test_truths_and_positions_carry_no_gradient(name: str):
    for sample in SAMPLES[name]:
        result = sample.function(OPS[name])(*sample.inputs())
        assert isinstance(result, Tensor)
        assert not result.requires_grad


@pytest.mark.parametrize("other", [True, np.True_, np.array([True, False])])
def test_a_truth_value_is_a_number_that_one_can_multiply_with(other):
    x = Tensor([2.0, 3.0], requires_grad=True)
    (x * other).sum().backward()
    assert x.grad.tolist() == (np.ones(2) * other).tolist()
    x.grad = None
    (x / True).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (np.std, [2.0, 2.0, 2.0], [0, 0, 0]),
        (lambda x: np.arctan2(x[0], x[1]), [0.0, 0.0], [0, 0]),
        (lambda x: np.linalg.norm(x, 0.5), [0.0, 3.0], [0, 1]),
        (lambda x: np.linalg.norm(x, 0.5), [0.0, 0.0], [0, 0]),
        (lambda x: np.linalg.norm(x, -1), [0.0, 3.0], [0, 0]),
        (lambda x: np.linalg.norm(x, -2), [0.0, 0.0], [0, 0]),
    ],
)
def test_slopes_at_kinks_are_those_of_torch(function, value, expected):
    x = Tensor(value, requires_grad=True)
    function(x).backward()
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-15)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's own, of the variance
@pytest.mark.parametrize(("value", "ddof"), [([2.0], 1), ([2.0], 2), ([2.0, 2.0], 2)])
@pytest.mark.parametrize("function", [np.var, np.std])
def test_the_variance_of_too_few_has_no_slope(function, value, ddof):
    x = Tensor(value, requires_grad=True)
    function(x, ddof=ddof).backward()
    assert np.isnan(x.grad.numpy()).all()
