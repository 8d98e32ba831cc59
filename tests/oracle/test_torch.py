# ruff: noqa: E501  a table of rows is read along the row
"""Values and gradients of every operation that torch has too, on the same inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiograd.autograd as ag
from tests.autograd.samples import DISCRETE, SAMPLES, Array, Sample
from tests.oracle.counterparts import SKIP, TORCH

pytestmark = pytest.mark.oracle

CALLS = [
    pytest.param(name, sample, id=f"{name}-{i}")
    for name, samples in SAMPLES.items()
    if name in TORCH
    for i, sample in enumerate(samples)
    if i not in SKIP.get(name, ())
]


def test_the_table_of_counterparts_names_existing_operations():
    assert TORCH.keys() <= SAMPLES.keys() - DISCRETE


def as_torch(arg: Any, rest: Any) -> Any:
    """A sample's argument as torch wants it: arrays become tensors."""
    if isinstance(arg, Array):
        return next(rest)
    if isinstance(arg, np.ndarray):
        return torch.from_numpy(arg.copy())
    if isinstance(arg, list | tuple):
        return type(arg)(as_torch(item, rest) for item in arg)
    return arg


def torch_call(name: str, sample: Sample, values: list[torch.Tensor]) -> Any:
    rest = iter(
        [
            (v + v.mH) / 2 if array.through else v
            for array, v in zip(sample.arrays(), values, strict=True)
        ]
    )
    args = [as_torch(arg, rest) for arg in sample.args]
    kwargs = {key: as_torch(arg, rest) for key, arg in sample.kwargs.items()}
    result = TORCH[name](*args, **kwargs)
    return result


def outputs_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def assert_equals_torchs(
    name: str, sample: Sample, arrays: list[np.ndarray], tolerance: float
) -> None:
    ours = [ag.tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]
    found = outputs_of(Sample(sample.args, sample.kwargs).function(ag.OPS[name])(*ours))
    expected = outputs_of(torch_call(name, sample, theirs))
    if name in ("eigh", "svd"):  # vectors are unique up to a phase
        found, expected = _phaseless(name, found, expected)
    assert len(found) == len(expected)
    rng = np.random.default_rng(1)
    total, reference = ag.tensor(0.0), torch.tensor(0.0, dtype=torch.float64)
    for y, z in zip(found, expected, strict=True):
        z = z.resolve_conj()
        assert y.shape == tuple(z.shape)
        np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=tolerance, atol=tolerance)
        weight = rng.standard_normal(y.shape)
        if y.dtype.kind == "c":
            total = total + (np.real(y) * weight + np.imag(y) * (weight + 1)).sum()
            w = torch.from_numpy(np.asarray(weight))
            reference = reference + (z.real * w + z.imag * (w + 1)).sum()
        else:
            total = total + (y * weight).sum()
            reference = reference + (z * torch.from_numpy(np.asarray(weight))).sum()
    if not reference.requires_grad:
        assert all(x.grad is None for x in ours)
        return
    total.backward()
    reference.backward()
    for x, z in zip(ours, theirs, strict=True):
        if z.grad is None:
            assert x.grad is None or not x.grad.data.any()
            continue
        assert x.grad.dtype == x.dtype
        np.testing.assert_allclose(
            x.grad.data, z.grad.numpy(force=True), rtol=tolerance, atol=tolerance
        )


def _phaseless(name: str, found: list[Any], expected: list[Any]) -> tuple[list[Any], list[Any]]:
    if name == "eigh":
        return [found[0], np.absolute(found[1])], [expected[0], expected[1].abs()]
    if len(found) == 1:
        return found, expected
    u, s, vh = found
    tu, ts, tvh = expected
    return [s, u[..., :1] * vh[..., :1, :]], [ts, tu[..., :1] * tvh[..., :1, :]]


@pytest.mark.parametrize(("name", "sample"), CALLS)
def test_values_and_gradients_equal_torchs(name: str, sample: Sample):
    assert_equals_torchs(name, sample, [array.value() for array in sample.arrays()], 1e-7)


LOOSE = {"inv", "det", "pinv", "svd", "matrix_power", "float_power", "norm", "solve", "prod"}


def _has_single_precision(name: str, sample: Sample) -> bool:
    """Not where the sample brings along doubles or complex numbers of its own."""
    given = (*sample.args, *sample.kwargs.values())
    doubles = any(isinstance(arg, np.ndarray) and arg.dtype.kind == "f" for arg in given)
    real = all(array.kind == "d" for array in sample.arrays())
    return real and not doubles and name not in ("quantile", "heaviside")


