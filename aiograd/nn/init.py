"""First values of parameters. Each function fills a tensor in place and returns it.

`generator` is a numpy Generator; without one, numbers come from where `ag.manual_seed` says.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.autograd.grad_mode import no_grad
from aiograd.autograd.random import generator_or_default
from aiograd.autograd.tensor import Tensor


def _fill(tensor: Tensor, value: Any) -> Tensor:
    """Overwrite a tensor, which may be a leaf that requires grad."""
    # A recorded write into a leaf is refused.
    with no_grad():
        tensor[...] = value
    return tensor


def fans(tensor: Tensor) -> tuple[int, int]:
    """Return how many inputs and outputs one entry of a weight connects: (fan_in, fan_out)."""
    # A bias connects nothing; torch refuses it too.
    if tensor.ndim < 2:
        raise ValueError(f"a tensor of shape {tensor.shape} has no fan in and fan out")
    # A kernel connects each output to all of its elements in every input channel.
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def zeros(tensor: Tensor) -> Tensor:
    """Fill with 0."""
    return _fill(tensor, 0)


def ones(tensor: Tensor) -> Tensor:
    """Fill with 1."""
    return _fill(tensor, 1)


def constant(tensor: Tensor, value: float) -> Tensor:
    """Fill with one value."""
    return _fill(tensor, value)


def uniform(
    tensor: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: np.random.Generator | None = None,
) -> Tensor:
    """Numbers between `low` and `high`, all equally likely."""
    return _fill(tensor, generator_or_default(generator).uniform(low, high, tensor.shape))


def normal(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: np.random.Generator | None = None,
) -> Tensor:
    """Normally distributed numbers."""
    return _fill(tensor, generator_or_default(generator).normal(mean, std, tensor.shape))


def xavier_uniform(
    tensor: Tensor, gain: float = 1.0, *, generator: np.random.Generator | None = None
) -> Tensor:
    """Glorot and Bengio: keep the size of signals forward and of gradients backward."""
    bound = gain * math.sqrt(6.0 / sum(fans(tensor)))
    return uniform(tensor, -bound, bound, generator=generator)


def kaiming_uniform(
    tensor: Tensor, a: float = 0.0, *, generator: np.random.Generator | None = None
) -> Tensor:
    """He et al.: keep the size of signals through rectifiers with slope `a` below zero."""
    # Uniform numbers within ±b have variance b²/3, hence 6 where the normal one has 2.
    bound = math.sqrt(6.0 / ((1 + a * a) * fans(tensor)[0]))
    return uniform(tensor, -bound, bound, generator=generator)


def kaiming_normal(
    tensor: Tensor, a: float = 0.0, *, generator: np.random.Generator | None = None
) -> Tensor:
    """The same with normally distributed numbers."""
    std = math.sqrt(2.0 / ((1 + a * a) * fans(tensor)[0]))
    return normal(tensor, 0.0, std, generator=generator)
