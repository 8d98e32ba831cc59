# Written by `make stubs` with numpy 2.4; do not edit.

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import numpy.typing as npt

from aiograd.autograd.ops.linalg import Eigh, Qr, Slogdet, Svd
from aiograd.autograd.tensor import Tensor

_Values: TypeAlias = Tensor | npt.ArrayLike
_Axis: TypeAlias = SupportsIndex | builtins.tuple[SupportsIndex, ...] | None
_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

__all__ = [
    "cholesky",
    "det",
    "eigh",
    "eigvalsh",
    "inv",
    "matrix_norm",
    "matrix_power",
    "multi_dot",
    "norm",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "vector_norm",
]

def cholesky(a: _Values, /, *, upper: builtins.bool = False) -> Tensor:
    """Cholesky decomposition."""

def det(a: _Values) -> Tensor:
    """Compute the determinant of an array."""

def eigh(a: _Values, UPLO: builtins.str = "L") -> Eigh:
    """Give eigenvalues and eigenvectors of a Hermitian matrix."""

def eigvalsh(a: _Values, UPLO: builtins.str = "L") -> Tensor:
    """Give the eigenvalues of a Hermitian matrix."""

def inv(a: _Values) -> Tensor:
    """Compute the inverse of a matrix."""

def matrix_norm(x: _Values, *, keepdims: builtins.bool = False, ord: Any = "fro") -> Tensor:
    """Give a norm of the matrices in the last two axes."""

def matrix_power(a: _Values, n: builtins.int) -> Tensor:
    """Multiply a square matrix with itself n times."""

def multi_dot(arrays: Sequence[_Values] | _Values) -> Tensor:
    """Multiply a chain of matrices in the cheapest order."""

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

def pinv(a: _Values, rcond: Any = None, hermitian: builtins.bool = False) -> Tensor:
    """Compute the (Moore-Penrose) pseudo-inverse of a matrix."""

def qr(a: _Values, mode: builtins.str = "reduced") -> Qr:
    """Give the reduced QR decomposition."""

def slogdet(a: _Values) -> Slogdet:
    """Give sign and logarithm of the determinant."""

def solve(a: _Values, b: _Values) -> Tensor:
    """Solve a linear matrix equation, or system of linear scalar equations."""

@overload
def svd(
    a: _Values, full_matrices: builtins.bool = True, compute_uv: Literal[True] = True
) -> Svd: ...
@overload
def svd(
    a: _Values, full_matrices: builtins.bool = True, *, compute_uv: Literal[False]
) -> Tensor: ...
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
