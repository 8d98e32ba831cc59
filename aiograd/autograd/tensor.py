"""Tensor: a numpy array that remembers how it was made.

What a Tensor *is* lives here: its data, its node in the graph, its flags and hooks, in-place
writes and their versions. What can be *done* with it (operators, methods, numpy functions) is
attached by the tables in `ops/`.

Every write to the memory of a tensor raises a version. It is kept in a cell, a list of one number,
that all tensors over the same memory share (views, `detach()`); a node remembers the versions of
what it saved and refuses to play back what has changed since.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.grad_mode import recording
from aiograd.autograd.graph import Accumulate, Hook, HookHandle, Node, Part
from aiograd.autograd.handed_out import hand_out
from aiograd.autograd.names.methods import Methods
from aiograd.errors import GradError

_ndarray = np.ndarray
_new = object.__new__

_NO_NUMBERS = {"O": "objects", "U": "text", "S": "bytes", "M": "dates", "m": "times"}


def check_numbers(dtype: Any, name: str) -> None:
    """Raise TypeError if arrays of this dtype hold anything but numbers."""
    what = "records" if dtype.names is not None else _NO_NUMBERS.get(dtype.kind)
    if what is not None:
        raise TypeError(f"a Tensor needs numbers; got {name} of {what}")


class ElementCount(int):
    """A number of elements as numpy's `t.size` gives it, that torch's `t.size()` can call.

    An int in every other respect: it compares, hashes and counts as one, and travels as one. A
    method could not be a number, and numpy's meaning is the contract.
    """

    shape: tuple[int, ...]

    @overload
    def __call__(self) -> tuple[int, ...]: ...
    @overload
    def __call__(self, dim: int) -> int: ...
    def __call__(self, dim: int | None = None) -> tuple[int, ...] | int:
        """Return the shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def __reduce__(self) -> Any:
        return int, (int(self),)


