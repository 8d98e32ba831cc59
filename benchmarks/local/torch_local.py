"""torch, eager, on the CPU."""

from __future__ import annotations

from typing import Any

import common
import torch
from common import BLOCKS, CHAIN, MLP, SMALL, TOKENS, WIDTH, X, Y

torch.set_num_threads(1)
leaf, constant = torch.tensor(SMALL, requires_grad=True), torch.tensor(SMALL)


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
            x = torch.relu(x)
    loss = -(y * (x - torch.logsumexp(x, 1, keepdim=True))).sum() / len(y)
    loss.backward()


tokens = torch.tensor(TOKENS.reshape(-1, WIDTH))
blocks = [[torch.tensor(w, requires_grad=True) for w in block] for block in BLOCKS]


def transformer() -> None:
    x = tokens
    for block in blocks:
        for w in block:
            w.grad = None
        wq, wk, wv, wo, up, down = block
        q, k, v = ((x @ w).reshape(TOKENS.shape) for w in (wq, wk, wv))
        h = torch.softmax(q @ k.mT * WIDTH**-0.5, -1) @ v
        m = h.reshape(-1, WIDTH) @ wo + x
        x = torch.relu(m @ up) @ down + m
    (x * x).mean().backward()


def memory() -> Any:
    x, y, params = common.wide_mlp()
    tensors = [torch.tensor(param, requires_grad=True) for param in params]
    tx, ty = torch.tensor(x), torch.tensor(y)
    return lambda: mlp_step(tx, ty, tensors)


if __name__ == "__main__":
    params = [torch.tensor(param, requires_grad=True) for param in MLP]
    tx, ty = torch.tensor(X), torch.tensor(Y)
    common.measure("torch", chain, lambda: mlp_step(tx, ty, params), transformer, memory)
