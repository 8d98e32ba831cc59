"""A tensor as plain data: the name of its dtype, its shape, its strides and its bytes.

    ("dense",      dtype, shape, strides or None, bytes)
    ("quantized",  dtype, shape, bytes, scale, zero point)
    ("channels",   dtype, shape, bytes, scales, zero points, axis)   scales: data of a tensor again
    ("coo",        shape, coalesced, indices, values)                so are these
    ("compressed", layout, shape, outer indices, inner indices, values)

Bytes are a `uint8` array over the tensor's own memory, so the codecs borrow or share large ones,
and no dtype needs a case of its own: numpy knows a third of torch's. A view sends its own elements
and never the rest of its storage, which may hold what the recipient must not see.

Strides are None for a contiguous tensor. Dense memory in another order (transposed, channels last)
travels as it lies. A tensor with small gaps travels without them and gets them back; a large gap is
dropped, and the tensor arrives contiguous. An expanded one travels as its distinct elements.

What a restricted peer says is compared with the bytes that are there before memory is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch

from aiograd.errors import ProtocolError, SerializationError

Data = tuple[Any, ...]

DTYPES: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_LAYOUTS: Final = {
    str(layout): layout
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}
# Memory that the gaps of a tensor may cost its receiver: as much as its elements, or a page.
_GAPS: Final = 2
_PAGE: Final = 4096
_DIMENSIONS: Final = 64  # torch's own limit for most operations


# ── taking apart ────────────────────────────────────────────────────────────────────────────────


def take_apart(tensor: torch.Tensor, plain: bool = False) -> Data:
    """Return a tensor as plain data; SerializationError if it has no memory that could be sent.

    Its memory is borrowed, not copied, where it lies in one piece. `plain` is for peers that get
    every element as it is: nothing expanded, which could announce more memory than was sent.
    """
    device = tensor.device.type
    if device != "cpu":
        raise SerializationError(
            _describe(tensor),
            "a meta tensor has no memory to send; make a real one first"
            if device == "meta"
            else f"{device} tensors need a device map, which is not supported yet; "
            "send `tensor.cpu()`",
        )
    layout = tensor.layout
    if layout is torch.strided:
        if tensor.is_quantized:
            return _quantized(tensor, plain)
        if tensor.is_conj():
            tensor = tensor.resolve_conj()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        return _dense(tensor, plain)
    detached = tensor.detach()
    if layout is torch.sparse_coo:
        return (
            "coo",
            tuple(tensor.shape),
            detached.is_coalesced(),
            take_apart(detached._indices(), plain),
            take_apart(detached._values(), plain),
        )
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        outer, inner = detached.crow_indices(), detached.col_indices()
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        outer, inner = detached.ccol_indices(), detached.row_indices()
    else:  # mkldnn, whose blocks only one processor understands
        return take_apart(detached.to_dense(), plain)
    parts = (outer, inner, detached.values())
    return ("compressed", str(layout), tuple(tensor.shape), *[take_apart(p, plain) for p in parts])


def _describe(tensor: torch.Tensor) -> str:
    return f"a {tensor.device.type} tensor of shape {tuple(tensor.shape)}"


def _dense(tensor: torch.Tensor, plain: bool) -> Data:
    name, shape = NAMES[tensor.dtype], tuple(tensor.shape)
    if tensor.is_contiguous():
        return "dense", name, shape, None, _bytes(tensor)
    strides = _normal(shape, tensor.stride())
    once = tensor
    if not plain and 0 in strides:
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            if stride == 0 and size > 1:
                once = once.narrow(axis, 0, 1)
    extent = span(tuple(once.shape), strides)
    if extent == once.numel():
        return "dense", name, shape, strides, _bytes(once, once.numel())
    item = tensor.element_size()
    if extent is not None and (extent <= _GAPS * once.numel() or extent * item <= _PAGE):
        return "dense", name, shape, strides, _bytes(once.contiguous())
    if once is not tensor:
        # Expanded, and with gaps too large to keep: only the repetition is kept.
        once = once.contiguous()
        steps = zip(strides, _normal(tuple(once.shape), once.stride()), strict=True)
        kept = tuple([0 if old == 0 else new for old, new in steps])
        return "dense", name, shape, kept, _bytes(once)
    return "dense", name, shape, None, _bytes(tensor.contiguous())


def _normal(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides in which 0 says that an axis is expanded: an axis of one element is not."""
    pairs = zip(shape, strides, strict=True)
    return tuple([stride or 1 if size == 1 else stride for size, stride in pairs])


