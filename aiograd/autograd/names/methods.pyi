# Written by `make stubs` with numpy 2.4; do not edit.

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from aiograd.autograd.tensor import Tensor

_Values: TypeAlias = Tensor | npt.ArrayLike
_Axis: TypeAlias = SupportsIndex | builtins.tuple[SupportsIndex, ...] | None
_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

class Methods:
    @property
    def T(self) -> Tensor: ...
    def __abs__(self) -> Tensor: ...
    def __add__(self, other: _Values, /) -> Tensor: ...
    def __and__(self, other: _Values, /) -> Tensor: ...
    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any: ...
    def __array_ufunc__(
        self, ufunc: Any, method: builtins.str, *inputs: Any, **kwargs: Any
    ) -> Any: ...
    def __divmod__(self, other: _Values, /) -> builtins.tuple[Tensor, Tensor]: ...
    def __eq__(self, other: builtins.object, /) -> Tensor: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
    def __floordiv__(self, other: _Values, /) -> Tensor: ...
    def __ge__(self, other: _Values, /) -> Tensor: ...
    def __getitem__(self, index: Any, /) -> Tensor: ...
    def __gt__(self, other: _Values, /) -> Tensor: ...
    def __iadd__(self, other: _Values, /) -> Tensor: ...
    def __iand__(self, other: _Values, /) -> Tensor: ...
    def __ifloordiv__(self, other: _Values, /) -> Tensor: ...
    def __ilshift__(self, other: _Values, /) -> Tensor: ...
    def __imatmul__(self, other: _Values, /) -> Tensor: ...
    def __imod__(self, other: _Values, /) -> Tensor: ...
    def __imul__(self, other: _Values, /) -> Tensor: ...
    def __invert__(self) -> Tensor: ...
    def __ior__(self, other: _Values, /) -> Tensor: ...
    def __ipow__(self, other: _Values, /) -> Tensor: ...
    def __irshift__(self, other: _Values, /) -> Tensor: ...
    def __isub__(self, other: _Values, /) -> Tensor: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    def __itruediv__(self, other: _Values, /) -> Tensor: ...
    def __ixor__(self, other: _Values, /) -> Tensor: ...
    def __le__(self, other: _Values, /) -> Tensor: ...
    def __lshift__(self, other: _Values, /) -> Tensor: ...
    def __lt__(self, other: _Values, /) -> Tensor: ...
    def __matmul__(self, other: _Values, /) -> Tensor: ...
    def __mod__(self, other: _Values, /) -> Tensor: ...
    def __mul__(self, other: _Values, /) -> Tensor: ...
    def __ne__(self, other: builtins.object, /) -> Tensor: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
    def __neg__(self) -> Tensor: ...
    def __or__(self, other: _Values, /) -> Tensor: ...
    def __pos__(self) -> Tensor: ...
    def __pow__(self, other: _Values, /) -> Tensor: ...
    def __radd__(self, other: _Values, /) -> Tensor: ...
    def __rand__(self, other: _Values, /) -> Tensor: ...
    def __rdivmod__(self, other: _Values, /) -> builtins.tuple[Tensor, Tensor]: ...
    def __rfloordiv__(self, other: _Values, /) -> Tensor: ...
    def __rlshift__(self, other: _Values, /) -> Tensor: ...
    def __rmatmul__(self, other: _Values, /) -> Tensor: ...
    def __rmod__(self, other: _Values, /) -> Tensor: ...
    def __rmul__(self, other: _Values, /) -> Tensor: ...
    def __ror__(self, other: _Values, /) -> Tensor: ...
    def __rpow__(self, other: _Values, /) -> Tensor: ...
    def __rrshift__(self, other: _Values, /) -> Tensor: ...
    def __rshift__(self, other: _Values, /) -> Tensor: ...
    def __rsub__(self, other: _Values, /) -> Tensor: ...
    def __rtruediv__(self, other: _Values, /) -> Tensor: ...
    def __rxor__(self, other: _Values, /) -> Tensor: ...
    def __sub__(self, other: _Values, /) -> Tensor: ...
    def __truediv__(self, other: _Values, /) -> Tensor: ...
    def __xor__(self, other: _Values, /) -> Tensor: ...
    def all(
        self,
        axis: _Axis | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
        *,
        where: Any = None,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Test whether all array elements along a given axis evaluate to True."""

    def any(
        self,
        axis: _Axis | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
        *,
        where: Any = None,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Test whether any array element along a given axis evaluates to True."""

    def argmax(
        self,
        axis: _Axis | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        *,
        keepdims: builtins.bool = False,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Returns the indices of the maximum values along an axis."""

    def argmin(
        self,
        axis: _Axis | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        *,
        keepdims: builtins.bool = False,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Returns the indices of the minimum values along an axis."""

    def argsort(
        self,
        axis: _Axis = -1,
        kind: Any = None,
        order: Any = None,
        *,
        stable: builtins.bool | None = None,
        dim: _Axis = -1,
    ) -> Tensor:
        """Returns the indices that would sort an array."""

    def astype(self, dtype: npt.DTypeLike | None, copy: builtins.bool = True) -> Tensor: ...
    def bool(self) -> Tensor:
        """Convert to builtins.bool; the tensor itself if it is that."""

    def clip(
        self,
        a_min: _Values | None = None,
        a_max: _Values | None = None,
        *,
        min: _Values | None = None,
        max: _Values | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
    ) -> Tensor:
        """Clip (limit) the values in an array."""

    def clone(self, order: builtins.str = "K") -> Tensor:
        """Return an array copy of the given builtins.object."""

    def coalesce(self) -> Tensor:
        """Return the same tensor with every position stored once, in order."""

    def compress(self, condition: _Values, axis: builtins.int | None = None) -> Tensor:
        """Pick the slices where the condition holds."""

    def conj(
        self,
        /,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Tensor:
        """Return the complex conjugate, element-wise."""

    def conjugate(
        self,
        /,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Tensor:
        """Return the complex conjugate, element-wise."""

    def copy(self, order: builtins.str = "K") -> Tensor:
        """Return an array copy of the given builtins.object."""

    def cumprod(
        self,
        axis: _Axis | None = None,
        dtype: npt.DTypeLike | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        *,
        dim: _Axis = None,
    ) -> Tensor:
        """Return the cumulative product of elements along a given axis."""

    def cumsum(
        self,
        axis: _Axis | None = None,
        dtype: npt.DTypeLike | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        *,
        dim: _Axis = None,
    ) -> Tensor:
        """Return the cumulative sum of the elements along a given axis."""

    def diagonal(
        self, offset: builtins.int = 0, axis1: builtins.int = 0, axis2: builtins.int = 1
    ) -> Tensor:
        """Return specified diagonals."""

    def dim(self) -> builtins.int:
        """Return the number of axes, as `ndim` does."""

    def dot(self, b: _Values) -> Tensor: ...
    def double(self) -> Tensor:
        """Convert to float64; the tensor itself if it is that."""

    def flatten(self, order: Any = "C") -> Tensor:
        """Copy into one axis."""

    def float(self) -> Tensor:
        """Convert to float32; the tensor itself if it is that."""

    def half(self) -> Tensor:
        """Convert to float16; the tensor itself if it is that."""

    @property
    def imag(self) -> Tensor: ...
    def indices(self) -> Tensor:
        """Return where the entries are, as stored: (sparse dimensions, entries)."""

    def int(self) -> Tensor:
        """Convert to int32; the tensor itself if it is that."""

    def long(self) -> Tensor:
        """Convert to int64; the tensor itself if it is that."""

    @property
    def mT(self) -> Tensor: ...
    def max(
        self,
        axis: _Axis | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
    ) -> Tensor:
        """Return the maximum of an array or maximum along an axis."""

    def mean(
        self,
        axis: _Axis | None = None,
        dtype: npt.DTypeLike | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
        *,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Compute the arithmetic mean along the specified axis."""

    def min(
        self,
        axis: _Axis | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
    ) -> Tensor:
        """Return the minimum of an array or minimum along an axis."""

    def permute(self, *dims: _Axis) -> Tensor:
        """Order the axes as given."""

    def prod(
        self,
        axis: _Axis | None = None,
        dtype: npt.DTypeLike | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
        *,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Return the product of array elements over a given axis."""

    def ravel(self, order: builtins.str = "C") -> Tensor:
        """Return a contiguous flattened array."""

    @property
    def real(self) -> Tensor: ...
    def repeat(
        self, repeats: Any, axis: builtins.int | None = None, *, dim: _Axis = None
    ) -> Tensor:
        """Repeat every element, or every slice along an axis."""

    def reshape(self, *shape: _Shape, order: Any = "C") -> Tensor:
        """Give the same elements another shape; one number may be -1."""

    def round(
        self, decimals: builtins.int = 0, out: Tensor | np.ndarray[Any, Any] | None = None
    ) -> Tensor:
        """Evenly round to the given number of decimals."""

    def searchsorted(self, v: _Values, side: builtins.str = "left", sorter: Any = None) -> Tensor:
        """Find indices where elements should be inserted to maintain order."""

    def squeeze(self, axis: _Axis | None = None, *, dim: _Axis = None) -> Tensor:
        """Remove axes of length one from `a`."""

    def std(
        self,
        axis: _Axis | None = None,
        *,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        ddof: builtins.float = 0,
        keepdims: builtins.bool = False,
        correction: builtins.float | None = None,
    ) -> Tensor:
        """Compute the standard deviation along the specified axis."""

    def sum(
        self,
        axis: _Axis | None = None,
        dtype: npt.DTypeLike | None = None,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        keepdims: builtins.bool = False,
        *,
        dim: _Axis = None,
        keepdim: builtins.bool = False,
    ) -> Tensor:
        """Sum of array elements over a given axis."""

    def swapaxes(self, axis1: Any, axis2: Any) -> Tensor:
        """Interchange two axes of an array."""

    def t(self) -> Tensor:
        """Transpose a matrix; a vector or a number stays as it is."""

    def take(
        self,
        indices: _Values,
        axis: builtins.int | None = None,
        mode: builtins.str = "raise",
        *,
        dim: _Axis = None,
    ) -> Tensor:
        """Pick whole slices along an axis, or elements of the flattened array."""

    def to(self, dtype: npt.DTypeLike | None) -> Tensor:
        """Convert to a dtype; the tensor itself if it has that, or for the device "cpu"."""

    def to_dense(self) -> Tensor:
        """Return the tensor with its zeros; the gradient comes back at the stored positions."""

    def trace(
        self, offset: builtins.int = 0, axis1: builtins.int = 0, axis2: builtins.int = 1
    ) -> Tensor:
        """Sum along a diagonal."""

    def transpose(self, *axes: Any) -> Tensor:
        """Reverse the axes, or order them as given."""

    @overload
    def unsqueeze(self, axis: _Axis) -> Tensor: ...
    @overload
    def unsqueeze(self, *, dim: _Axis) -> Tensor: ...
    def values(self) -> Tensor:
        """Return the entries as stored, in the order of `indices`; differentiable."""

    def var(
        self,
        axis: _Axis | None = None,
        *,
        out: Tensor | np.ndarray[Any, Any] | None = None,
        ddof: builtins.float = 0,
        keepdims: builtins.bool = False,
        correction: builtins.float | None = None,
    ) -> Tensor:
        """Compute the variance along the specified axis."""

    def view(self, *shape: _Shape) -> Tensor:
        """Show the same elements in another shape, sharing memory; one number may be -1."""