class Tensor(Methods):
    """An array with a gradient. Make one with `ag.tensor`, `ag.from_numpy` or the makers.

    `==` is elementwise and the hash is identity, so tensors are dictionary keys by identity.

        >>> w = ag.tensor([1.0, 2.0], requires_grad=True)
        >>> (w * w).sum().backward()
        >>> w.grad
        tensor([2., 4.])
    """

    # One Tensor is made per operation: without a `__dict__`, and mostly by `wrap`, not by
    # `__init__`.
    __slots__ = (
        "__weakref__", "_accumulate", "_after_hooks", "_cell", "_grad", "_hooks", "_leaf", "_node",
        "raw",
    )  # fmt: skip

    # The ndarray (or sparse array) itself, for code that counts its writes: this library. Users get
    # at it by `data` and `numpy()`, which notice writes.
    raw: Any
    _node: Node | None  # what made it; None for a leaf
    # Whether it is a leaf that requires grad. In place of True: where it came from, if it was
    # computed elsewhere and came without its graph; text of it is for `GraphCutWarning`.
    _leaf: bool | object
    _grad: Tensor | None
    _cell: list[int] | None  # [version], shared by all tensors over the same memory
    _after_hooks: dict[int, Callable[[Tensor], None]] | None  # run when `_grad` was added to
    _hooks: dict[int, Hook] | None  # of a leaf; those of other tensors sit on the node
    _accumulate: weakref.ref[Accumulate] | None

    def __init__(self, data: Values, requires_grad: bool = False, dtype: Any = None) -> None:
        if isinstance(data, Tensor):
            data = data.raw
        if data is None:
            raise TypeError("a Tensor needs data; got None")
        # A copy: a new tensor shares memory with nothing. `from_numpy` and `detach` are for
        # sharing.
        self.raw = data if is_sparse_array(data) else np.array(data, dtype=dtype)
        check_numbers(self.raw.dtype, type(data).__name__)
        self._node = self._grad = self._cell = self._accumulate = None
        self._hooks = self._after_hooks = None
        self._leaf = False
        if requires_grad:
            self.requires_grad = True

    # ── attributes ──────────────────────────────────────────────────────────────────────────────

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed for it: a leaf with the flag, or made from one."""
        return self._node is not None or self._leaf is not False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Set the flag of a leaf; GradError if it cannot be changed."""
        if self._node is not None:
            if not value:
                raise GradError(
                    "requires_grad can only be cleared on a leaf; use detach() instead", "not_leaf"
                )
            return
        # A step from one whole number to the next has no slope.
        if value and self.raw.dtype.kind not in "fc":
            raise GradError(
                f"only floating point and complex tensors can require grad, not {self.dtype}",
                "dtype",
            )
        self._leaf = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set `requires_grad` and return the tensor itself."""
        self.requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no operation made this tensor."""
        return self._node is None

    @property
    def grad_fn(self) -> Node | None:
        """The node that made this tensor; None for a leaf."""
        node = self._node
        # Users see the operation, not our node for one of its outputs.
        return node.joint if isinstance(node, Part) else node

    @property
    def grad(self) -> Tensor | None:
        """The gradient that local `backward()` calls have summed up here."""
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        """Replace the gradient; GradError if its shape is not that of the tensor."""
        if value is not None:
            if not isinstance(value, Tensor):
                value = wrap(np.asarray(value))
            if value.shape != self.shape:
                raise GradError(
                    f"a gradient of shape {value.shape} does not fit shape {self.shape}",
                    "shape",
                )
        self._grad = value

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        shape: tuple[int, ...] = self.raw.shape
        return shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.raw.shape)

    @property
    def size(self) -> ElementCount:
        """The number of elements, zeros of a sparse tensor included; `size()` is the shape.

        >>> t = ag.zeros(2, 3)
        >>> t.size, t.size(), t.size(0)
        (6, (2, 3), 2)
        """
        count = ElementCount(self.raw.size)
        count.shape = self.raw.shape
        return count

    @property
    def dtype(self) -> Any:
        """The numpy dtype of the elements."""
        return self.raw.dtype

    @property
    def is_sparse(self) -> bool:
        """Whether the data is a sparse array (`ag.sparse`)."""
        return self.raw.__class__ is not _ndarray and is_sparse_array(self.raw)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements; of a sparse tensor, of what is stored."""
        return int(self.raw.nbytes)

    # ── the value, without recording ────────────────────────────────────────────────────────────

    def numpy(self) -> Array:
        """Return the value as an array over the same memory; nothing is recorded.

        A write to it that a graph would have to know of makes that graph's backward pass a
        GradError; the limits are in `autograd/handed_out.py`.
        """
        found: Array = self.raw.to_dense() if self.is_sparse else self.data
        return found

    @property
    def data(self) -> Any:
        """The value as an array over the same memory; of a sparse tensor, the sparse array.

        A write to it is no operation and is not recorded. One that a graph would have to know of
        is noticed, as with `numpy()`. Assigning replaces the value: graphs keep the old one.

        >>> w = ag.tensor([1.0, 2.0], requires_grad=True)
        >>> w.data *= 2
        >>> w
        tensor([2., 4.], requires_grad=True)
        """
        data = self.raw
        if data.__class__ is not _ndarray or not data.flags.writeable:
            return data
        view, self._cell = hand_out(data, self._cell)
        return view

    @data.setter
    def data(self, value: Any) -> None:
        """Replace the value without recording it."""
        if isinstance(value, Tensor):
            value = value.raw
        if not is_sparse_array(value):
            value = np.asarray(value)
            check_numbers(value.dtype, "data")
            # `t.data *= 2` has written to the memory, and assigns the same memory again.
            if self.raw.__class__ is _ndarray and _same_memory(value, self.raw):
                self._written()
                return
        self.raw = value
        self._cell = None  # versions belong to memory, and graphs hold the old one

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._dense() if copy else self.numpy(), dtype=dtype, copy=copy)

    def _dense(self) -> Array:
        """Return the array for reading: nobody else gets to hold it."""
        found: Array = self.raw if not self.is_sparse else self.raw.to_dense()
        return found

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.raw.item()

    def tolist(self) -> Any:
        """Return the value as nested Python lists."""
        return self._dense().tolist()

    def __float__(self) -> float:
        return float(self.raw.item())

    def __int__(self) -> int:
        return int(self.raw.item())

    def __complex__(self) -> complex:
        return complex(self.raw.item())

    def __bool__(self) -> bool:
        return bool(self.raw)

    def __index__(self) -> int:
        if self.raw.dtype.kind not in "iu" or self.raw.size != 1:
            raise TypeError("only a tensor with a single integer can be an index")
        return int(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def __contains__(self, value: Any) -> bool:
        # Python's own `in` would iterate and compare with each row, which is neither true nor
        # false.
        return (value._dense() if isinstance(value, Tensor) else value) in self._dense()

    def __format__(self, spec: str) -> str:
        # So that f"{loss:.3f}" works.
        return format(self.raw.item(), spec) if spec and self.raw.size == 1 else repr(self)

    def __repr__(self) -> str:
        if self.is_sparse:
            text = repr(self.raw)
        else:
            text = np.array2string(self.raw, separator=", ", prefix="tensor(")
        if self.raw.dtype not in (np.float64, np.int64, np.bool_):
            text += f", dtype={self.raw.dtype}"
        if self._node is not None:
            text += f", grad_fn={self.grad_fn!r}"
        elif self._leaf:
            text += ", requires_grad=True"
        return f"tensor({text})"

    # By identity, whatever `==` says: contexts, optimisers and `names=` use tensors as keys.
    __hash__ = object.__hash__

    # ── copies ──────────────────────────────────────────────────────────────────────────────────

    def detach(self) -> Tensor:
        """Return a tensor over the same memory and version, without the graph."""
        # The cell must exist before it can be shared.
        if self._cell is None:
            self._cell = [0]
        result = wrap(self.raw)
        result._cell = self._cell
        return result

    def __reduce__(self) -> Any:
        # Value and flag without the graph; where a graph shall cross (a call in a context), `dist`
        # sends the tensor in its own way.
        return rebuild, (type(self), self.raw, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # As in torch: a copy of a result would silently lose its graph.
        if self._node is not None:
            raise GradError(
                "only leaf tensors can be deep-copied; use detach() for a copy of the value",
                "not_leaf",
            )
        result = rebuild(type(self), self.raw.copy(), bool(self._leaf))
        memo[id(self)] = result
        if self._grad is not None:
            result._grad = rebuild(Tensor, self._grad.raw.copy(), False)
        return result

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def _before_write(self, value: Any = None) -> None:
        """Raise if the graph could not follow this write.

        The tape has no nodes for writes: a recorded write would change values that earlier nodes
        saved.
        """
        if recording.get():
            if self._leaf:
                raise GradError(
                    "a leaf that requires grad cannot be written to while operations are "
                    "recorded; wrap the write in `with ag.no_grad():`",
                    "inplace",
                )
            if self._node is not None or requires_grad(value):
                raise GradError(
                    "writing into a tensor is not recorded; build a new tensor instead "
                    "(ag.where, ag.concatenate, …), or write inside `with ag.no_grad():`",
                    "inplace",
                )

    def _written(self) -> None:
        """Count a write, so that graphs that saved this memory refuse to play it back."""
        cell = self._cell
        if cell is None:
            self._cell = [1]
        else:
            cell[0] += 1

    def __setitem__(self, index: Any, value: Values) -> None:
        self._before_write(value)
        # The write itself is numpy's; a failed one is not counted.
        self.raw[plain_index(index)] = value.raw if isinstance(value, Tensor) else value
        self._written()

    def copy_(self, value: Values) -> Tensor:
        """Overwrite the whole tensor in place, under the rules of `tensor[...] = value`."""
        self[...] = value
        return self

    def sort(self, axis: int = -1, kind: Any = None, order: Any = None) -> None:
        """Sort in place, as ndarray's own method does; `ag.sort` gives a sorted copy."""
        self._before_write()
        self.raw.sort(axis, kind, order)
        self._written()

    def partition(self, kth: Any, axis: int = -1, kind: Any = "introselect") -> None:
        """Partition in place, as ndarray's own method does; `ag.partition` gives a copy."""
        self._before_write()
        self.raw.partition(kth, axis, kind)
        self._written()

    # ── hooks and the graph ─────────────────────────────────────────────────────────────────────

    def register_hook(self, hook: Hook) -> HookHandle:
        """Call `hook(gradient)` once per pass with this tensor's summed gradient.

        It may return another gradient, or write to this one. The returned handle has `remove()`.
        """
        if not self.requires_grad:
            raise GradError("a hook needs a tensor that requires grad", "no_requires_grad")
        # Hooks of a result sit on its node, which lives as long as the result. The node of a leaf
        # comes and goes with the graphs that use it, so a leaf keeps its own.
        if self._node is not None:
            return HookHandle.on_list(self._node, hook)
        if self._hooks is None:
            self._hooks = {}
        return HookHandle.on_dict(self._hooks, hook)

    def renew(self) -> None:
        """Give the leaf an array of its own if something else, say a graph, holds the present one.

        An owner's optimiser calls this before it steps: graphs and messages of other trainers keep
        the values they saw.
        """
        # Two references are this attribute and the argument of the call.
        if sys.getrefcount(self.raw) > 2:
            self.raw = self.raw.copy()
            # The versions belong to the old memory.
            self._cell = None

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> HookHandle:
        """Call `hook(tensor)` after each local backward pass that added to this leaf's `.grad`."""
        # Only leaves have a `.grad` that passes add to.
        if not self._leaf:
            raise GradError("such a hook needs a leaf that requires grad", "not_leaf")
        if self._after_hooks is None:
            self._after_hooks = {}
        return HookHandle.on_dict(self._after_hooks, hook)

    def accumulator(self) -> Accumulate:
        """Return the node where gradients of this leaf arrive; the same while a graph holds it."""
        # Held weakly: the node refers to the leaf, and leaf and node would be a cycle. One node for
        # all uses in a graph, so that their gradients meet in one sum.
        node = self._accumulate() if self._accumulate is not None else None
        if node is None:
            node = Accumulate(self)
            self._accumulate = weakref.ref(node)
        return node

    if TYPE_CHECKING:  # attached by backward.py

        def backward(
            self, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False
        ) -> None:
            """Sum the gradients of the leaves up in their `grad`; see `backward.py`."""


