"""Further names for what the other tables have: those that torch users type without thinking.

    x.view(2, -1)   x.permute(1, 0)   x.unsqueeze(0)   x.t()   x.dim()      methods
    x.float()   x.double()   x.half()   x.int()   x.long()   x.bool()   x.to(ag.float32)
    ag.cat([a, b], dim=1)   ag.unsqueeze(x, 0)   ag.permute(x, (1, 0))      functions
    ag.float32, ag.int64, …                                                 numpy's dtypes

Each is one of our operations by its other name, so each is recorded, and none costs anything where
it is not used. What torch means by another name of numpy's (`max` with `dim=`) is in `op/spelling.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from aiograd.autograd.names.methods import Methods
from aiograd.autograd.ops.elementwise import astype
from aiograd.autograd.ops.join import concatenate
from aiograd.autograd.ops.shape import expand_dims, reshape, transpose
from aiograd.autograd.ops.table import alias, as_method
from aiograd.autograd.tensor import Tensor

alias("cat", concatenate)
alias("unsqueeze", expand_dims)
alias("permute", transpose)

#: numpy's scalar types by name, as torch has its dtypes. `t.dtype == ag.float32` holds.
DTYPES: Final[dict[str, type[np.generic]]] = {
    "float16": np.float16, "float32": np.float32, "float64": np.float64,
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "complex64": np.complex64, "complex128": np.complex128, "bool_": np.bool_,
}  # fmt: skip


def _view(self: Tensor, *shape: Any) -> Tensor:
    """Show the same elements in another shape, sharing memory; one number may be -1.

        >>> ag.arange(6).view(2, -1).shape
        (2, 3)

    ValueError where only a copy could have that shape: `reshape` makes one.
    """
    if len(shape) == 1 and not isinstance(shape[0], int | np.integer):
        shape = tuple(shape[0])
    made: Tensor = reshape.apply((self,), {"shape": shape})
    # A copy would take writes that the original never sees.
    if made.raw.size and not np.may_share_memory(made.raw, self.raw):
        raise ValueError(f"{self.shape} cannot be seen as {made.shape} in memory: use reshape()")
    return made


def _permute(self: Tensor, *dims: Any) -> Tensor:
    """Order the axes as given.

    >>> ag.zeros(2, 3, 4).permute(2, 0, 1).shape
    (4, 2, 3)
    """
    # Axes come as numbers or as one tuple, as in torch.
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int | np.integer) else dims
    made: Tensor = transpose.apply((self,), {"axes": tuple(order)})
    return made


def _t(self: Tensor) -> Tensor:
    """Transpose a matrix; a vector or a number stays as it is.

    >>> ag.zeros(2, 3).t().shape
    (3, 2)
    """
    # torch refuses it, too: which two axes were meant would be a guess.
    if len(self.raw.shape) > 2:
        raise ValueError(f"t() takes at most two axes, not {self.shape}; use permute() or .mT")
    made: Tensor = transpose.apply((self,), {})
    return made


def _dim(self: Tensor) -> int:
    """Return the number of axes, as `ndim` does."""
    return len(self.raw.shape)


def _to(self: Tensor, dtype: Any) -> Tensor:
    """Convert to a dtype; the tensor itself if it has that, or for the device "cpu".

    >>> ag.ones(2).to(ag.float32).dtype
    dtype('float32')
    """
    wanted = as_dtype(dtype)
    if wanted is None or wanted == self.raw.dtype:
        return self
    made: Tensor = astype.apply((self,), {"dtype": wanted})
    return made


def as_dtype(what: Any) -> np.dtype[Any] | None:
    """Return what `to()` was given as a dtype; None for "cpu", where every array is."""
    # Programs that name the device of their tensors run as they are; any other device is an error.
    if isinstance(what, str) and what == "cpu":
        return None
    try:
        wanted: np.dtype[Any] = np.dtype(what.dtype if isinstance(what, Tensor) else what)
    except TypeError:
        raise TypeError(f"to() takes a dtype such as ag.float32, or 'cpu', not {what!r}") from None
    return wanted


def _converter(name: str, dtype: Any) -> Callable[[Tensor], Tensor]:
    def convert(self: Tensor) -> Tensor:
        return _to(self, dtype)

    convert.__name__ = convert.__qualname__ = name
    convert.__doc__ = f"Convert to {np.dtype(dtype).name}; the tensor itself if it is that."
    return convert


_METHODS: dict[str, Any] = {
    "view": _view,
    "permute": _permute,
    "unsqueeze": as_method(expand_dims),
    "t": _t,
    "dim": _dim,
    "to": _to,
} | {
    name: _converter(name, dtype)
    for name, dtype in {
        "half": np.float16, "float": np.float32, "double": np.float64,
        "int": np.int32, "long": np.int64, "bool": np.bool_,
    }.items()
}  # fmt: skip
for _name, _method in _METHODS.items():
    # In tracebacks and in `help()` under the public name.
    _method.__name__ = _method.__qualname__ = _name
    setattr(Methods, _name, _method)
