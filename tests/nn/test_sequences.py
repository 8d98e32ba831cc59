"""Layers over sequences: shapes, refusals, and gradients across workers and orders.

`tests/oracle/test_sequences.py` compares their numbers with torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.testing import gradcheck, gradgradcheck


@pytest.mark.parametrize("layer", [ag.nn.LSTM(2, 2), ag.nn.GRU(2, 2)])
def test_a_recurrent_layer_has_gradients_of_first_and_second_order(layer: Any) -> None:
    x = ag.randn(3, 1, 2, requires_grad=True, generator=0)
    assert gradcheck(lambda x: layer(x)[0], [x])
    assert gradgradcheck(lambda x: layer(x)[0].sum(), [x], atol=1e-4)


def test_attention_has_gradients_of_first_and_second_order() -> None:
    layer = ag.nn.MultiheadAttention(4, 2)
    x = ag.randn(3, 1, 4, requires_grad=True, generator=0)
    assert gradcheck(lambda x: layer(x, x, x)[0], [x])
    assert gradgradcheck(lambda x: layer(x, x, x)[0].sum(), [x], atol=1e-4)


def test_a_sequence_goes_on_from_the_state_where_its_first_half_ended() -> None:
    for layer in (ag.nn.LSTM(3, 4, num_layers=2), ag.nn.GRU(3, 4, num_layers=2)):
        x = ag.randn(6, 2, 3)
        whole, _ = layer(x)
        first, state = layer(x[:2])
        rest, _ = layer(x[2:], state)
        np.testing.assert_allclose(whole.numpy(), np.concatenate([first.numpy(), rest.numpy()]))


def test_what_does_not_fit_is_refused_where_it_is_given() -> None:
    lstm = ag.nn.LSTM(3, 4)
    with pytest.raises(ValueError, match="sequences of 3 features"):
        lstm(np.ones((5, 2, 2)))
    with pytest.raises(ValueError, match="first state"):
        lstm(np.ones((5, 2, 3)), (np.ones((1, 2, 5)), np.ones((1, 2, 4))))
    with pytest.raises(ValueError, match="at least one step"):
        lstm(np.ones((0, 2, 3)))
    with pytest.raises(ValueError, match="heads"):
        ag.nn.MultiheadAttention(7, 2)
    with pytest.raises(ValueError, match="dropout"):
        ag.nn.GRU(3, 4, dropout=2.0)


def test_dropout_lies_between_layers_and_in_attention_while_training() -> None:
    x = ag.randn(5, 2, 3)
    gru = ag.nn.GRU(3, 4, num_layers=2, dropout=0.5)
    assert (gru(x)[0].numpy() != gru(x)[0].numpy()).any()
    gru.eval()
    np.testing.assert_array_equal(gru(x)[0].numpy(), gru(x)[0].numpy())
    attention = ag.nn.MultiheadAttention(4, 2, dropout=0.5)
    y = ag.randn(5, 2, 4)
    assert (attention(y, y, y)[0].numpy() != attention(y, y, y)[0].numpy()).any()


def test_causal_attention_does_not_look_ahead() -> None:
    attention = ag.nn.MultiheadAttention(4, 2, batch_first=True)
    x = ag.randn(1, 5, 4)
    _, weights = attention(x, x, x, is_causal=True)
    assert weights is not None
    assert (np.triu(weights.numpy()[0], 1) == 0).all()
    output, none = attention(x, x, x, need_weights=False)
    assert none is None
    assert output.shape == (1, 5, 4)


async def test_an_lstm_on_another_worker_gets_its_gradients() -> None:
    async with ag.LocalCluster(1, processes=False), ag.context() as ctx:
        lstm = ag.nn.RemoteModule("worker0", ag.nn.LSTM, args=(3, 4))
        x = ag.randn(5, 2, 3, requires_grad=True)
        output, _ = await lstm(x)
        await ctx.backward((output * output).sum())
        assert ctx.gradients[x].shape == (5, 2, 3)