def span(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return how many elements lie between the first and the last one; None if some overlap."""
    if 0 in shape:
        return 0
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < extent:
                return None
            extent += stride * (size - 1)
    return extent


def _bytes(tensor: torch.Tensor, elements: int | None = None) -> np.ndarray:
    """Return the memory of a tensor that lies in one piece."""
    item = tensor.element_size()
    size = (tensor.numel() if elements is None else elements) * item
    if size == 0:
        return np.empty(0, np.uint8)
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * item, (size,), (1,))
    array: np.ndarray = flat.numpy()
    return array


def _quantized(tensor: torch.Tensor, plain: bool) -> Data:
    tensor = tensor.detach().contiguous()
    head = (NAMES[tensor.dtype], tuple(tensor.shape), _storage(tensor))
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return "quantized", *head, float(tensor.q_scale()), int(tensor.q_zero_point())
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = int(tensor.q_per_channel_axis())
    return "channels", *head, take_apart(scales, plain), take_apart(zeros, plain), axis


def _storage(tensor: torch.Tensor) -> np.ndarray:
    """Return all memory of a contiguous tensor; some dtypes put several numbers in a byte."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    size = min(storage.nbytes() - start, _quantized_size(tensor))
    if size == 0:
        return np.empty(0, np.uint8)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, start, (size,), (1,))
    array: np.ndarray = flat.numpy()
    return array


_PACKED: Final = {torch.quint4x2: 2, torch.quint2x4: 4}  # numbers in one byte


def _quantized_size(tensor: torch.Tensor) -> int:
    packed = _PACKED.get(tensor.dtype, 1)
    return int(-(-tensor.numel() // packed) * tensor.element_size())


# ── putting together ────────────────────────────────────────────────────────────────────────────


def put_together(data: Data, checked: bool = False) -> torch.Tensor:
    """Return the tensor of some data, over the memory that came with it.

    With `checked` the data is a restricted peer's: ProtocolError if a figure does not fit.
    """
    kind, *rest = data
    make = _MAKERS.get(kind) if kind.__class__ is str else None
    if make is None:
        raise ProtocolError(f"a torch tensor of an unknown kind: {str(kind)[:40]!r}")
    try:
        tensor: torch.Tensor = make(*rest, checked)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a torch tensor of {kind} parts that do not fit: {error}") from error
    return tensor


def _make_dense(name: str, shape: Any, strides: Any, memory: Any, checked: bool) -> torch.Tensor:
    dtype = _dtype(name)
    if checked:
        _check_sizes(shape)
        _check_bytes(memory)
        if strides is not None:
            _check_strides(shape, strides, dtype.itemsize)
        if prod(shape) * dtype.itemsize != len(memory):
            raise ProtocolError(f"{len(memory)} bytes for a {name} tensor of shape {shape}")
    if not len(memory):
        empty = torch.empty(shape, dtype=dtype)
        if empty.numel():
            raise ProtocolError(f"no memory for a tensor of shape {shape}")
        return empty if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # torch's kernels rely on aligned elements
    # In place, never as a view: torch refuses to change some views in place, and a tensor that
    # arrived must be as good as any other.
    if strides is None:
        return flat.resize_(shape)
    once = tuple([1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)])
    extent = span(once, strides)
    if extent != flat.numel():
        contiguous = flat.view(once)
        flat = torch.empty_strided(once, strides, dtype=dtype)
        flat.copy_(contiguous)
    return flat.as_strided_(shape, strides)


def _dtype(name: Any) -> torch.dtype:
    dtype = DTYPES.get(name) if name.__class__ is str else None
    if dtype is None:
        raise ProtocolError(
            f"a tensor of dtype {str(name)[:40]!r}, which torch {torch.__version__} does not know"
        )
    return dtype


def _check_sizes(shape: Any) -> None:
    fits = type(shape) is tuple and len(shape) <= _DIMENSIONS
    if not fits or any(type(size) is not int or not 0 <= size < 1 << 48 for size in shape):
        raise ProtocolError(f"a tensor of shape {str(shape)[:80]}")


def _check_strides(shape: tuple[int, ...], strides: Any, item: int) -> None:
    """Refuse strides that reach beyond the memory, or that repeat or spread elements widely."""
    fits = type(strides) is tuple and len(strides) == len(shape)
    if not fits or any(type(s) is not int or not 0 < s < 1 << 48 for s in strides):
        raise ProtocolError(f"a tensor of strides {str(strides)[:80]}")
    extent = span(shape, strides)
    # Never overlapping: a write to one element would change another. The gaps are bounded as they
    # are where a tensor is taken apart, or a few bytes could announce all memory there is.
    if extent is None or extent * item > max(_GAPS * prod(shape) * item, _PAGE):
        raise ProtocolError(f"a tensor of shape {shape} and strides {strides}")


def _check_bytes(memory: Any) -> None:
    if not (isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1):
        raise ProtocolError("the memory of a tensor is an array of bytes")


def _make_quantized(
    name: str, shape: Any, memory: Any, scale: Any, zero: Any, checked: bool
) -> torch.Tensor:
    dtype = _quantized_dtype(name, shape, memory, checked)
    made = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero, dtype=dtype)
    return _filled(made, memory)


