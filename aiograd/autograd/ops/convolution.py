"""Convolution and pooling over images, as matrix products over sliding windows.

Images are (batch, channels, height, width), kernels (out, in / groups, height, width).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.table import as_tensor, composite, conj

Pair = tuple[int, int]


def pair(value: Any, what: str) -> Pair:
    """Return `(3, 3)` for `3`; raise ValueError for anything but one number or two."""
    both = (value, value) if isinstance(value, int | np.integer) else tuple(value)
    if len(both) != 2:
        raise ValueError(f"{what} is one number or two, not {value!r}")
    return int(both[0]), int(both[1])


# ── windows ─────────────────────────────────────────────────────────────────────────────────────


def _windows_shape(image: Any, kernel: Pair, stride: Pair, dilation: Pair) -> Pair:
    """Return how many positions the kernel has in an image, along each of its axes."""
    oh = (image[0] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    ow = (image[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    return oh, ow


def _windows_view(a: Array, kernel: Pair, stride: Pair, dilation: Pair) -> Any:
    """Return (n, c, kh, kw, oh, ow): every position of the kernel, without copying."""
    (n, c, *image), (kh, kw) = a.shape, kernel
    oh, ow = _windows_shape(image, kernel, stride, dilation)
    if oh <= 0 or ow <= 0:
        raise ValueError(f"a kernel of {kernel} does not fit into an image of {tuple(image)}")
    sn, sc, sh, sw = a.strides
    # The image axes last: the product over windows has to copy this view, and rows of the image are
    # then copied as whole runs.
    steps = (sn, sc, sh * dilation[0], sw * dilation[1], sh * stride[0], sw * stride[1])
    # Read-only: windows overlap, and a write to one would change others.
    return as_strided(a, (n, c, kh, kw, oh, ow), steps, writeable=False)


def _add_windows(values: Any, shape: Any, kernel: Pair, stride: Pair, dilation: Pair) -> Any:
    """Add windows up at their positions in an image of `shape`: the adjoint of taking them."""
    total = np.zeros(shape, values.dtype)
    # A step per element of the kernel, nine for 3 × 3, each over all windows of all images.
    for i, j, place in _places(values.shape[4:], kernel, stride, dilation):
        total[place] += values[:, :, i, j]
    return total


def _places(out: Any, kernel: Pair, stride: Pair, dilation: Pair) -> Iterator[tuple[Any, ...]]:
    """Yield for every element (i, j) of the kernel its positions in the image, in all windows."""
    for i, j in np.ndindex(*kernel):
        top, left = i * dilation[0], j * dilation[1]
        rows = slice(top, top + stride[0] * (out[0] - 1) + 1, stride[0])
        columns = slice(left, left + stride[1] * (out[1] - 1) + 1, stride[1])
        yield i, j, (..., rows, columns)


windows: Op = op(
    "windows",
    _windows_view,
    lambda g, y, a, kernel=(), stride=(), dilation=(): _added.of(
        g, shape=a.shape, kernel=kernel, stride=stride, dilation=dilation
    ),
)
_added: Op = op(
    "added_windows",
    _add_windows,
    lambda g, y, values, shape=(), kernel=(), stride=(), dilation=(): windows.of(
        g, kernel=kernel, stride=stride, dilation=dilation
    ),
)


# ── convolution ─────────────────────────────────────────────────────────────────────────────────


def _columns(a: Array, kernel: Pair, stride: Pair, dilation: Pair, groups: int) -> Any:
    """Return (n, groups, c/groups·kh·kw, oh·ow): every window as a column."""
    view = windows.of(a, kernel=kernel, stride=stride, dilation=dilation)
    n, c, kh, kw, oh, ow = view.shape
    return view.reshape(n, groups, (c // groups) * kh * kw, oh * ow)


def _conv_forward(a: Array, w: Array, stride: Pair, dilation: Pair, groups: int) -> Any:
    """One matrix product per image and group, by BLAS."""
    n, out, (kh, kw) = a.shape[0], w.shape[0], w.shape[2:]
    oh, ow = _windows_shape(a.shape[2:], (kh, kw), stride, dilation)
    kernels = w.reshape(groups, out // groups, -1)
    y = np.matmul(kernels, _columns(a, (kh, kw), stride, dilation, groups))
    return y.reshape(n, out, oh, ow)


def _grouped(g: Array, groups: int) -> Any:
    """Return the gradient as a matrix per image and group."""
    n, out, oh, ow = g.shape
    return g.reshape(n, groups, out // groups, oh * ow)


def _conv_input(
    g: Array,
    y: Array,
    a: Array,
    w: Array,
    stride: Pair = (1, 1),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Any:
    """The transposed kernel times the gradient gives windows, which are added up."""
    n, c = a.shape[:2]
    out, _, kh, kw = w.shape
    kernels = w.reshape(groups, out // groups, -1)
    columns = np.matmul(np.swapaxes(conj(kernels), -1, -2), _grouped(g, groups))
    values = columns.reshape(n, c, kh, kw, *g.shape[2:])
    return _added.of(values, shape=a.shape, kernel=(kh, kw), stride=stride, dilation=dilation)


def _conv_kernel(
    g: Array,
    y: Array,
    a: Array,
    w: Array,
    stride: Pair = (1, 1),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Any:
    """The gradient times the windows, summed over the images."""
    # Made again from the image: kh·kw times its memory would be too much to save.
    columns = _columns(a, w.shape[2:], stride, dilation, groups)
    total = np.matmul(_grouped(g, groups), np.swapaxes(conj(columns), -1, -2))
    return total.sum(axis=0).reshape(w.shape)


_conv: Op = op("conv2d", _conv_forward, _conv_input, _conv_kernel)


@composite()
def conv2d(
    input: Values,
    weight: Values,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Slide kernels over images.

    >>> ag.conv2d(ag.ones(1, 1, 4, 4), ag.ones(2, 1, 3, 3)).shape
    (1, 2, 2, 2)
    """
    a, w = as_tensor(input), as_tensor(weight)
    # One image without a batch, as in torch.
    if a.ndim == 3:
        lone = conv2d(a[None], w, bias, stride, padding, dilation, groups)
        return lone[0]
    # Checked before anything is padded: as_strided reads whatever memory it is told to.
    if a.ndim != 4 or w.ndim != 4 or a.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"kernels {w.shape} in {groups} groups do not fit images {a.shape}")
    dilation, stride = pair(dilation, "dilation"), pair(stride, "stride")
    a = _with_border(a, _border(padding, w.shape[2:], dilation, stride))
    y = _conv(a, w, stride=stride, dilation=dilation, groups=groups)
    return y if bias is None else y + as_tensor(bias).reshape(-1, 1, 1)


