# Written by `make stubs` with numpy 2.4; do not edit.

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from aiograd.autograd.ops.linalg import Eigh, Qr, Slogdet, Svd
from aiograd.autograd.tensor import Tensor

_Values: TypeAlias = Tensor | npt.ArrayLike
_Axis: TypeAlias = SupportsIndex | builtins.tuple[SupportsIndex, ...] | None
_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

__all__ = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "add",
    "all",
    "amax",
    "amin",
    "angle",
    "any",
    "append",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "argmax",
    "argmin",
    "argsort",
    "array_split",
    "asin",
    "asinh",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "average",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "bmm",
    "bool_",
    "broadcast_arrays",
    "broadcast_to",
    "cat",
    "cbrt",
    "ceil",
    "cholesky",
    "clip",
    "clone",
    "column_stack",
    "complex128",
    "complex64",
    "compress",
    "concat",
    "concatenate",
    "conj",
    "conjugate",
    "conv1d",
    "conv2d",
    "copy",
    "copysign",
    "corrcoef",
    "cos",
    "cosh",
    "count_nonzero",
    "cov",
    "cross",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "deg2rad",
    "degrees",
    "delete",
    "det",
    "diag",
    "diagflat",
    "diagonal",
    "diff",
    "div",
    "divide",
    "dot",
    "dropout",
    "dsplit",
    "dstack",
    "ediff1d",
    "eigh",
    "eigvalsh",
    "einsum",
    "elu",
    "embedding",
    "embedding_bag",
    "eq",
    "equal",
    "erf",
    "exp",
    "exp2",
    "expand_dims",
    "expm1",
    "fabs",
    "flip",
    "fliplr",
    "flipud",
    "float16",
    "float32",
    "float64",
    "float_power",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "gelu",
    "getitem",
    "gradient",
    "greater",
    "greater_equal",
    "heaviside",
    "hsplit",
    "hstack",
    "hypot",
    "imag",
    "inner",
    "int16",
    "int32",
    "int64",
    "int8",
    "inv",
    "invert",
    "isclose",
    "iscomplex",
    "isfinite",
    "isinf",
    "isnan",
    "isreal",
    "kron",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "left_shift",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsumexp",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_transpose",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "median",
    "meshgrid",
    "min",
    "minimum",
    "mm",
    "mod",
    "moveaxis",
    "mse_loss",
    "mul",
    "multi_dot",
    "multiply",
    "nan_to_num",
    "nanargmax",
    "nanargmin",
    "nanmax",
    "nanmean",
    "nanmin",
    "nanprod",
    "nanstd",
    "nansum",
    "nanvar",
    "ne",
    "neg",
    "negative",
    "nll_loss",
    "norm",
    "not_equal",
    "outer",
    "pad",
    "partition",
    "percentile",
    "permute",
    "permute_dims",
    "pinv",
    "positive",
    "pow",
    "power",
    "prod",
    "ptp",
    "qr",
    "quantile",
    "rad2deg",
    "radians",
    "ravel",
    "real",
    "reciprocal",
    "relu",
    "remainder",
    "repeat",
    "reshape",
    "right_shift",
    "rint",
    "roll",
    "rollaxis",
    "rot90",
    "round",
    "searchsorted",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "sliding_window_view",
    "slogdet",
    "softmax",
    "softplus",
    "solve",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "sub",
    "subtract",
    "sum",
    "svd",
    "swapaxes",
    "take",
    "take_along_axis",
    "tan",
    "tanh",
    "tensordot",
    "tile",
    "trace",
    "transpose",
    "trapezoid",
    "tril",
    "triu",
    "true_divide",
    "trunc",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "unsqueeze",
    "unstack",
    "var",
    "vdot",
    "vecdot",
    "vector_norm",
    "vsplit",
    "vstack",
    "where",
]

bool_ = np.bool_
complex128 = np.complex128
complex64 = np.complex64
float16 = np.float16
float32 = np.float32
float64 = np.float64
int16 = np.int16
int32 = np.int32
int64 = np.int64
int8 = np.int8
uint16 = np.uint16
uint32 = np.uint32
uint64 = np.uint64
uint8 = np.uint8

