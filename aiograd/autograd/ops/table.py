"""Where a declared operation is found: by name, as a numpy ufunc or function, as a method."""

from __future__ import annotations

from typing import Any

from aiograd.autograd.op import OPS, Op, Rule, op

NUMPY: dict[Any, Any] = {}  # numpy ufunc or function → what to call when a Tensor is involved


def numpy_op(function: Any, *rules: Rule | None, **options: Any) -> Op:
    """Declare the operation that a numpy function of the same name stands for."""
    made = op(function.__name__, function, *rules, **options)
    NUMPY[function] = made
    OPS[made.name] = made
    return made
