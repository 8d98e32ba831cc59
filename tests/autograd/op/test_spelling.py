"""torch's names for parameters: the same results as numpy's, or an error that says why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag

X = np.random.default_rng(0).normal(size=(3, 4))


@pytest.mark.parametrize(
    ("name", "torchs", "numpys"),
    [
        ("sum", {"dim": 0, "keepdim": True}, {"axis": 0, "keepdims": True}),
        ("mean", {"dim": (0, 1)}, {"axis": (0, 1)}),
        ("prod", {"dim": -1}, {"axis": -1}),
        ("cumsum", {"dim": 1}, {"axis": 1}),
        ("logsumexp", {"dim": 1, "keepdim": True}, {"axis": 1, "keepdims": True}),
        ("softmax", {"dim": 0}, {"axis": 0}),
        ("log_softmax", {"dim": 0}, {"axis": 0}),
        ("argmax", {"dim": 1}, {"axis": 1}),
        ("amax", {"dim": 1, "keepdim": True}, {"axis": 1, "keepdims": True}),
        ("nanmean", {"dim": 0}, {"axis": 0}),
        ("diff", {"dim": 0}, {"axis": 0}),
        ("flip", {"dims": (0,)}, {"axis": (0,)}),
        ("expand_dims", {"dim": 1}, {"axis": 1}),
        ("unsqueeze", {"dim": 1}, {"axis": 1}),
        ("permute", {"dims": (1, 0)}, {"axes": (1, 0)}),
        ("rot90", {"dims": (1, 0)}, {"axes": (1, 0)}),
    ],
)
def test_dim_is_axis(name: str, torchs: dict[str, Any], numpys: dict[str, Any]) -> None:
    function = getattr(ag, name)
    np.testing.assert_array_equal(function(X, **torchs).numpy(), function(X, **numpys).numpy())
    t = ag.tensor(X, requires_grad=True)
    found = function(t, **torchs)
    assert found.requires_grad == function(t, **numpys).requires_grad


def test_joining_takes_dim() -> None:
    assert ag.cat([X, X], dim=1).shape == (3, 8)
    assert ag.stack([X, X], dim=2).shape == (3, 4, 2)
    assert ag.tensor(X).sum(dim=0).shape == (4,)
    assert ag.tensordot(X, X.T, dims=1).shape == (3, 3)


@pytest.mark.parametrize("name", ["max", "min", "median", "sort", "std", "var"])
def test_where_torch_means_something_else_its_spelling_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) does not take dim=: in torch"):
        getattr(ag, name)(ag.tensor(X), dim=0)
    with pytest.raises(TypeError, match="the number of pieces"):
        ag.split(X, 2, dim=1)


def test_both_spellings_at_once_are_refused() -> None:
    with pytest.raises(TypeError, match="two values for 'axis'"):
        ag.tensor(X).sum(dim=0, axis=0)
    with pytest.raises(TypeError, match="two values for 'axis'"):
        ag.nanmean(X, dim=0, axis=0)


def test_an_unknown_parameter_is_still_unknown() -> None:
    with pytest.raises(TypeError, match="dimension"):
        ag.tensor(X).sum(dimension=0)
    with pytest.raises(TypeError):
        ag.tanh(X, dim=0)


def test_out_gets_the_result() -> None:
    out = ag.zeros(4)
    assert ag.sum(X, dim=0, out=out) is out
    np.testing.assert_array_equal(out.numpy(), X.sum(0))
