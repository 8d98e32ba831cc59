"""Fourier transforms, found as `ag.fft.<name>` too.

Complex transforms are linear, and the gradient of one is its conjugate transpose: the inverse
transform without its scale. Transforms over several axes are made of those over one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op
from aiograd.autograd.ops.table import as_tensor, composite, numpy_op

# The norm under which the inverse has the scale of the forward transform: none where that had none,
# the same 1/n where it had that.
_SCALE: dict[str | None, Any] = {
    None: "forward",
    "backward": "forward",
    "forward": "backward",
    "ortho": "ortho",
}


def _fitted(g: Array, n: int, axis: int) -> Any:
    """Cut or fill with zeros, as the transform did with its input."""
    size = g.shape[axis]
    if size == n:
        return g
    axis %= g.ndim
    if size > n:
        return g[(slice(None),) * axis + (slice(n),)]
    return np.pad(g, [(0, n - size if i == axis else 0) for i in range(g.ndim)])


def _complex(function: Any, back: Any) -> Op:
    """Declare a complex transform, with the one that undoes it."""

    def rule(g: Array, y: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Any:
        return _fitted(back(g, n=g.shape[axis], axis=axis, norm=_SCALE[norm]), a.shape[axis], axis)

    return numpy_op(function, rule)


fft: Op = _complex(np.fft.fft, np.fft.ifft)
ifft: Op = _complex(np.fft.ifft, np.fft.fft)


def _rfft(g: Array, y: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Any:
    """Half a spectrum, filled up with zeros and transformed back; the input is real."""
    length = a.shape[axis] if n is None else n
    full = _fitted(g, length, axis) if length > 1 else g
    back = np.fft.ifft(full, n=length, axis=axis, norm=_SCALE[norm])
    return _fitted(np.real(back), a.shape[axis], axis)


rfft: Op = numpy_op(np.fft.rfft, _rfft)


@composite(np.fft.irfft)
def irfft(a: Values, n: int | None = None, axis: int = -1, norm: str | None = None) -> Any:
    """Transform half a spectrum back to real values."""
    a = as_tensor(a)
    half = (2 * (a.shape[axis] - 1) if n is None else n) // 2 + 1
    length = 2 * (a.shape[axis] - 1) if n is None else n
    a = np.moveaxis(_fitted(a, half, axis), axis, -1)
    # The whole spectrum of a real signal: its second half mirrors the first. The first entry, and
    # the last one of an even length, must be real; numpy ignores their imaginary parts, and so do
    # we.
    first = np.real(a[..., :1])
    last = half - 1 if length % 2 == 0 else half
    parts = [first, a[..., 1:last]]
    if length % 2 == 0 and half > 1:
        parts.append(np.real(a[..., last:]))
    parts.append(np.conjugate(np.flip(a[..., 1:last], -1)))
    whole = np.concatenate([part.astype(a.dtype) for part in parts], axis=-1)
    return np.moveaxis(np.real(ifft(whole, norm=norm)), -1, axis)


def _over_axes(function: Callable[..., Any], reference: Any, default: Any) -> Callable[..., Any]:
    """Declare a transform over several axes."""

    def transform(a: Values, s: Any = None, axes: Any = default, norm: Any = None) -> Any:
        a = as_tensor(a)
        if axes is None:
            axes = tuple(range(a.ndim)) if s is None else tuple(range(-len(s), 0))
        sizes = [None] * len(axes) if s is None else s
        # Last axis first, as numpy does, where an axis occurs twice.
        for axis, n in zip(reversed(axes), reversed(sizes), strict=True):
            a = function(a, n=n, axis=axis, norm=norm)
        return a

    transform.__name__, transform.__doc__ = reference.__name__, reference.__doc__
    return composite(reference)(transform)


def _half(inner: Callable[..., Any], half: Any, reference: Any, default: Any, last: bool) -> Any:
    """Transforms to or from half a spectrum: the last axis by `half`, the others by `inner`."""

    def transform(a: Values, s: Any = None, axes: Any = default, norm: Any = None) -> Any:
        a = as_tensor(a)
        if axes is None:
            axes = tuple(range(a.ndim)) if s is None else tuple(range(-len(s), 0))
        sizes = [None] * len(axes) if s is None else list(s)
        # The axis that is halved must be transformed while the values are real: first on the way to
        # a spectrum, last on the way back.
        if not last:
            a = half(a, n=sizes[-1], axis=axes[-1], norm=norm)
        for axis, n in zip(axes[:-1], sizes[:-1], strict=True):
            a = inner(a, n=n, axis=axis, norm=norm)
        return half(a, n=sizes[-1], axis=axes[-1], norm=norm) if last else a

    transform.__name__, transform.__doc__ = reference.__name__, reference.__doc__
    return composite(reference)(transform)


rfft2: Callable[..., Any] = _half(fft, rfft, np.fft.rfft2, (-2, -1), last=False)
rfftn: Callable[..., Any] = _half(fft, rfft, np.fft.rfftn, None, last=False)
irfft2: Callable[..., Any] = _half(ifft, irfft, np.fft.irfft2, (-2, -1), last=True)
irfftn: Callable[..., Any] = _half(ifft, irfft, np.fft.irfftn, None, last=True)
fft2: Callable[..., Any] = _over_axes(fft, np.fft.fft2, (-2, -1))
ifft2: Callable[..., Any] = _over_axes(ifft, np.fft.ifft2, (-2, -1))
fftn: Callable[..., Any] = _over_axes(fft, np.fft.fftn, None)
ifftn: Callable[..., Any] = _over_axes(ifft, np.fft.ifftn, None)

fftshift: Op = numpy_op(np.fft.fftshift, lambda g, y, a, axes=None: np.fft.ifftshift(g, axes))
ifftshift: Op = numpy_op(np.fft.ifftshift, lambda g, y, a, axes=None: np.fft.fftshift(g, axes))