def abs(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Calculate the absolute value element-wise."""

def absolute(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Calculate the absolute value element-wise."""

def acos(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Trigonometric inverse cosine, element-wise."""

def acosh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse hyperbolic cosine, element-wise."""

def add(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Add arguments element-wise."""

def all(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    where: Any = None,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Test whether all array elements along a given axis evaluate to True."""

def amax(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Return the maximum of an array or maximum along an axis."""

def amin(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Return the minimum of an array or minimum along an axis."""

def angle(z: _Values, deg: builtins.bool = False) -> Tensor:
    """Return the angle of the complex argument."""

def any(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    where: Any = None,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Test whether any array element along a given axis evaluates to True."""

def append(
    arr: _Values, values: _Values, axis: builtins.int | None = None, *, dim: _Axis = None
) -> Tensor:
    """Join values to the end, flattened unless an axis is given."""

def arccos(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Trigonometric inverse cosine, element-wise."""

def arccosh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse hyperbolic cosine, element-wise."""

def arcsin(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse sine, element-wise."""

def arcsinh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse hyperbolic sine element-wise."""

def arctan(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Trigonometric inverse tangent, element-wise."""

def arctan2(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Element-wise arc tangent of ``x1/x2`` choosing the quadrant correctly."""

def arctanh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse hyperbolic tangent element-wise."""

def argmax(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    keepdims: builtins.bool = False,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Returns the indices of the maximum values along an axis."""

def argmin(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    keepdims: builtins.bool = False,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Returns the indices of the minimum values along an axis."""

def argsort(
    a: _Values,
    axis: _Axis = -1,
    kind: Any = None,
    order: Any = None,
    *,
    stable: builtins.bool | None = None,
    dim: _Axis = -1,
) -> Tensor:
    """Returns the indices that would sort an array."""

def array_split(
    ary: _Values, indices_or_sections: Any, axis: _Axis = 0, *, dim: _Axis = 0
) -> builtins.tuple[Tensor, ...]:
    """Split an array into multiple sub-arrays."""

def asin(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse sine, element-wise."""

def asinh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse hyperbolic sine element-wise."""

def astype(a: _Values, dtype: npt.DTypeLike | None, copy: builtins.bool = True) -> Tensor:
    """Convert to another dtype; the gradient comes back in the old one."""

def atan(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Trigonometric inverse tangent, element-wise."""

def atan2(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Element-wise arc tangent of ``x1/x2`` choosing the quadrant correctly."""

def atanh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Inverse hyperbolic tangent element-wise."""

@overload
def atleast_1d(ary: _Values, /) -> Tensor: ...
@overload
def atleast_1d(*arys: _Values) -> Any: ...
@overload
def atleast_2d(ary: _Values, /) -> Tensor: ...
@overload
def atleast_2d(*arys: _Values) -> Any: ...
@overload
def atleast_3d(ary: _Values, /) -> Tensor: ...
@overload
def atleast_3d(*arys: _Values) -> Any: ...
def average(
    a: _Values,
    axis: _Axis = None,
    weights: _Values | None = None,
    *,
    keepdims: builtins.bool = False,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Average with weights, along one axis or over everything."""

def avg_pool2d(
    input: _Values,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    count_include_pad: builtins.bool = True,
) -> Tensor:
    """Average every window."""

def batch_norm(
    a: _Values,
    running_mean: Any = None,
    running_var: Any = None,
    weight: _Values | None = None,
    bias: _Values | None = None,
    training: builtins.bool = False,
    momentum: builtins.float = 0.1,
    eps: builtins.float = 1e-05,
) -> Tensor:
    """Bring every channel (axis 1) to mean 0 and variance 1, then scale and shift."""

def binary_cross_entropy_with_logits(
    input: _Values,
    target: _Values,
    weight: _Values | None = None,
    reduction: builtins.str = "mean",
    pos_weight: Any = None,
) -> Tensor:
    """Compare logits with probabilities between 0 and 1, safely for large logits."""

def bitwise_and(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the bit-wise AND of two arrays element-wise."""

def bitwise_invert(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute bit-wise inversion, or bit-wise NOT, element-wise."""

def bitwise_left_shift(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Shift the bits of an integer to the left."""

def bitwise_not(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute bit-wise inversion, or bit-wise NOT, element-wise."""

def bitwise_or(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the bit-wise OR of two arrays element-wise."""

def bitwise_right_shift(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Shift the bits of an integer to the right."""

def bitwise_xor(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the bit-wise XOR of two arrays element-wise."""

def bmm(a: _Values, b: _Values) -> Tensor:
    """As matmul, for two stacks of matrices only, as torch has it."""

def broadcast_arrays(*args: Any) -> builtins.tuple[Tensor, ...]:
    """Bring arrays to their common shape."""

def broadcast_to(array: _Values, shape: _Shape) -> Tensor:
    """Broadcast an array to a new shape."""

def cat(
    arrays: Sequence[_Values] | _Values,
    axis: _Axis = 0,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = 0,
) -> Tensor:
    """Join a sequence of arrays along an existing axis."""

def cbrt(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the cube-root of an array, element-wise."""

def ceil(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the ceiling of the input, element-wise."""

def cholesky(a: _Values, /, *, upper: builtins.bool = False) -> Tensor:
    """Cholesky decomposition."""

def clip(
    a: _Values,
    a_min: _Values | None = None,
    a_max: _Values | None = None,
    *,
    min: _Values | None = None,
    max: _Values | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
) -> Tensor:
    """Clip (limit) the values in an array."""

def clone(a: _Values, order: builtins.str = "K") -> Tensor:
    """Return an array copy of the given builtins.object."""

def column_stack(tup: Sequence[_Values]) -> Tensor:
    """Join as columns; vectors become one column each."""

def compress(
    condition: _Values, a: _Values, axis: builtins.int | None = None, *, dim: _Axis = None
) -> Tensor:
    """Pick the slices where the condition holds."""

def concat(
    arrays: Sequence[_Values] | _Values,
    axis: _Axis = 0,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = 0,
) -> Tensor:
    """Join a sequence of arrays along an existing axis."""

def concatenate(
    arrays: Sequence[_Values] | _Values,
    axis: _Axis = 0,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = 0,
) -> Tensor:
    """Join a sequence of arrays along an existing axis."""

def conj(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the complex conjugate, element-wise."""

def conjugate(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the complex conjugate, element-wise."""

def conv1d(
    input: _Values,
    weight: _Values,
    bias: _Values | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: builtins.int = 1,
) -> Tensor:
    """Slide kernels over sequences: (batch, channels, length), or one without a batch."""

def conv2d(
    input: _Values,
    weight: _Values,
    bias: _Values | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: builtins.int = 1,
) -> Tensor:
    """Slide kernels over images."""

def copy(a: _Values, order: builtins.str = "K") -> Tensor:
    """Return an array copy of the given builtins.object."""

def copysign(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Change the sign of x1 to that of x2, element-wise."""

def corrcoef(x: _Values, *, rowvar: builtins.bool = True) -> Tensor:
    """Give the correlation of variables, one per row (or column, without `rowvar`)."""

def cos(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Cosine element-wise."""

def cosh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Hyperbolic cosine, element-wise."""

def count_nonzero(
    a: _Values,
    axis: _Axis | None = None,
    *,
    keepdims: builtins.bool = False,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Counts the number of non-zero values in the array ``a``."""

def cov(
    m: _Values,
    *,
    rowvar: builtins.bool = True,
    bias: builtins.bool = False,
    ddof: builtins.float | None = None,
) -> Tensor:
    """Give the covariance matrix of variables, one per row (or column, without `rowvar`)."""

def cross(
    a: _Values,
    b: _Values,
    axisa: builtins.int = -1,
    axisb: builtins.int = -1,
    axisc: builtins.int = -1,
    axis: builtins.int | None = None,
    *,
    dim: _Axis = None,
) -> Tensor:
    """Give the vector that stands upright on two others."""

def cross_entropy(
    input: _Values,
    target: _Values,
    weight: _Values | None = None,
    ignore_index: builtins.int = -100,
    reduction: builtins.str = "mean",
    label_smoothing: builtins.float = 0.0,
) -> Tensor:
    """Compare logits with classes (integers) or with probabilities of classes (floats)."""

def cumprod(
    a: _Values,
    axis: _Axis | None = None,
    dtype: npt.DTypeLike | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = None,
) -> Tensor:
    """Return the cumulative product of elements along a given axis."""

def cumsum(
    a: _Values,
    axis: _Axis | None = None,
    dtype: npt.DTypeLike | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = None,
) -> Tensor:
    """Return the cumulative sum of the elements along a given axis."""

def deg2rad(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Convert angles from degrees to radians."""

def degrees(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Convert angles from radians to degrees."""

def delete(
    arr: _Values, obj: Any, axis: builtins.int | None = None, *, dim: _Axis = None
) -> Tensor:
    """Leave out slices along an axis, or elements of the flattened array."""

def det(a: _Values) -> Tensor:
    """Compute the determinant of an array."""

def diag(v: _Values, k: builtins.int = 0) -> Tensor:
    """Extract a diagonal or construct a diagonal array."""

def diagflat(v: _Values, k: builtins.int = 0) -> Tensor:
    """Make a matrix with the flattened input on a diagonal."""

def diagonal(
    a: _Values, offset: builtins.int = 0, axis1: builtins.int = 0, axis2: builtins.int = 1
) -> Tensor:
    """Return specified diagonals."""

def diff(
    a: _Values,
    n: builtins.int = 1,
    axis: builtins.int = -1,
    prepend: _Values | None = None,
    append: _Values | None = None,
    *,
    dim: _Axis = -1,
) -> Tensor:
    """Give the differences of neighbours, n times."""

def div(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Divide arguments element-wise."""

def divide(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Divide arguments element-wise."""

def dot(a: _Values, b: _Values) -> Tensor: ...
def dropout(
    a: _Values,
    p: builtins.float = 0.5,
    training: builtins.bool = True,
    generator: np.random.Generator | None = None,
) -> Tensor:
    """Set a share `p` of the elements to zero and scale the others up."""

def dsplit(ary: _Values, indices_or_sections: Any) -> builtins.tuple[Tensor, ...]:
    """Split along the third axis."""

def dstack(tup: Sequence[_Values]) -> Tensor:
    """Join along the third axis."""

def ediff1d(ary: _Values) -> Tensor:
    """Give the differences of neighbours of the flattened array."""

def eigh(a: _Values, UPLO: builtins.str = "L") -> Eigh:
    """Give eigenvalues and eigenvectors of a Hermitian matrix."""

def eigvalsh(a: _Values, UPLO: builtins.str = "L") -> Tensor:
    """Give the eigenvalues of a Hermitian matrix."""

def einsum(
    *args: Any, optimize: Any = None, out: Tensor | np.ndarray[Any, Any] | None = None
) -> Tensor: ...
def elu(a: _Values, alpha: builtins.float = 1.0) -> Tensor:
    """Keep what is positive; approach `-alpha` below zero."""

def embedding(
    input: _Values,
    weight: _Values,
    padding_idx: builtins.int | None = None,
    sparse: builtins.bool = False,
) -> Tensor:
    """Pick rows of `weight` by number; the row `padding_idx` gets no gradient."""

def embedding_bag(
    input: _Values,
    weight: _Values,
    offsets: _Values | None = None,
    mode: builtins.str = "mean",
    sparse: builtins.bool = False,
    per_sample_weights: _Values | None = None,
    padding_idx: builtins.int | None = None,
) -> Tensor:
    """Sum, average or maximise the rows of each bag."""

def eq(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return (x1 == x2) element-wise."""

def equal(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return (x1 == x2) element-wise."""

def erf(a: _Values) -> Tensor:
    """Give the error function of the normal distribution."""

def exp(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Calculate the exponential of all elements in the input array."""

def exp2(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Calculate `2**p` for all `p` in the input array."""

def expand_dims(a: _Values, axis: _Axis) -> Tensor:
    """Expand the shape of an array."""

def expm1(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Calculate ``exp(x) - 1`` for all elements in the array."""

def fabs(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the absolute values element-wise."""

def flip(m: _Values, axis: _Axis | None = None, *, dims: _Axis = None) -> Tensor:
    """Reverse the order of elements in an array along the given axis."""

def fliplr(m: _Values) -> Tensor:
    """Reverse the order of elements along axis 1 (left/right)."""

def flipud(m: _Values) -> Tensor:
    """Reverse the order of elements along axis 0 (up/down)."""

def float_power(x1: _Values, x2: _Values) -> Tensor:
    """Raise to a power, in at least double precision."""

def floor(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the floor of the input, element-wise."""

def floor_divide(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor: ...
def fmax(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Element-wise maximum of array elements."""

def fmin(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Element-wise minimum of array elements."""

def fmod(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Returns the element-wise remainder of division."""

def gelu(a: _Values, approximate: builtins.str = "none") -> Tensor:
    """Weight by the normal distribution; `approximate="tanh"` is the fast formula."""

def getitem(a: _Values, index: Any) -> Tensor:
    """Pick elements, as `a[index]` does."""

def gradient(
    f: _Values,
    *spacing: builtins.float,
    axis: builtins.int | builtins.tuple[builtins.int, ...] | None = None,
    dim: _Axis = None,
) -> Any:
    """Give the slope by second order differences, first order at the ends, along each axis."""

def greater(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the truth value of (x1 > x2) element-wise."""

def greater_equal(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the truth value of (x1 >= x2) element-wise."""

def heaviside(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the Heaviside step function."""

def hsplit(ary: _Values, indices_or_sections: Any) -> builtins.tuple[Tensor, ...]:
    """Split along the second axis; a vector along its only one."""

def hstack(tup: Sequence[_Values]) -> Tensor:
    """Join along the second axis; vectors along their only one."""

def hypot(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Given the "legs" of a right triangle, return its hypotenuse."""

def imag(val: _Values) -> Tensor:
    """Return the imaginary part of the complex argument."""

def inner(a: _Values, b: _Values) -> Tensor:
    """Sum products along the last axes."""

def inv(a: _Values) -> Tensor:
    """Compute the inverse of a matrix."""

def invert(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute bit-wise inversion, or bit-wise NOT, element-wise."""

def isclose(
    a: _Values,
    b: _Values,
    rtol: builtins.float = 1e-05,
    atol: builtins.float = 1e-08,
    equal_nan: builtins.bool = False,
) -> Tensor:
    """Returns a boolean array where two arrays are element-wise equal within a tolerance."""

def iscomplex(x: _Values) -> Tensor:
    """Returns a builtins.bool array, where True if input element is complex."""

def isfinite(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Test element-wise for finiteness (not infinity and not Not a Number)."""

def isinf(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Test element-wise for positive or negative infinity."""

def isnan(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Test element-wise for NaN and return result as a boolean array."""

def isreal(x: _Values) -> Tensor:
    """Returns a builtins.bool array, where True if input element is real."""

def kron(a: _Values, b: _Values) -> Tensor:
    """Put a scaled copy of b in place of every element of a."""

def l1_loss(input: _Values, target: _Values, reduction: builtins.str = "mean") -> Tensor:
    """Give the absolute difference."""

def layer_norm(
    a: _Values,
    normalized_shape: Any,
    weight: _Values | None = None,
    bias: _Values | None = None,
    eps: builtins.float = 1e-05,
) -> Tensor:
    """Bring the last axes of every sample to mean 0 and variance 1, then scale and shift."""

def leaky_relu(a: _Values, negative_slope: builtins.float = 0.01) -> Tensor:
    """Keep what is positive; a small slope below zero."""

def left_shift(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Shift the bits of an integer to the left."""

def less(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the truth value of (x1 < x2) element-wise."""

def less_equal(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the truth value of (x1 <= x2) element-wise."""

def log(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Natural logarithm, element-wise."""

def log10(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the base 10 logarithm of the input array, element-wise."""

def log1p(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the natural logarithm of one plus the input array, element-wise."""

def log2(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Base-2 logarithm of `x`."""

def log_softmax(a: _Values, axis: builtins.int = -1, *, dim: _Axis = -1) -> Tensor:
    """Give the logarithm of the softmax, without overflow."""

def logaddexp(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Logarithm of the sum of exponentiations of the inputs."""

def logaddexp2(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Logarithm of the sum of exponentiations of the inputs in base-2."""

def logical_and(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the truth value of x1 AND x2 element-wise."""

def logical_not(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the truth value of NOT x element-wise."""

def logical_or(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the truth value of x1 OR x2 element-wise."""

def logical_xor(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute the truth value of x1 XOR x2, element-wise."""

def logsumexp(
    a: _Values,
    axis: _Axis | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the logarithm of the sum of exponentials along axes, without overflow."""

def matmul(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Matrix product of two arrays."""

def matrix_norm(x: _Values, *, keepdims: builtins.bool = False, ord: Any = "fro") -> Tensor:
    """Give a norm of the matrices in the last two axes."""

def matrix_power(a: _Values, n: builtins.int) -> Tensor:
    """Multiply a square matrix with itself n times."""

def matrix_transpose(x: _Values) -> Tensor:
    """Exchange the last two axes."""

def max(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor:
    """Return the maximum of an array or maximum along an axis."""

def max_pool2d(input: _Values, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
    """Keep the largest element of every window; at a tie the first one gets the gradient."""

def maximum(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Element-wise maximum of array elements."""

def mean(
    a: _Values,
    axis: _Axis | None = None,
    dtype: npt.DTypeLike | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Compute the arithmetic mean along the specified axis."""

def median(a: _Values, axis: builtins.int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """Give the middle element, or the mean of the two in the middle."""

def meshgrid(*xi: _Values, indexing: builtins.str = "xy") -> builtins.tuple[Tensor, ...]:
    """Make coordinate matrices from coordinate vectors."""

def min(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor:
    """Return the minimum of an array or minimum along an axis."""

def minimum(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Element-wise minimum of array elements."""

def mm(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Matrix product of two arrays."""

def mod(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Returns the element-wise remainder of division."""

def moveaxis(a: _Values, source: Any, destination: Any) -> Tensor:
    """Move axes of an array to new positions."""

def mse_loss(input: _Values, target: _Values, reduction: builtins.str = "mean") -> Tensor:
    """Give the squared difference."""

def mul(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Multiply arguments element-wise."""

def multi_dot(arrays: Sequence[_Values] | _Values) -> Tensor:
    """Multiply a chain of matrices in the cheapest order."""

def multiply(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Multiply arguments element-wise."""

def nan_to_num(
    x: _Values,
    copy: builtins.bool = True,
    nan: builtins.float = 0.0,
    posinf: builtins.float | None = None,
    neginf: builtins.float | None = None,
) -> Tensor: ...
def nanargmax(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    keepdims: builtins.bool = False,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor: ...
def nanargmin(
    a: _Values,
    axis: _Axis | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    keepdims: builtins.bool = False,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor: ...
def nanmax(
    a: _Values,
    axis: _Axis = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the largest element that is not nan."""

def nanmean(
    a: _Values,
    axis: _Axis | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Average what is not nan."""

def nanmin(
    a: _Values,
    axis: _Axis = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the smallest element that is not nan."""

def nanprod(
    a: _Values,
    axis: _Axis = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Multiply, taking nan for 1."""

def nanstd(
    a: _Values,
    axis: _Axis = None,
    ddof: builtins.float = 0,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the standard deviation of what is not nan."""

def nansum(
    a: _Values,
    axis: _Axis = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Sum, taking nan for 0."""

def nanvar(
    a: _Values,
    axis: _Axis | None = None,
    ddof: builtins.float = 0,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the variance of what is not nan."""

def ne(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return (x1 != x2) element-wise."""

def neg(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Numerical negative, element-wise."""

def negative(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Numerical negative, element-wise."""

def nll_loss(
    input: _Values,
    target: _Values,
    weight: _Values | None = None,
    ignore_index: builtins.int = -100,
    reduction: builtins.str = "mean",
) -> Tensor:
    """Give minus the log probability of the right class; classes lie along axis 1 (or 0)."""

def norm(
    x: _Values,
    ord: Any = None,
    axis: _Axis | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the norm of vectors or matrices."""

def not_equal(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return (x1 != x2) element-wise."""

def outer(a: _Values, b: _Values) -> Tensor:
    """Multiply every element of one with every element of the other."""

def pad(array: _Values, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Tensor:
    """Add a border: constant, or copies of elements as in numpy's edge, reflect, wrap, …"""

def partition(a: _Values, kth: Any, axis: _Axis = -1, *, dim: _Axis = -1) -> Tensor:
    """Return a partitioned copy of an array."""

def percentile(
    a: _Values,
    q: _Values,
    axis: builtins.int | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the value below which `q` percent of the elements lie."""

def permute(a: _Values, axes: Any = None, *, dims: _Axis = None) -> Tensor:
    """Returns an array with axes transposed."""

def permute_dims(a: _Values, axes: Any = None, *, dims: _Axis = None) -> Tensor:
    """Returns an array with axes transposed."""

def pinv(a: _Values, rcond: Any = None, hermitian: builtins.bool = False) -> Tensor:
    """Compute the (Moore-Penrose) pseudo-inverse of a matrix."""

def positive(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Numerical positive, element-wise."""

def pow(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """First array elements raised to powers from second array, element-wise."""

def power(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """First array elements raised to powers from second array, element-wise."""

def prod(
    a: _Values,
    axis: _Axis | None = None,
    dtype: npt.DTypeLike | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Return the product of array elements over a given axis."""

def ptp(
    a: _Values,
    axis: _Axis = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the distance from the smallest to the largest element."""

def qr(a: _Values, mode: builtins.str = "reduced") -> Qr:
    """Give the reduced QR decomposition."""

def quantile(
    a: _Values,
    q: _Values,
    axis: builtins.int | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the value below which a share `q` of the elements lies, interpolating linearly."""

def rad2deg(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Convert angles from radians to degrees."""

def radians(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Convert angles from degrees to radians."""

def ravel(a: _Values, order: builtins.str = "C") -> Tensor:
    """Return a contiguous flattened array."""

def real(val: _Values) -> Tensor:
    """Return the real part of the complex argument."""

def reciprocal(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the reciprocal of the argument, element-wise."""

def relu(a: _Values) -> Tensor:
    """Keep what is positive; zero below zero."""

def remainder(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Returns the element-wise remainder of division."""

def repeat(
    a: _Values, repeats: Any, axis: builtins.int | None = None, *, dim: _Axis = None
) -> Tensor:
    """Repeat every element, or every slice along an axis."""

def reshape(a: _Values, shape: _Shape, order: Any = "C") -> Tensor:
    """Gives a new shape to an array without changing its data."""

def right_shift(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Shift the bits of an integer to the right."""

def rint(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Round elements of the array to the nearest integer."""

def roll(a: _Values, shift: Any, axis: _Axis | None = None, *, dims: _Axis = None) -> Tensor:
    """Roll array elements along a given axis."""

def rollaxis(a: _Values, axis: builtins.int, start: builtins.int = 0) -> Tensor:
    """Move one axis back until it lies in front of another."""

def rot90(m: _Values, k: builtins.int = 1, axes: Any = ..., *, dims: _Axis = ...) -> Tensor:
    """Rotate an array by 90 degrees in the plane specified by axes."""

def round(
    a: _Values, decimals: builtins.int = 0, out: Tensor | np.ndarray[Any, Any] | None = None
) -> Tensor:
    """Evenly round to the given number of decimals."""

def searchsorted(a: _Values, v: _Values, side: builtins.str = "left", sorter: Any = None) -> Tensor:
    """Find indices where elements should be inserted to maintain order."""

def sigmoid(a: _Values) -> Tensor:
    """Squash to between 0 and 1."""

def sign(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Returns an element-wise indication of the sign of a number."""

def signbit(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Returns element-wise True where signbit is set (less than zero)."""

def silu(a: _Values) -> Tensor:
    """Multiply by the own sigmoid."""

def sin(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Trigonometric sine, element-wise."""

def sinc(x: _Values) -> Tensor:
    """Return the normalized sinc function."""

def sinh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Hyperbolic sine, element-wise."""

def sliding_window_view(
    x: _Values,
    window_shape: Any,
    axis: _Axis | None = None,
    *,
    writeable: builtins.bool = False,
    dim: _Axis = None,
) -> Tensor:
    """Create a sliding window view into the array with the given window shape."""

def slogdet(a: _Values) -> Slogdet:
    """Give sign and logarithm of the determinant."""

def softmax(a: _Values, axis: builtins.int = -1, *, dim: _Axis = -1) -> Tensor:
    """Make numbers along an axis positive, with a sum of 1."""

def softplus(a: _Values) -> Tensor:
    """Compute `log(1 + exp(a))`, a smooth ReLU."""

def solve(a: _Values, b: _Values) -> Tensor:
    """Solve a linear matrix equation, or system of linear scalar equations."""

def sort(
    a: _Values, axis: _Axis = -1, kind: Any = None, *, stable: builtins.bool | None = None
) -> Tensor:
    """Return a sorted copy of an array."""

def split(ary: _Values, indices_or_sections: Any, axis: _Axis = 0) -> builtins.tuple[Tensor, ...]:
    """Split an array into multiple sub-arrays as views into `ary`."""

def sqrt(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the non-negative square-root of an array, element-wise."""

def square(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the element-wise square of the input."""

def squeeze(a: _Values, axis: _Axis | None = None, *, dim: _Axis = None) -> Tensor:
    """Remove axes of length one from `a`."""

def stack(
    arrays: Sequence[_Values] | _Values,
    axis: _Axis = 0,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = 0,
) -> Tensor:
    """Join a sequence of arrays along a new axis."""

def std(
    a: _Values,
    axis: _Axis | None = None,
    *,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    ddof: builtins.float = 0,
    keepdims: builtins.bool = False,
    correction: builtins.float | None = None,
) -> Tensor:
    """Compute the standard deviation along the specified axis."""

def sub(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Subtract arguments, element-wise."""

def subtract(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Subtract arguments, element-wise."""

def sum(
    a: _Values,
    axis: _Axis | None = None,
    dtype: npt.DTypeLike | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    keepdims: builtins.bool = False,
    *,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Sum of array elements over a given axis."""

@overload
def svd(
    a: _Values, full_matrices: builtins.bool = True, compute_uv: Literal[True] = True
) -> Svd: ...
@overload
def svd(
    a: _Values, full_matrices: builtins.bool = True, *, compute_uv: Literal[False]
) -> Tensor: ...
def swapaxes(a: _Values, axis1: Any, axis2: Any) -> Tensor:
    """Interchange two axes of an array."""

def take(
    a: _Values,
    indices: _Values,
    axis: builtins.int | None = None,
    mode: builtins.str = "raise",
    *,
    dim: _Axis = None,
) -> Tensor:
    """Pick whole slices along an axis, or elements of the flattened array."""

def take_along_axis(
    arr: _Values, indices: _Values, axis: builtins.int | None = -1, *, dim: _Axis = -1
) -> Tensor:
    """Pick one element per position of `indices` along an axis."""

def tan(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute tangent element-wise."""

def tanh(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Compute hyperbolic tangent element-wise."""

def tensordot(a: _Values, b: _Values, axes: Any = 2, *, dims: _Axis = 2) -> Tensor:
    """Sum products over the given axes of both."""

def tile(A: _Values, reps: Any) -> Tensor:
    """Lay copies of the array side by side."""

def trace(
    a: _Values, offset: builtins.int = 0, axis1: builtins.int = 0, axis2: builtins.int = 1
) -> Tensor:
    """Sum along a diagonal."""

def transpose(a: _Values, axes: Any = None, *, dims: _Axis = None) -> Tensor:
    """Returns an array with axes transposed."""

def trapezoid(
    y: _Values,
    x: _Values | None = None,
    dx: builtins.float = 1.0,
    axis: builtins.int = -1,
    *,
    dim: _Axis = -1,
) -> Tensor:
    """Integrate along an axis by trapezoids."""

def tril(m: _Values, k: builtins.int = 0) -> Tensor:
    """Lower triangle of an array."""

def triu(m: _Values, k: builtins.int = 0) -> Tensor:
    """Upper triangle of an array."""

def true_divide(
    x1: _Values,
    x2: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Divide arguments element-wise."""

def trunc(
    x: _Values,
    /,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the truncated value of the input, element-wise."""

@overload
def unsqueeze(a: _Values, axis: _Axis) -> Tensor: ...
@overload
def unsqueeze(a: _Values, *, dim: _Axis) -> Tensor: ...
def unstack(
    x: _Values, /, *, axis: builtins.int = 0, dim: _Axis = 0
) -> builtins.tuple[Tensor, ...]:
    """Split into the slices along an axis, which disappears."""

def var(
    a: _Values,
    axis: _Axis | None = None,
    *,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    ddof: builtins.float = 0,
    keepdims: builtins.bool = False,
    correction: builtins.float | None = None,
) -> Tensor:
    """Compute the variance along the specified axis."""

def vdot(a: _Values, b: _Values) -> Tensor:
    """Multiply two flattened arrays, the first one conjugated."""

def vecdot(x1: _Values, x2: _Values, *, axis: builtins.int = -1, dim: _Axis = -1) -> Tensor:
    """Sum products along one axis, the first factor conjugated."""

def vector_norm(
    x: _Values,
    *,
    axis: _Axis | None = None,
    keepdims: builtins.bool = False,
    ord: builtins.float = 2,
    dim: _Axis = None,
    keepdim: builtins.bool = False,
) -> Tensor:
    """Give the length of vectors, of any order."""

def vsplit(ary: _Values, indices_or_sections: Any) -> builtins.tuple[Tensor, ...]:
    """Split along the first axis."""

def vstack(tup: Sequence[_Values]) -> Tensor:
    """Join along the first axis; vectors become rows."""

@overload
def where(condition: _Values) -> builtins.tuple[Tensor, ...]: ...
@overload
def where(condition: _Values, x: _Values, y: _Values, /) -> Tensor: ...