@pytest.mark.parametrize(
    ("name", "sample"), [call for call in CALLS if _has_single_precision(*call.values)]
)
def test_single_precision_equals_torchs(name: str, sample: Sample):
    arrays = [array.value().astype(np.float32) for array in sample.arrays()]
    assert_equals_torchs(name, sample, arrays, 2e-3 if name in LOOSE else 3e-4)


@pytest.mark.parametrize(("name", "sample"), CALLS)
def test_non_contiguous_inputs_equal_torchs(name: str, sample: Sample):
    strided = []
    for array in sample.arrays():
        value = array.value()
        room = np.zeros([2 * n for n in value.shape], value.dtype)
        view = room[(..., *[slice(None, None, 2)] * value.ndim)]
        view[...] = value
        strided.append(view)
    ours = [ag.from_numpy(v).requires_grad_() for v in strided]
    plain = [ag.tensor(v, requires_grad=True) for v in strided]
    for inputs in (ours, plain):
        result = outputs_of(sample.function(ag.OPS[name])(*inputs))
        parts = [np.real(y) + np.imag(y) if y.dtype.kind == "c" else y for y in result]
        total = sum(
            [(p * np.arange(1.0, p.size + 1).reshape(p.shape)).sum() for p in parts], ag.tensor(0.0)
        )
        if total.requires_grad:
            total.backward()
    for a, b in zip(ours, plain, strict=True):
        if b.grad is not None:
            np.testing.assert_allclose(a.grad.data, b.grad.data, rtol=1e-10, atol=1e-12)


# ── kinks and ties ──────────────────────────────────────────────────────────────────────────────

KINKS = {
    "relu": ([[-1.0, 0.0, 2.0]], {}), "absolute": ([[-1.0, 0.0, 2.0]], {}),
    "maximum": ([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]], {}), "minimum": ([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]], {}),
    "fmax": ([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]], {}), "fmin": ([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]], {}),
    "amax": ([[1.0, 3.0, 3.0, 3.0]], {}), "amin": ([[1.0, 1.0, 3.0, 1.0]], {}),
    "max": ([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]], {"axis": 1}),
    "clip": ([[-1.0, 0.0, 0.5, 1.0, 2.0]], {"low": 0.0, "high": 1.0}),
    "sqrt": ([[0.0, 1.0]], {}), "prod": ([[0.0, 2.0, 3.0]], {}), "cumprod": ([[2.0, 0.0, 3.0, 0.0, 1.0]], {}),
    "norm": ([[0.0, 0.0, 0.0]], {}), "leaky_relu": ([[-1.0, 0.0, 1.0]], {}), "elu": ([[-1.0, 0.0, 1.0]], {}),
    "sort": ([[2.0, 1.0, 2.0, 1.0]], {}), "floor": ([[0.0, 1.0, 1.5]], {}), "sign": ([[-1.0, 0.0, 1.0]], {}),
    "sinc": ([[0.0, 1.0, 0.5]], {}), "remainder": ([[3.0, -3.0, 2.5], [1.5, 1.5, -1.0]], {}),
    "hypot": ([[0.0, 3.0], [1.0, 4.0]], {}), "arctan2": ([[0.0, 1.0], [1.0, 0.0]], {}),
    "logaddexp": ([[0.0, 800.0, -800.0], [0.0, 0.0, 0.0]], {}), "softplus": ([[-50.0, 0.0, 15.0]], {}),
    "logsumexp": ([[1.0, 1.0, 1.0]], {}), "sigmoid": ([[-800.0, 0.0, 800.0]], {}),
    "gelu": ([[-50.0, -1.0, 0.0, 3.0]], {}), "std": ([[1.0, 2.0, 2.0]], {}),
    "fmod": ([[3.0, -3.0, 2.5], [1.5, 1.5, -1.0]], {}), "nan_to_num": ([[np.nan, np.inf, -np.inf, 1.0]], {}),
    "nansum": ([[np.nan, 1.0, 2.0]], {}), "nanmean": ([[np.nan, 1.0, 2.0]], {}),
    "l1_loss": ([[1.0, 2.0], [1.0, 3.0]], {}), "median": ([[3.0, 1.0, 2.0]], {}), "reciprocal": ([[0.5, -2.0]], {}),
    "binary_cross_entropy_with_logits": ([[-100.0, 0.0, 100.0], [0.0, 0.5, 1.0]], {}), "silu": ([[-100.0, 0.0, 100.0]], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(KINKS))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_slopes_at_kinks_and_ties_are_torchs(name: str):
    values, kwargs = KINKS[name]
    ours = [ag.tensor(v, requires_grad=True) for v in values]
    theirs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
    ours_kwargs = {{"low": "a_min", "high": "a_max"}.get(k, k): v for k, v in kwargs.items()}
    y, z = ag.OPS[name](*ours, **ours_kwargs), TORCH[name](*theirs, **kwargs)
    np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=1e-12, atol=1e-300)
    y.backward(np.ones(y.shape))
    z.backward(torch.ones_like(z))
    for x, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x.grad.data, t.grad.numpy(force=True), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("base", [0.0, 2.0, -2.0])