@composite()
def conv1d(
    input: Values,
    weight: Values,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Slide kernels over sequences: (batch, channels, length), or one without a batch.

    >>> ag.conv1d(ag.ones(1, 1, 4), ag.ones(1, 1, 2)).tolist()
    [[[2.0, 2.0, 2.0]]]
    """
    a, w = as_tensor(input), as_tensor(weight)
    if a.ndim not in (2, 3) or w.ndim != 3:
        raise ValueError(f"kernels {w.shape} do not fit sequences {a.shape}")
    # A sequence is an image one pixel high.
    border = padding if isinstance(padding, str) else (0, _only(padding, "padding"))
    steps = (1, _only(stride, "stride")), border, (1, _only(dilation, "dilation"))
    return conv2d(a[..., None, :], w[..., None, :], bias, *steps, groups)[..., 0, :]


def _only(value: Any, what: str) -> int:
    """Return a number, or the only one of a tuple."""
    numbers = (value,) if isinstance(value, int | np.integer) else tuple(value)
    if len(numbers) != 1:
        raise ValueError(f"{what} is one number for a sequence, not {value!r}")
    return int(numbers[0])


def _border(padding: Any, kernel: Any, dilation: Pair, stride: Pair) -> list[Pair]:
    """Return the padding before and after, for each axis of the image."""
    if padding == "valid":
        padding = 0
    if padding != "same":
        return [(p, p) for p in pair(padding, "padding")]
    if stride != (1, 1):
        raise ValueError("padding='same' needs stride 1")
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    # An odd rest goes to the end, as in torch.
    return [(total // 2, total - total // 2) for total in totals]


def _with_border(a: Values, border: list[Pair], value: float = 0.0) -> Any:
    """Return the image with its padding; the image itself if there is none."""
    if not any(n for side in border for n in side):
        return a
    return np.pad(a, [(0, 0), (0, 0), *border], constant_values=value)


# ── pooling ─────────────────────────────────────────────────────────────────────────────────────


def _prepared(
    input: Values, kernel_size: Any, stride: Any, padding: Any, fill: float
) -> tuple[Any, Pair, Pair]:
    """Return the image with its border, the size of the windows and the step between them."""
    a = as_tensor(input)
    if a.ndim != 4:
        raise ValueError(f"pooling takes (batch, channels, height, width), not {a.shape}")
    kernel = pair(kernel_size, "kernel_size")
    step = kernel if stride is None else pair(stride, "stride")
    border = pair(padding, "padding")
    if 2 * border[0] > kernel[0] or 2 * border[1] > kernel[1]:
        raise ValueError("padding is at most half the kernel")
    return _with_border(a, [(border[0],) * 2, (border[1],) * 2], fill), kernel, step


def _each(shape: Any, kernel: Pair, stride: Pair) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a window, numbered, and their positions in all windows."""
    found = _places(shape, kernel, stride, (1, 1))
    return ((number, place) for number, (*_, place) in enumerate(found))


def _largest(a: Array, kernel: Pair, stride: Pair) -> Any:
    """Return which element of each window is the largest: the first one at a tie, as in torch.

    Compares whole shifted images, one per element of the window. An `argmax` over windows would
    first copy each of them.
    """
    out = _windows_view(a, kernel, stride, (1, 1)).shape[4:]
    places = [place for _, place in _each(out, kernel, stride)]
    best = functools.reduce(np.maximum, [a[place] for place in places])
    # nan is the largest of all, and equals nothing, not even itself. The extra test is only made
    # where there is one.
    lost = np.isnan(best).any()
    missed = np.ones(best.shape, bool)
    # One byte per window for usual kernels: this array is kept for the backward pass.
    chosen = np.zeros(best.shape, np.min_scalar_type(len(places)))
    for place in places:
        differs = a[place] != best
        missed &= differs & ~np.isnan(a[place]) if lost else differs
        # Counts up as long as no element has equalled the largest: in the end the number of the
        # first that did.
        chosen += missed
    return chosen


def _pick(a: Array, chosen: Any, kernel: Pair, stride: Pair) -> Any:
    """Return the chosen element of each window."""
    picked = np.zeros(chosen.shape, a.dtype)
    for number, place in _each(chosen.shape[2:], kernel, stride):
        picked = np.where(chosen == number, a[place], picked)
    return picked


def _spread(values: Any, chosen: Any, shape: Any, kernel: Pair, stride: Pair) -> Any:
    """Add values at the chosen elements; adjoint of `_pick`."""
    total = np.zeros(shape, values.dtype)
    for number, place in _each(chosen.shape[2:], kernel, stride):
        total[place] += values * (chosen == number)
    return total


_picked: Op = op(
    "picked_from_windows",
    _pick,
    lambda g, y, a, chosen=(), kernel=(), stride=(): _spread_out.of(
        g, chosen=chosen, shape=a.shape, kernel=kernel, stride=stride
    ),
)
_spread_out: Op = op(
    "spread_over_windows",
    _spread,
    lambda g, y, values, chosen=(), shape=(), kernel=(), stride=(): _picked.of(
        g, chosen=chosen, kernel=kernel, stride=stride
    ),
)


@composite()
def max_pool2d(input: Values, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Any:
    """Keep the largest element of every window; at a tie the first one gets the gradient.

    >>> ag.max_pool2d(ag.arange(4.0).reshape(1, 1, 2, 2), 2).tolist()
    [[[[3.0]]]]
    """
    if np.ndim(input) == 3:
        return max_pool2d(as_tensor(input)[None], kernel_size, stride, padding)[0]
    # A border that never wins.
    a, kernel, step = _prepared(input, kernel_size, stride, padding, -np.inf)
    return _picked(a, chosen=_largest(a.raw, kernel, step), kernel=kernel, stride=step)


def _pooled(input: Array, kernel_size: Any, stride: Any, padding: Any) -> Any:
    """Return the windows to average."""
    a, kernel, step = _prepared(input, kernel_size, stride, padding, 0.0)
    return windows(a, kernel=kernel, stride=step, dilation=(1, 1))


@composite()
def avg_pool2d(
    input: Values,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    count_include_pad: bool = True,
) -> Any:
    """Average every window.

    >>> ag.avg_pool2d(ag.arange(4.0).reshape(1, 1, 2, 2), 2).tolist()
    [[[[1.5]]]]
    """
    if np.ndim(input) == 3:
        lone = as_tensor(input)[None]
        return avg_pool2d(lone, kernel_size, stride, padding, count_include_pad)[0]
    view = _pooled(input, kernel_size, stride, padding)
    if count_include_pad:
        return view.mean(axis=(2, 3))
    # How many elements of each window lie in the image, from one image of ones.
    ones = np.ones((1, 1, *np.shape(input)[2:]), view.dtype)
    sizes = _pooled(ones, kernel_size, stride, padding).sum(axis=(2, 3))
    return view.sum(axis=(2, 3)) / sizes.raw
