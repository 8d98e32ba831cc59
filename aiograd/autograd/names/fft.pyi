# Written by `make stubs` with numpy 2.4; do not edit.

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from aiograd.autograd.tensor import Tensor

_Values: TypeAlias = Tensor | npt.ArrayLike
_Axis: TypeAlias = SupportsIndex | builtins.tuple[SupportsIndex, ...] | None
_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

__all__ = [
    "fft",
    "fft2",
    "fftn",
    "fftshift",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
]

def fft(
    a: _Values,
    n: builtins.int | None = None,
    axis: _Axis = -1,
    norm: builtins.str | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = -1,
) -> Tensor:
    """Compute the one-dimensional discrete Fourier Transform."""

def fft2(a: _Values, s: Any = None, axes: Any = ..., norm: builtins.str | None = None) -> Tensor:
    """Compute the 2-dimensional discrete Fourier Transform."""

def fftn(a: _Values, s: Any = None, axes: Any = None, norm: builtins.str | None = None) -> Tensor:
    """Compute the N-dimensional discrete Fourier Transform."""

def fftshift(x: _Values, axes: Any = None) -> Tensor:
    """Shift the zero-frequency component to the center of the spectrum."""

def ifft(
    a: _Values,
    n: builtins.int | None = None,
    axis: _Axis = -1,
    norm: builtins.str | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = -1,
) -> Tensor:
    """Compute the one-dimensional inverse discrete Fourier Transform."""

def ifft2(a: _Values, s: Any = None, axes: Any = ..., norm: builtins.str | None = None) -> Tensor:
    """Compute the 2-dimensional inverse discrete Fourier Transform."""

def ifftn(a: _Values, s: Any = None, axes: Any = None, norm: builtins.str | None = None) -> Tensor:
    """Compute the N-dimensional inverse discrete Fourier Transform."""

def ifftshift(x: _Values, axes: Any = None) -> Tensor: ...
def irfft(
    a: _Values,
    n: builtins.int | None = None,
    axis: builtins.int = -1,
    norm: builtins.str | None = None,
    *,
    dim: _Axis = -1,
) -> Tensor:
    """Transform half a spectrum back to real values."""

def irfft2(a: _Values, s: Any = None, axes: Any = ..., norm: builtins.str | None = None) -> Tensor:
    """Computes the inverse of `rfft2`."""

def irfftn(a: _Values, s: Any = None, axes: Any = None, norm: builtins.str | None = None) -> Tensor:
    """Computes the inverse of `rfftn`."""

def rfft(
    a: _Values,
    n: builtins.int | None = None,
    axis: _Axis = -1,
    norm: builtins.str | None = None,
    out: Tensor | np.ndarray[Any, Any] | None = None,
    *,
    dim: _Axis = -1,
) -> Tensor:
    """Compute the one-dimensional discrete Fourier Transform for real input."""

def rfft2(a: _Values, s: Any = None, axes: Any = ..., norm: builtins.str | None = None) -> Tensor:
    """Compute the 2-dimensional FFT of a real array."""

def rfftn(a: _Values, s: Any = None, axes: Any = None, norm: builtins.str | None = None) -> Tensor:
    """Compute the N-dimensional discrete Fourier Transform for real input."""
