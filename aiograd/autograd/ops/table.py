"""Where a declared operation is found: by name, through numpy, as a method or operator of Tensor.

One declaration serves all of them:

    tanh = numpy_op(np.tanh, lambda g, y, a: g * conj(1 - y * y))

gives `ag.tanh`, `np.tanh(t)`, `OPS["tanh"]` for other workers, and the gradient; `t.sum()` and
`t + 1` too, because ndarray has them. `new_op` declares one that numpy does not have, and
`composite` a function made of other operations, which needs no rule of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from aiograd.autograd.grad_mode import recording
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import OPS, Op, op, stacked
from aiograd.autograd.op.nodes import LightNode, record
from aiograd.autograd.op.rules import Rule
from aiograd.autograd.op.signatures import MethodOf
from aiograd.autograd.op.spelling import accepts_dim
from aiograd.autograd.ops.zero_stride import shown
from aiograd.autograd.tensor import Tensor, requires_grad, wrap
from aiograd.errors import GradError

_ndarray = np.ndarray

F = TypeVar("F", bound=Callable[..., Any])

NUMPY: dict[Any, Callable[..., Any]] = {}  # numpy ufunc or function → what a Tensor calls instead
ALIASES: dict[str, str] = {}  # further names of operations → their own

# Up to this many elements, filling an array takes less time than numpy needs for a view with
# strides of zero.
SMALL = 16384


def numpy_op(
    function: Any,
    *rules: Rule | None,
    forward: Any = None,
    arrays: int = 0,
    signature: Any = None,
    **options: Any,
) -> Op:
    """Declare the operation that a numpy function of the same name stands for.

    The first arguments, one per rule, are the arrays; numpy's own signature names the rest, or
    `signature` where the names differ between versions of numpy.
    """
    # An operation that arranges its arguments itself cannot use the short way of `Op.__call__`.
    own = "arrange" in options
    if not own:
        if isinstance(function, np.ufunc):
            options["arrange"] = _ufunc_arguments(function)
        else:
            # Read from numpy, so that calls may name any parameter and get numpy's own order.
            names = tuple(inspect.signature(signature or function).parameters)
            options["arrange"] = _by_names(function.__name__, names, arrays or len(rules) or 1)
    made = op(function.__name__, forward or function, *rules, **options)
    # help(ag.tanh) is numpy's text.
    made.__doc__ = function.__doc__
    if not own:
        made.source = signature or function
        made.arity = function.nin if isinstance(function, np.ufunc) else arrays or len(rules)
        made.strict = isinstance(function, np.ufunc)
    _register(made, function)
    return made


def new_op(name: str, forward: Any, *rules: Rule | None, **options: Any) -> Op:
    """Declare an operation that numpy does not have."""
    own = "arrange" in options
    if not own:
        names = tuple(inspect.signature(forward).parameters)
        options["arrange"] = _by_names(name, names, len(rules) or 1)
    made = op(name, forward, *rules, **options)
    if not own:
        made.source = forward
        made.arity, made.strict = len(rules) or 1, False
    _register(made, None)
    return made


def composite(function: Any = None) -> Callable[[F], F]:
    """Register a function made of other operations, for the numpy function it stands for."""

    def register(made: F) -> F:
        """Register the function; it takes torch's spelling of `axis`, too."""
        made = accepts_dim(made)
        # The name under which workers send it, as that of an Op.
        made.op_name = made.__name__  # type: ignore[attr-defined]
        _register(made, function)
        return made

    return register


def describe(texts: Mapping[str, str]) -> None:
    """Give operations that numpy does not have the text that `help` shows."""
    for name, text in texts.items():
        OPS[name].__doc__ = text


def alias(name: str, made: Any) -> None:
    """Make an operation known under a second name, e.g. the one torch users know."""
    ALIASES[name] = made.op_name


