"""Limit gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.autograd.tensor import Tensor


def clip_grad_norm(
    params: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    grads: Mapping[Tensor, Tensor] | None = None,
) -> float:
    """Scale all gradients together so that their norm is at most `max_norm`; return the old norm.

    They are those in `grads` where it is given (as from `ctx.gradients`), else `.grad`.

        >>> w = ag.nn.Parameter([3.0, 4.0])
        >>> (w * w / 2).sum().backward()
        >>> norm = ag.optim.clip_grad_norm([w], 1.0)
        >>> round(float(norm), 3), w.grad.numpy().round(3).tolist()
        (5.0, [0.6, 0.8])
    """
    found = _gradients(params, grads)
    total = gradient_norm(found, norm_type)
    # torch's constant, against a norm of zero.
    scale = max_norm / (total + 1e-6)
    # Gradients within the limit are left untouched, to the last bit.
    if scale < 1:
        scale_gradients(found, scale)
    return total


def clip_grad_value(
    params: Tensor | Iterable[Tensor],
    clip_value: float,
    *,
    grads: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Cut every entry of the gradients to at most `clip_value` in size.

    >>> w = ag.nn.Parameter([3.0, -4.0])
    >>> (w * w / 2).sum().backward()
    >>> ag.optim.clip_grad_value([w], 1.0)
    >>> w.grad.tolist()
    [1.0, -1.0]
    """
    for grad in _gradients(params, grads):
        _replace(grad, np.clip(_entries(grad), -clip_value, clip_value))


def gradient_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> float:
    """Return the norm of all gradients taken as one vector."""
    sizes = [np.abs(_entries(grad)) for grad in grads]
    # The largest entry; the general formula would raise to an infinite power.
    if math.isinf(norm_type):
        return max((float(size.max(initial=0.0)) for size in sizes), default=0.0)
    if norm_type == 2.0:
        # Squares add up over gradients, and over owners (`owned.squared_norm`).
        return math.sqrt(sum(float(np.vdot(size, size)) for size in sizes))
    return float(sum(float((size**norm_type).sum()) for size in sizes) ** (1 / norm_type))


def scale_gradients(grads: Iterable[Tensor], scale: float) -> None:
    """Multiply gradients by a number, in place."""
    for grad in grads:
        _replace(grad, _entries(grad) * float(scale))


def _gradients(
    params: Tensor | Iterable[Tensor], grads: Mapping[Tensor, Tensor] | None
) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    found = [param.grad if grads is None else grads.get(param) for param in listed]
    return [grad for grad in found if grad is not None]


def _entries(grad: Tensor) -> Any:
    """Return the numbers of a gradient, of a sparse one those that are stored."""
    # Coalesced, since a position stored in two parts is one number.
    return grad.raw.coalesce().values if isinstance(grad.raw, Coo) else grad.raw


def _replace(grad: Tensor, entries: Any) -> None:
    """Put other numbers into a gradient, in place where it is dense."""
    if isinstance(grad.raw, Coo):
        grad.raw = grad.raw.coalesce().with_values(entries)
    else:
        grad.raw[...] = entries
    # A graph made with create_graph may have saved it.
    grad._written()