def wrap(data: Any, node: Node | None = None, leaf: bool | object = False) -> Tensor:
    """Return a Tensor around an array as it is, made by `node`, or a leaf that requires grad.

    No copy, no check and no `__init__`: every result of every operation comes through here.
    """
    if data.__class__ is not _ndarray and not is_sparse_array(data):
        data = np.asarray(data)
    tensor = _new(Tensor)
    tensor.raw = data
    tensor._node = node
    tensor._leaf = leaf
    tensor._grad = tensor._cell = tensor._accumulate = tensor._hooks = tensor._after_hooks = None
    return tensor


def rebuild(cls: type[Tensor], data: Any, requires_grad: bool | object) -> Tensor:
    """Make a Tensor, or one of a subclass such as Parameter, without calling its constructor."""
    if cls is Tensor:
        return wrap(data, None, requires_grad)
    tensor = _new(cls)
    tensor.raw = data
    tensor._leaf = requires_grad
    tensor._node = tensor._grad = tensor._cell = tensor._accumulate = None
    tensor._hooks = tensor._after_hooks = None
    return tensor


def is_sparse_array(data: Any) -> bool:
    """Return whether a raw array is one of our sparse ones.

    They say so themselves, so that this module need not know their class.
    """
    return getattr(data, "is_sparse_array", False) is True


def _same_memory(one: Array, other: Array) -> bool:
    """Whether two arrays show the same elements of the same memory."""
    return bool(
        one.__array_interface__["data"] == other.__array_interface__["data"]
        and (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype)
    )


def requires_grad(value: Any) -> bool:
    """Whether a Tensor, or one in a list of values, requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, list | tuple) and any(map(requires_grad, value))


def plain_index(index: Any) -> Any:
    """Return an index with arrays in place of Tensors."""
    if isinstance(index, Tensor):
        return index.raw
    if isinstance(index, tuple):
        return tuple(plain_index(i) for i in index)
    return index
