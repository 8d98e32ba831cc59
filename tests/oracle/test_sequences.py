"""Layers over sequences, with torch's own parameters loaded into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import aiograd as ag

pytestmark = pytest.mark.oracle


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The layer here and there, with the same parameters under the same names."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(*args, **kwargs).double()
    mine = getattr(ag.nn, name)(*args, **kwargs)
    mine.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    return mine, theirs


def assert_equal(mine: Any, theirs: Any, run: Any, inputs: list[np.ndarray]) -> None:
    """Results, and gradients of inputs and parameters."""
    ours = [ag.tensor(x, requires_grad=True) for x in inputs]
    references = [torch.tensor(x, requires_grad=True) for x in inputs]
    found, expected = run(mine, *ours), run(theirs, *references)
    assert len(found) == len(expected)
    total, goal = ag.tensor(0.0), torch.tensor(0.0, dtype=torch.float64)
    for i, (y, z) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(y.numpy(), z.detach().numpy(), atol=1e-12)
        weight = np.random.default_rng(i).normal(size=y.shape)
        total, goal = total + (y * weight).sum(), goal + (z * torch.tensor(weight)).sum()
    total.backward()
    goal.backward()
    for x, reference in zip(ours, references, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), reference.grad.numpy(), atol=1e-12)
    for (name, p), (other, q) in zip(
        mine.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), atol=1e-11, err_msg=name)


SETTINGS = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bidirectional": True, "bias": False},
    {"num_layers": 3, "bidirectional": True, "batch_first": True},
]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("first", [False, True])
def test_an_lstm_equals_torchs(settings: dict[str, Any], first: bool) -> None:
    mine, theirs = pair("LSTM", 3, 4, **settings)
    x = draw(2, 5, 3) if settings.get("batch_first") else draw(5, 2, 3)
    count = settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1)

    def run(layer: Any, x: Any, *state: Any) -> Any:
        output, (h, c) = layer(x, state) if state else layer(x)
        return output, h, c

    states = [draw(count, 2, 4, seed=1), draw(count, 2, 4, seed=2)] if first else []
    assert_equal(mine, theirs, run, [x, *states])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("first", [False, True])
def test_a_gru_equals_torchs(settings: dict[str, Any], first: bool) -> None:
    mine, theirs = pair("GRU", 3, 4, **settings)
    x = draw(2, 5, 3) if settings.get("batch_first") else draw(5, 2, 3)
    count = settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1)
    states = [draw(count, 2, 4, seed=1)] if first else []
    assert_equal(mine, theirs, lambda layer, *args: layer(*args), [x, *states])


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_one_sequence_without_a_batch_equals_torchs(name: str) -> None:
    mine, theirs = pair(name, 3, 4, num_layers=2)

    def run(layer: Any, x: Any) -> Any:
        output, state = layer(x)
        return (output, *state) if isinstance(state, tuple) else (output, state)

    assert_equal(mine, theirs, run, [draw(5, 3)])


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_first": True}, {"bias": False}, {"kdim": 5, "vdim": 3, "batch_first": True}],
)
@pytest.mark.parametrize("average", [True, False])
def test_attention_equals_torchs(settings: dict[str, Any], average: bool) -> None:
    mine, theirs = pair("MultiheadAttention", 8, 2, **settings)
    q, k, v = (
        draw(2, 4, 8),
        draw(2, 6, settings.get("kdim", 8), seed=1),
        draw(2, 6, settings.get("vdim", 8), seed=2),
    )
    if not settings.get("batch_first"):
        q, k, v = [np.swapaxes(x, 0, 1).copy() for x in (q, k, v)]
    run = lambda layer, *args: layer(*args, average_attn_weights=average)  # noqa: E731
    assert_equal(mine, theirs, run, [q, k, v])


@pytest.mark.parametrize("kind", ["bool", "float", "per head", "padding", "causal", "lone"])
def test_masks_of_attention_are_torchs(kind: str) -> None:
    mine, theirs = pair("MultiheadAttention", 8, 2, batch_first=True)
    x = draw(3, 5, 8)
    masks: dict[str, Any] = {
        "bool": {"attn_mask": np.triu(np.ones((5, 5), bool), 1)},
        "float": {"attn_mask": draw(5, 5, seed=1)},
        "per head": {"attn_mask": draw(6, 5, 5, seed=1)},
        "padding": {"key_padding_mask": np.arange(5) >= np.array([[5], [3], [4]])},
        "causal": {"attn_mask": np.triu(np.ones((5, 5), bool), 1), "is_causal": True},
        "lone": {"attn_mask": np.triu(np.ones((5, 5), bool), 1)},
    }

    def run(layer: Any, x: Any) -> Any:
        options = masks[kind]
        if isinstance(layer, torch.nn.Module):
            options = {k: torch.tensor(v) if k != "is_causal" else v for k, v in options.items()}
        return layer(x, x, x, **options)

    assert_equal(mine, theirs, run, [x[0] if kind == "lone" else x])


@pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2}, {"padding": "same"}]
)
def test_a_convolution_of_sequences_equals_torchs(settings: dict[str, Any]) -> None:
    mine, theirs = pair("Conv1d", 2, 4, 3, **settings)
    assert_equal(mine, theirs, lambda layer, x: (layer(x),), [draw(3, 2, 9)])
    assert_equal(*pair("Conv1d", 2, 4, 3, **settings), lambda layer, x: (layer(x),), [draw(2, 9)])
