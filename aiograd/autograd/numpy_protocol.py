"""Tensors in numpy's own functions: `np.sin(t)`, `np.concatenate([t, u])`, `array + t`.

A function with an operation is recorded. One without computes on the plain arrays, unless a
gradient would silently be lost: then it refuses, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aiograd.autograd.grad_mode import recording
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import OPS
from aiograd.autograd.ops.nondifferentiable import NOT_DIFFERENTIABLE
from aiograd.autograd.ops.table import NUMPY
from aiograd.autograd.tensor import Tensor, requires_grad, wrap

# What Python code of users calls on ufuncs; `reduce` and `accumulate` default to the first axis,
# unlike the functions that stand for them.
_REDUCTIONS = {np.add: "sum", np.multiply: "prod", np.maximum: "max", np.minimum: "min"}
_WRITERS = {np.copyto, np.put, np.put_along_axis, np.putmask, np.place, np.fill_diagonal}
_RUNNING = {np.add: "cumsum", np.multiply: "cumprod"}


def array_ufunc(self: Tensor, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """Carry out a ufunc, or `ufunc.reduce` and the like."""
    # numpy passes `out=(None,)` where none was given.
    if all(target is None for target in kwargs.get("out", ())):
        kwargs.pop("out", None)
    # An unbuffered write into the first argument.
    if method == "at":
        return _write(ufunc.at, inputs, kwargs)
    if method == "__call__" and ufunc in NUMPY:
        return NUMPY[ufunc](*inputs, **kwargs)
    if method == "reduce" and ufunc in _REDUCTIONS:
        return OPS[_REDUCTIONS[ufunc]](*inputs, **{"axis": 0, **kwargs})
    if method == "accumulate" and ufunc in _RUNNING:
        return OPS[_RUNNING[ufunc]](*inputs, **{"axis": 0, **kwargs})
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    return _on_arrays(getattr(ufunc, method), f"np.{name}", inputs, kwargs)


def array_function(self: Tensor, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Carry out one of numpy's other functions."""
    operation = NUMPY.get(function)
    if operation is not None:
        return operation(*args, **kwargs)
    if function in _WRITERS:
        return _write(function, args, kwargs)
    # Functions that only look at the values cannot lose a gradient, so they are never refused.
    if function in NOT_DIFFERENTIABLE or (
        function is np.full_like and not _filled(*args, **kwargs)
    ):
        return _wrapped(function(*_plain(args), **_plain(kwargs)))
    # The name as users write it, np.linalg.…, for the error.
    module = getattr(function, "__module__", "numpy") or "numpy"
    name = f"{module.replace('numpy', 'np', 1)}.{function.__name__}"
    return _on_arrays(function, name, args, kwargs)


def _filled(a: Any, fill_value: Any, *rest: Any, **kwargs: Any) -> bool:
    """Whether `full_like` fills with what requires grad; the first argument only has a shape."""
    return requires_grad(fill_value)


def _write(function: Any, args: Any, kwargs: Any) -> None:
    """Carry out a function that changes its first argument."""
    target, *values = args
    if not isinstance(target, Tensor):
        # An ndarray has no graph: the gradient of what is written would be lost.
        if recording.get() and any(t.requires_grad for t in _tensors((values, kwargs))):
            raise TypeError(f"np.{function.__name__}() cannot record a write into an ndarray")
        function(target, *_plain(values), **_plain(kwargs))
        return
    # Any tensor that requires grad will do: `_before_write` only asks whether there is one.
    written = next((t for t in _tensors((values, kwargs)) if t.requires_grad), None)
    target._before_write(written)
    function(target.raw, *_plain(values), **_plain(kwargs))
    target._written()


def _on_arrays(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Compute on plain arrays; raise if a gradient would be lost."""
    if recording.get() and any(t.requires_grad for t in _tensors((args, kwargs))):
        raise TypeError(
            f"{name}() has no gradient rule; detach() the tensors that require grad, "
            "or declare an operation with ag.op"
        )
    out = kwargs.get("out")
    # Counted even before the write: a function that fails may have written a part.
    for target in out if isinstance(out, tuple) else (out,):
        if isinstance(target, Tensor):
            target._written()
    return _wrapped(function(*_plain(args), **_plain(kwargs)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the Tensors in a tree of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _plain(value: Any) -> Any:
    """Return a tree with arrays in place of Tensors; named tuples keep their type."""
    if isinstance(value, Tensor):
        return value.raw
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else type(value)(*items)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _wrapped(value: Any) -> Any:
    """Return a result with Tensors in place of arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return wrap(np.asarray(value))
    if type(value) in (list, tuple):
        return type(value)(_wrapped(item) for item in value)
    if isinstance(value, tuple):
        return type(value)(*[_wrapped(item) for item in value])
    return value


# numpy asks for these two before it does anything else with a Tensor.
setattr(Methods, "__array_ufunc__", array_ufunc)  # noqa: B010  attached, like all operations
setattr(Methods, "__array_function__", array_function)  # noqa: B010
