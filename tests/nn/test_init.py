"""First values."""

from __future__ import annotations

import math

import numpy as np
import pytest

import aiograd as ag


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_first_values_are_those_of_torch_and_can_be_repeated() -> None:
    layer = ag.nn.Linear(100, 400, generator=rng(3))
    again = ag.nn.Linear(100, 400, generator=rng(3))
    np.testing.assert_array_equal(layer.weight.numpy(), again.weight.numpy())
    np.testing.assert_array_equal(layer.bias.numpy(), again.bias.numpy())
    for values in (layer.weight.numpy(), layer.bias.numpy()):
        assert np.abs(values).max() <= 0.1
        assert np.abs(values).max() > 0.09
    conv = ag.nn.Conv2d(4, 8, 5, generator=rng(3))
    assert np.abs(conv.weight.numpy()).max() <= 1 / math.sqrt(100)
    assert ag.nn.Linear(2, 2, dtype=np.float32).weight.dtype == np.float32
    assert not np.array_equal(ag.nn.Linear(2, 2).weight.numpy(), ag.nn.Linear(2, 2).weight.numpy())


def test_initialisers_fill_in_place() -> None:
    init, t = ag.nn.init, ag.zeros(200, 300)
    assert init.zeros(init.ones(t)) is t
    assert (init.constant(t, 3.0).numpy() == 3).all()
    assert np.abs(init.xavier_uniform(t, generator=rng()).numpy()).max() <= math.sqrt(6 / 500)
    assert init.kaiming_normal(t, generator=rng()).numpy().std() == pytest.approx(
        math.sqrt(2 / 300), rel=0.02
    )
    assert init.normal(t, 5.0, 0.1, generator=rng()).numpy().mean() == pytest.approx(5, abs=0.01)
    with pytest.raises(ValueError, match="fan"):
        init.kaiming_uniform(ag.zeros(3))
