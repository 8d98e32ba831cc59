"""Operations as operators and methods of Tensor.

`a + b` on small arrays costs about as much as numpy itself, so the way through here is short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.autograd.grad_mode import recording
from aiograd.autograd.op import Op
from aiograd.autograd.op_nodes import LightNode, record
from aiograd.autograd.tensor import Tensor, requires_grad, wrap
from aiograd.errors import GradError

_ndarray = np.ndarray
_NO_PARAMETERS: dict[str, Any] = {}

_OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "power": "pow",
    "floor_divide": "floordiv", "remainder": "mod", "matmul": "matmul",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "left_shift": "lshift", "right_shift": "rshift",
}  # fmt: skip
_COMPARISONS = {
    "equal": "__eq__", "not_equal": "__ne__", "less": "__lt__", "less_equal": "__le__",
    "greater": "__gt__", "greater_equal": "__ge__",
}  # fmt: skip
_UNARY = {
    "negative": "__neg__", "positive": "__pos__", "absolute": "__abs__", "invert": "__invert__",
}  # fmt: skip


def attach_operators(name: str, made: Op) -> None:
    """Give Tensor the operators that a numpy ufunc stands for: `+`, its mirror image and `+=`."""
    if name in _OPERATORS:
        short = _OPERATORS[name]
        setattr(Tensor, f"__{short}__", binary(made))
        setattr(Tensor, f"__r{short}__", _reflected(made))
        setattr(Tensor, f"__i{short}__", _in_place(made))
    elif name in _COMPARISONS:
        setattr(Tensor, _COMPARISONS[name], _comparison(made))
    elif name in _UNARY:
        setattr(Tensor, _UNARY[name], lambda self: made.apply((self,), {}))


def as_method(made: Callable[..., Any]) -> Callable[..., Any]:
    """The operation as a method: its first array is `self`."""

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return made(self, *args, **kwargs)

    method.__name__ = method.__qualname__ = made.__name__
    method.__doc__ = made.__doc__
    return method


def _reflected(made: Op) -> Callable[[Tensor, Any], Any]:
    def operator(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        return made.apply((other, self), {})

    return operator


def _comparison(made: Op) -> Callable[[Tensor, Any], Any]:
    def operator(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        return made.apply((self, other), {})

    return operator


def _in_place(made: Op) -> Callable[[Tensor, Any], Tensor]:
    def operator(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        tracked = self.requires_grad or requires_grad(other)
        if tracked and recording.get():
            if self._leaf:
                raise GradError(
                    f"a leaf that requires grad cannot be changed in place ({made.name}); "
                    "write `x = x + …`, or wrap the change in `with ag.no_grad():`",
                    "inplace",
                )
            return made(self, other)  # a new tensor; the name on the left is bound to it
        value = other.data if isinstance(other, Tensor) else other
        if self.data.__class__ is np.ndarray:
            made.forward(self.data, value, out=self.data)
        else:
            self.data = made.forward(self.data, value)
        self._written()
        return self

    return operator


def binary(op: Op) -> Callable[[Tensor, Any], Any]:
    """The operation as an operator method: the same as calling it, with the common case unrolled.

    `a + b` on small arrays costs about as much as numpy itself, so every step here counts.
    """
    forward, new, dense = op.forward, object.__new__, _ndarray

    def operator(a: Tensor, b: Any) -> Any:
        if isinstance(b, Tensor):
            y = forward(a.data, b.data)
            second = b._node
            if second is None and b._leaf:
                second = b.accumulator()
        elif b is None or isinstance(b, str):
            return NotImplemented
        elif b.__class__ is list or b.__class__ is tuple:
            return op.apply((a, b), {})
        else:
            y = forward(a.data, b)
            second = None
        first = a._node
        if first is None and a._leaf:
            first = a.accumulator()
        if (first is None and second is None) or not recording.get():
            return y if y is NotImplemented else wrap(y)
        if y.__class__ is not dense or op.saves:
            if y is NotImplemented:
                return y
            return record(op, (a, b), y, _NO_PARAMETERS, (first, second))
        node = new(LightNode)
        node.op = op
        node.parents = (first, second)
        node.hooks = None
        node.shape = y.shape
        node.dtype = y.dtype
        tensor = new(Tensor)
        tensor.data = y
        tensor._node = node
        tensor._leaf = False
        tensor._grad = tensor._cell = tensor._accumulate = None
        tensor._hooks = tensor._after_hooks = None
        return tensor

    operator.__name__ = op.name
    return operator


setattr(Tensor, "__divmod__", lambda a, b: (a // b, a % b))  # noqa: B010  attached, like the others
setattr(Tensor, "__rdivmod__", lambda b, a: (a // b, a % b))  # noqa: B010
