"""The limit: the same arithmetic in numpy, with gradients written by hand."""

from __future__ import annotations

import common
import numpy as np
from common import BATCH, BLOCKS, CHAIN, LENGTH, MLP, SEQUENCES, SMALL, TOKENS, WIDTH, X, Y


def chain() -> np.ndarray:
    x = SMALL
    for _ in range(CHAIN):
        x = x + SMALL
    return np.ones_like(x)


def mlp_gradients(x: np.ndarray, y: np.ndarray, params: list[np.ndarray]) -> list[np.ndarray]:
    inputs, grads = [x], []
    for number in range(0, len(params), 2):
        z = inputs[-1] @ params[number]
        z += params[number + 1]
        if number + 2 < len(params):
            np.maximum(z, 0, out=z)
        inputs.append(z)
    z = inputs.pop()
    z -= z.max(axis=1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(axis=1, keepdims=True)
    z -= y
    z /= len(x)
    for number in range(len(params) - 2, -1, -2):
        h = inputs.pop()
        grads += [z.sum(axis=0), h.T @ z]
        if number:
            z = z @ params[number].T
            z *= h > 0
    return grads[::-1]


def transformer() -> list[list[np.ndarray]]:
    """Attention with one head and a ReLU network per layer, both with a residual."""
    scale = np.float32(WIDTH**-0.5)
    flat = (SEQUENCES * LENGTH, WIDTH)
    x, kept = TOKENS.reshape(flat), []
    for wq, wk, wv, wo, up, down in BLOCKS:
        q, k, v = ((x @ w).reshape(TOKENS.shape) for w in (wq, wk, wv))
        a = q @ k.swapaxes(1, 2)
        a *= scale
        a -= a.max(axis=-1, keepdims=True)
        np.exp(a, out=a)
        a /= a.sum(axis=-1, keepdims=True)
        h = (a @ v).reshape(flat)
        m = h @ wo
        m += x
        u = m @ up
        np.maximum(u, 0, out=u)
        kept.append((x, q, k, v, a, h, m, u))
        x = u @ down
        x += m
    g = np.full(flat, 2 / x.size, np.float32)
    g *= x
    grads = []
    for (wq, wk, wv, wo, up, down), (x, q, k, v, a, h, m, u) in zip(
        BLOCKS[::-1], kept[::-1], strict=True
    ):
        d_down = u.T @ g
        du = g @ down.T
        du *= u > 0
        d_up = m.T @ du
        g += du @ up.T
        d_out = h.T @ g
        dh = (g @ wo.T).reshape(TOKENS.shape)
        dv = (a.swapaxes(1, 2) @ dh).reshape(flat)
        da = dh @ v.swapaxes(1, 2)
        da *= a
        da -= a * da.sum(axis=-1, keepdims=True)
        da *= scale
        dq, dk = (da @ k).reshape(flat), (da.swapaxes(1, 2) @ q).reshape(flat)
        grads.append([x.T @ dq, x.T @ dk, x.T @ dv, d_out, d_up, d_down])
        g += dq @ wq.T
        g += dk @ wk.T
        g += dv @ wv.T
    return grads[::-1]


def memory() -> object:
    x, y, params = common.wide_mlp()
    return lambda: mlp_gradients(x, y, params)


if __name__ == "__main__":
    assert len(X) == BATCH
    common.measure("numpy", chain, lambda: mlp_gradients(X, Y, MLP), transformer, memory)
