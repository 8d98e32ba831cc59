"""aiograd, written as a user would."""

from __future__ import annotations

from typing import Any

import common
import numpy as np
import numpy_local
from common import BLOCKS, CHAIN, MLP, SMALL, TOKENS, WIDTH, X, Y

import aiograd as ag

leaf, constant = ag.tensor(SMALL, requires_grad=True), ag.tensor(SMALL)


def chain() -> None:
    leaf.grad = None
    x = leaf
    for _ in range(CHAIN):
        x = x + constant
    x.sum().backward()


def mlp_step(x: Any, y: Any, params: list[Any]) -> None:
    for param in params:
        param.grad = None
    for number in range(0, len(params), 2):
        x = x @ params[number] + params[number + 1]
        if number + 2 < len(params):
            x = ag.relu(x)
    loss = -(y * (x - ag.logsumexp(x, axis=1, keepdims=True))).sum() / len(y)
    loss.backward()


tokens = ag.tensor(TOKENS.reshape(-1, WIDTH))
blocks = [[ag.tensor(w, requires_grad=True) for w in block] for block in BLOCKS]


def transformer() -> None:
    x = tokens
    for block in blocks:
        for w in block:
            w.grad = None
        wq, wk, wv, wo, up, down = block
        q, k, v = ((x @ w).reshape(TOKENS.shape) for w in (wq, wk, wv))
        h = ag.nn.functional.scaled_dot_product_attention(q, k, v)
        m = h.reshape(-1, WIDTH) @ wo + x
        x = ag.relu(m @ up) @ down + m
    (x * x).mean().backward()


def memory() -> Any:
    x, y, params = common.wide_mlp()
    tensors = [ag.tensor(param, requires_grad=True) for param in params]
    tx, ty = ag.tensor(x), ag.tensor(y)
    return lambda: mlp_step(tx, ty, tensors)


def check() -> None:
    """The gradients are those written by hand."""
    mlp_step(tx, ty, params)
    for param, expected in zip(params, numpy_local.mlp_gradients(X, Y, MLP), strict=True):
        np.testing.assert_allclose(param.grad.numpy(), expected, rtol=1e-3, atol=1e-6)
    transformer()
    for block, grads in zip(blocks, numpy_local.transformer(), strict=True):
        for w, expected in zip(block, grads, strict=True):
            np.testing.assert_allclose(w.grad.numpy(), expected, rtol=1e-2, atol=1e-6)


if __name__ == "__main__":
    params = [ag.tensor(param, requires_grad=True) for param in MLP]
    tx, ty = ag.tensor(X), ag.tensor(Y)
    check()
    common.measure("aiograd", chain, lambda: mlp_step(tx, ty, params), transformer, memory)
