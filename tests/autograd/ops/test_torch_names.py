"""Names that torch users type: the same operations, recorded."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import aiograd as ag


def test_shapes_have_torchs_names():
    x = ag.randn(2, 3, 4, requires_grad=True)
    assert x.view(6, -1).shape == x.view((6, 4)).shape == (6, 4)
    assert x.permute(2, 0, 1).shape == x.permute((2, 0, 1)).shape == (4, 2, 3)
    assert x.unsqueeze(0).shape == x.unsqueeze(dim=0).shape == ag.unsqueeze(x, 0).shape
    assert x[0].t().shape == (4, 3)
    assert x[0, 0].t().shape == (4,)
    assert x.dim() == 3
    assert x[:1].squeeze(0).shape == x[:1].squeeze(dim=0).shape == (3, 4)
    total = (x.view(-1) * x.permute(2, 0, 1).permute(1, 2, 0).view(-1)).sum()
    total.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy())
    with pytest.raises(ValueError, match="at most two axes"):
        x.t()


def test_a_view_shares_memory_or_is_refused():
    x = ag.zeros(2, 3)
    x.view(6)[4] = 1.0
    assert x.numpy()[1, 1] == 1
    with pytest.raises(ValueError, match=r"use reshape\(\)"):
        x.t().view(6)
    assert ag.zeros(0, 3).view(3, 0).shape == (3, 0)


def test_size_is_a_number_and_can_be_called():
    x = ag.zeros(2, 3)
    assert x.size == 6
    assert isinstance(x.size, int)
    assert x.size() == (2, 3)
    assert x.size(0) == 2
    assert x.size(-1) == x.size(dim=1) == 3
    assert x.size + 1 == 7
    assert {6: "six"}[x.size] == "six"
    assert json.dumps(x.size) == "6"
    assert type(pickle.loads(pickle.dumps(x.size))) is int
    assert f"{x.size}" == repr(x.size) == "6"
    assert ag.sparse.coo_tensor([[0], [1]], [1.0], (2, 3)).size() == (2, 3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("half", ag.float16), ("float", ag.float32), ("double", ag.float64),
        ("int", ag.int32), ("long", ag.int64), ("bool", ag.bool_),
    ],
)  # fmt: skip
def test_conversions(name, dtype):
    x = ag.tensor([1.0, 0.0])
    y = getattr(x, name)()
    assert y.dtype == dtype == x.to(dtype).dtype
    assert getattr(y, name)() is y


def test_conversions_are_recorded():
    x = ag.ones(2, requires_grad=True)
    (x.float() * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert x.grad.dtype == ag.float64
    assert x.to("cpu") is x
    assert x.to(ag.ones(1).float()).dtype == ag.float32
    with pytest.raises(TypeError, match="'cuda'"):
        x.to("cuda")


def test_dtypes_are_numpys():
    assert ag.float32 is np.float32
    assert ag.zeros(2, dtype=ag.int64).dtype == ag.int64
    assert {"float16", "uint8", "complex64"} <= set(dir(ag))


def test_a_model_is_converted_by_to():
    model = ag.nn.Sequential(ag.nn.Linear(2, 3), ag.nn.BatchNorm1d(3))
    assert model.to(ag.float32) is model
    assert {p.dtype for p in model.parameters()} == {np.dtype("float32")}
    assert model.to("cpu") is model