@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, 0.5])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_powers_at_zero_and_below_are_torchs(base: float, exponent: float):
    a, b = (ag.tensor([v], requires_grad=True) for v in (base, exponent))
    ta, tb = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (base, exponent))
    (a**b).sum().backward()
    (ta**tb).sum().backward()
    np.testing.assert_allclose(a.grad.data, ta.grad.numpy())
    np.testing.assert_allclose(b.grad.data, tb.grad.numpy())


# ── random shapes ───────────────────────────────────────────────────────────────────────────────


@st.composite
def broadcastable(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = draw(st.lists(st.integers(1, 4), max_size=4))
    shapes = []
    for _ in range(2):
        kept = [n if draw(st.booleans()) else 1 for n in full]
        shapes.append(tuple(kept[draw(st.integers(0, len(kept))) :]))
    return shapes[0], shapes[1]


@settings(max_examples=60, deadline=None)
@given(
    broadcastable(),
    st.sampled_from(["add", "subtract", "multiply", "divide", "maximum", "arctan2", "power", "logaddexp"]),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_broadcasting_and_promotion_equal_torchs(shapes, name, left, right):
    rng = np.random.default_rng(0)
    arrays = [
        rng.uniform(0.5, 2.0, shape).astype(d)
        for shape, d in zip(shapes, (left, right), strict=True)
    ]
    ours = [ag.tensor(a, requires_grad=True) for a in arrays]
    # numpy lets arrays without axes take part in promotion, torch does not
    theirs = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]
    common = torch.promote_types(theirs[0].dtype, theirs[1].dtype)
    y = ag.OPS[name](*ours)
    z = TORCH[name](*[t.to(common) for t in theirs])
    assert str(y.dtype) == str(z.dtype).removeprefix("torch.")
    np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=1e-5)
    y.backward(np.ones(y.shape, y.dtype))
    z.backward(torch.ones_like(z))
    for x, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x.grad.data, t.grad.numpy(), rtol=2e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=2), st.booleans(), st.booleans(),
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip
def test_matmul_of_any_stacks_equals_torchs(batch, left_plain, right_plain, n, k, m):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((*([] if left_plain else batch), n, k))
    b = rng.standard_normal((*([] if right_plain else batch), k, m))
    x, y = ag.tensor(a, requires_grad=True), ag.tensor(b, requires_grad=True)
    tx, ty = (torch.from_numpy(v.copy()).requires_grad_() for v in (a, b))
    found, expected = x @ y, tx @ ty
    weight = rng.standard_normal(found.shape)
    np.testing.assert_allclose(found.data, expected.detach().numpy())
    found.backward(weight)
    expected.backward(torch.from_numpy(weight))
    np.testing.assert_allclose(x.grad.data, tx.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(y.grad.data, ty.grad.numpy(), atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 2), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 2), st.integers(0, 2), st.integers(1, 2),
)  # fmt: skip
def test_convolution_equals_torchs(batch, groups, height, width, stride, padding, dilation):
    rng = np.random.default_rng(0)
    image = rng.standard_normal((batch, 2 * groups, 7, 6))
    kernel = rng.standard_normal((2 * groups, 2, height, width))
    bias = rng.standard_normal(2 * groups)
    ours = [ag.tensor(v, requires_grad=True) for v in (image, kernel, bias)]
    theirs = [torch.from_numpy(v.copy()).requires_grad_() for v in (image, kernel, bias)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = ag.conv2d(*ours, **options)
    z = torch.nn.functional.conv2d(*theirs, **options)
    weight = rng.standard_normal(y.shape)
    np.testing.assert_allclose(y.data, z.detach().numpy(), atol=1e-10)
    y.backward(weight)
    z.backward(torch.from_numpy(weight))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad.data, b.grad.numpy(), atol=1e-9)