def _make_channels(
    name: str, shape: Any, memory: Any, scales: Any, zeros: Any, axis: Any, checked: bool
) -> torch.Tensor:
    dtype = _quantized_dtype(name, shape, memory, checked)
    per_channel = put_together(scales, checked), put_together(zeros, checked)
    if checked and not (type(axis) is int and 0 <= axis < len(shape)):
        raise ProtocolError("a quantised tensor without such an axis")
    if checked and any(tuple(part.shape) != (shape[axis],) for part in per_channel):
        raise ProtocolError("a quantised tensor with too few scales")
    made = torch._empty_per_channel_affine_quantized(
        shape, scales=per_channel[0], zero_points=per_channel[1], axis=axis, dtype=dtype
    )
    return _filled(made, memory)


def _quantized_dtype(name: Any, shape: Any, memory: Any, checked: bool) -> torch.dtype:
    dtype = _dtype(name)
    if checked:
        _check_sizes(shape)
        _check_bytes(memory)
        # Before memory is allocated for it.
        if -(-prod(shape) // _PACKED.get(dtype, 1)) * dtype.itemsize != memory.nbytes:
            raise ProtocolError(f"{memory.nbytes} bytes for a {name} tensor of shape {shape}")
    return dtype


def _filled(made: torch.Tensor, memory: np.ndarray) -> torch.Tensor:
    target = _storage(made)
    if target.nbytes != memory.nbytes:
        raise ProtocolError(f"{memory.nbytes} bytes for a tensor of {target.nbytes}")
    target[:] = memory
    return made


def _make_coo(
    shape: Any, coalesced: Any, indices: Data, values: Data, checked: bool
) -> torch.Tensor:
    places, numbers = put_together(indices, checked), put_together(values, checked)
    if checked:
        _check_sizes(shape)
        # Whether they are in order is not taken on trust: kernels rely on it.
        coalesced = False
        # torch wants a stride as wide as the row, also of places that came with gaps.
        places, numbers = places.contiguous(), numbers.contiguous()
    return torch.sparse_coo_tensor(
        places, numbers, shape, is_coalesced=coalesced or None, check_invariants=checked
    )


def _make_compressed(
    layout: Any, shape: Any, outer: Data, inner: Data, values: Data, checked: bool
) -> torch.Tensor:
    known = _LAYOUTS.get(layout) if layout.__class__ is str else None
    if known is None:
        raise ProtocolError(f"a tensor of layout {str(layout)[:40]!r}")
    parts = [put_together(part, checked) for part in (outer, inner, values)]
    if checked:
        _check_sizes(shape)
        parts = [part.contiguous() for part in parts]
    return torch.sparse_compressed_tensor(*parts, shape, layout=known, check_invariants=checked)


_MAKERS: Final[dict[str, Any]] = {
    "dense": _make_dense,
    "quantized": _make_quantized,
    "channels": _make_channels,
    "coo": _make_coo,
    "compressed": _make_compressed,
}
