"""HIPS autograd on numpy."""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
import common
from autograd import grad
from common import CHAIN, MLP, SMALL, X, Y


def chain(x: Any) -> Any:
    for _ in range(CHAIN):
        x = x + SMALL
    return np.sum(x)


def mlp(params: list[Any], x: Any = X, y: Any = Y) -> Any:
    for number in range(0, len(params), 2):
        x = np.dot(x, params[number]) + params[number + 1]
        if number + 2 < len(params):
            x = np.maximum(x, 0)
    top = np.max(x, axis=1, keepdims=True)
    total = top + np.log(np.sum(np.exp(x - top), axis=1, keepdims=True))
    return -np.sum(y * (x - total)) / len(y)


def memory() -> Any:
    x, y, params = common.wide_mlp()
    step = grad(mlp)
    return lambda: step(params, x, y)


if __name__ == "__main__":
    chain_step, mlp_step = grad(chain), grad(mlp)
    common.measure("hips", lambda: chain_step(SMALL), lambda: mlp_step(MLP), None, memory)