def _register(made: Any, function: Any) -> None:
    """Enter an operation everywhere it is found: by name, through numpy, as method and operator."""
    name = made.__name__
    OPS[name] = made
    if isinstance(made, Op):
        made.op_name = name
    if function is not None:
        NUMPY[function] = made
    if isinstance(made, Op) and isinstance(function, np.ufunc):
        attach_operators(name, made)
    # ndarray decides which operations are methods. What Tensor defines itself (`sort`, which is in
    # place) stays.
    if hasattr(np.ndarray, name) and name not in Tensor.__dict__:
        setattr(Methods, name, as_method(made))


# ── arguments as users write them ───────────────────────────────────────────────────────────────


def _by_names(label: str, names: tuple[str, ...], arrays: int) -> Callable[..., Any]:
    """Return a function that sorts arguments into arrays and parameters by their names."""

    def arrange(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        given = len(args)
        if given == arrays:
            return args, kwargs
        if given > len(names):
            raise TypeError(f"{label}() takes at most {len(names)} arguments, not {given}")
        if given > arrays:
            for name, value in zip(names[arrays:], args[arrays:], strict=False):
                if name in kwargs:
                    raise TypeError(f"{label}() got two values for {name!r}")
                kwargs[name] = value
            return args[:arrays], kwargs
        missing = [name for name in names[given:arrays] if name not in kwargs]
        if missing:
            raise TypeError(f"{label}() needs {', '.join(missing)}")
        return (*args, *[kwargs.pop(name) for name in names[given:arrays]]), kwargs

    return arrange


def _ufunc_arguments(function: np.ufunc) -> Callable[..., Any]:
    """Return the same for a ufunc: `nin` arrays, and of its keywords `dtype` and `out`."""
    arrays, label = function.nin, function.__name__

    def arrange(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        if len(args) != arrays:
            if len(args) != arrays + 1:
                raise TypeError(f"{label}() takes {arrays} arrays, not {len(args)}")
            # One more array than inputs is the output, as in numpy.
            kwargs["out"], args = args[-1], args[:-1]
        if kwargs:
            dtype = kwargs.pop("dtype", None)
            if dtype is not None:
                # Computing in another type is converting first; recorded, so that gradients come
                # back in the old one.
                args = tuple([as_tensor(arg).astype(dtype) for arg in args])
            # `where=`, `casting=` and others change the result in ways that no rule knows.
            unknown = kwargs.keys() - {"out"}
            if unknown:
                raise TypeError(f"{label}() on Tensors does not know {', '.join(sorted(unknown))}=")
        return args, kwargs

    return arrange


# ── operators and methods of Tensor ─────────────────────────────────────────────────────────────

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
        setattr(Methods, f"__{short}__", binary(made))
        setattr(Methods, f"__r{short}__", _reflected(made))
        setattr(Methods, f"__i{short}__", _in_place(made))
    elif name in _COMPARISONS:
        setattr(Methods, _COMPARISONS[name], _comparison(made))
    elif name in _UNARY:
        setattr(Methods, _UNARY[name], lambda self: made.apply((self,), {}))


def as_method(made: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation as a method: its first array is `self`."""

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return made(self, *args, **kwargs)

    method.__name__, method.__qualname__ = made.__name__, f"Tensor.{made.__name__}"
    method.__doc__ = made.__doc__
    method.__wrapped__ = MethodOf(made)  # type: ignore[attr-defined]  # has its signature
    return method


def _reflected(made: Op) -> Callable[[Tensor, Any], Any]:
    """Return the operator for a left operand that is no Tensor."""

    def operator(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        return made.apply((other, self), {})

    return operator


def _comparison(made: Op) -> Callable[[Tensor, Any], Any]:
    """Return a comparison; with None and text Python falls back to its own."""

    def operator(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        return made.apply((self, other), {})

    return operator


def _in_place(made: Op) -> Callable[[Tensor, Any], Tensor]:
    """Return `+=` and the like: a write where that is safe, else a new tensor."""

    def operator(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        # Recorded arithmetic cannot write: earlier nodes may have saved the old value. `x += y`
        # then binds the name to a new tensor, which is what most code means; of a leaf it would
        # silently become a result that no optimiser knows.
        tracked = self.requires_grad or requires_grad(other)
        if tracked and recording.get():
            if self._leaf:
                raise GradError(
                    f"a leaf that requires grad cannot be changed in place ({made.name}); "
                    "write `x = x + …`, or wrap the change in `with ag.no_grad():`",
                    "inplace",
                )
            return made(self, other)
        value = other.raw if isinstance(other, Tensor) else other
        if self.raw.__class__ is np.ndarray:
            made.forward(self.raw, value, out=self.raw)
        else:
            # A sparse array is never changed.
            self.raw = made.forward(self.raw, value)
        self._written()
        return self

    return operator


def binary(op: Op) -> Callable[[Tensor, Any], Any]:
    """Return the operation as an operator method: the same as calling it, unrolled.

    `a + b` on small arrays costs about as much as numpy itself, so every step here counts: this is
    `Op.apply`, `record` and `wrap` in one function, for two operands and rules that save nothing.
    """
    forward, new, dense = op.forward, object.__new__, _ndarray

    def operator(a: Tensor, b: Any) -> Any:
        if isinstance(b, Tensor):
            y = forward(a.raw, b.raw)
            second = b._node
            if second is None and b._leaf:
                second = b.accumulator()
        # Python then asks the other operand, and raises its own TypeError.
        elif b is None or isinstance(b, str):
            return NotImplemented
        elif b.__class__ is list or b.__class__ is tuple:
            return op.apply((a, b), {})
        else:
            y = forward(a.raw, b)
            second = None
        first = a._node
        if first is None and a._leaf:
            first = a.accumulator()
        if (first is None and second is None) or not recording.get():
            return y if y is NotImplemented else wrap(y)
        # Saved values, sparse results and numpy scalars take the general path.
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
        tensor.raw = y
        tensor._node = node
        tensor._leaf = False
        tensor._grad = tensor._cell = tensor._accumulate = None
        tensor._hooks = tensor._after_hooks = None
        return tensor

    operator.__name__ = op.name
    return operator


# numpy's divmod has two results and no rule; both parts have one.
setattr(Methods, "__divmod__", lambda a, b: (a // b, a % b))  # noqa: B010  attached, like the others
setattr(Methods, "__rdivmod__", lambda b, a: (a // b, a % b))  # noqa: B010


# ── for use in rules and forward functions ──────────────────────────────────────────────────────


def as_tensor(value: Any) -> Tensor:
    """Return the Tensor itself, or one around an array, number or list of either."""
    if isinstance(value, Tensor):
        return value
    if value is None:
        raise TypeError("got None where an array belongs")
    value = stacked(value)
    return value if isinstance(value, Tensor) else wrap(np.asarray(value))


def conj(x: Any) -> Any:
    """Return the complex conjugate; real values as they are.

    In nearly every rule, and nearly always on real arrays: so their class and kind are looked at
    first.
    """
    kind = x.__class__
    if kind is _ndarray:
        return x if x.dtype.kind != "c" else np.conjugate(x)
    if kind is float or kind is int or kind is bool:
        return x
    if kind is complex:
        return x.conjugate()
    return np.conjugate(x) if x.dtype.kind == "c" else x


def spread(g: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast a gradient: a small array filled, a large one as a view."""
    if g.ndim or isinstance(g, Tensor):
        return np.broadcast_to(g, shape)
    if prod(shape) <= SMALL:
        filled: Any = np.empty(shape, g.dtype)
        filled.fill(g)
        return filled
    return shown(g, shape, (0,) * len(shape))


def zeros_for(g: Any) -> Any:
    """Return a gradient of zeros, for steps and rounding."""
    return np.zeros(g.shape, g.dtype)
