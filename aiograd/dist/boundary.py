"""Hooks on arrays at the boundary between two workers: clip, blur, watch, shrink.

A hook runs on the worker that an array leaves, for values on their way forward and for gradients on
their way back. Its result is what travels. The graph does not record it, so a gradient passes a
changed value as if it had not been changed. A smaller dtype is undone on arrival.

    ctx.on_crossing(boundary.clipped(1.0))
    ctx.on_crossing(boundary.noisy(0.01, np.random.default_rng(0)))
    ctx.on_crossing(boundary.as_dtype("float16"))

    >>> w = ag.ones(4, requires_grad=True)
    >>> async with ag.context() as ctx:
    ...     handle = ctx.on_crossing(ag.boundary.as_dtype("float16"))
    ...     y = await ag.rpc_async("worker1", ag.multiply, args=(w, 2.0))
    ...     await ctx.backward(y.sum())
    ...     print(ctx.gradients[w].dtype)
    float64
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from aiograd.autograd.tensor import Tensor, is_sparse_array
from aiograd.dist.foreign import Library, library_of
from aiograd.errors import GradError


class Crossing(NamedTuple):
    """One array on its way out: its context, its recipient and its direction."""

    context_id: int
    peer: str
    way: str  # "forward" or "backward"


CrossingHook = Callable[[Crossing, Any], Any]


def crossed(hooks: Mapping[int, CrossingHook], crossing: Crossing, array: Any) -> Any:
    """Return the array after all hooks, in order of registration; GradError if its shape changed."""
    library = library_of(array)
    if library is not None:
        return _crossed_foreign(library, hooks, crossing, array)
    for hook in list(hooks.values()):  # a copy: hooks may be removed meanwhile
        shown = _read_only(array)
        result = hook(crossing, shown)
        # The view itself would travel as a read-only array, and need the general codec.
        if result is not None and result is not shown:
            result = result.raw if isinstance(result, Tensor) else result
            result = result if is_sparse_array(result) else np.asarray(result)
            _check_shape(crossing, array, result)
            array = result  # of another dtype, maybe: the receiver is told the first one
    return array


def _crossed_foreign(
    library: Library, hooks: Mapping[int, CrossingHook], crossing: Crossing, tensor: Any
) -> Any:
    """Return a tensor of another library after all hooks; they see, and return, such tensors."""
    for hook in list(hooks.values()):
        shown, written = library.show(tensor)
        result = hook(crossing, shown)
        if written():
            raise GradError(
                f"a hook on the way to {crossing.peer} has written to the tensor it was shown; "
                "it must return another one",
                "modified",
            )
        if result is not None and result is not shown:
            if not isinstance(result, library.tensor_class):
                raise TypeError(f"a boundary hook returned a {type(result).__name__}")
            _check_shape(crossing, tensor, result)
            tensor = result
    return tensor


def _check_shape(crossing: Crossing, array: Any, result: Any) -> None:
    if result.shape != array.shape:
        raise GradError(
            f"a hook on the way to {crossing.peer} turned shape {tuple(array.shape)} into "
            f"{tuple(result.shape)}; it must keep the shape",
            "shape",
        )


def _read_only(array: Any) -> Any:
    """Return a read-only view: the array stays here as well, where others hold it."""
    if is_sparse_array(array):
        return array.with_values(_read_only(array.values))
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def crossed_all(
    hooks: Mapping[int, CrossingHook], context_id: int, peer: str, gradients: Iterable[Any] | None
) -> list[Any] | None:
    """Return the gradients of one edge after all hooks; recorded ones are not shown to them."""
    if gradients is None:
        return None
    crossing = Crossing(context_id, peer, "backward")
    # A recorded gradient is a Tensor: an array in its place would cut the graph of `create_graph`.
    return [
        g if g is None or getattr(g, "requires_grad", False) else crossed(hooks, crossing, g)
        for g in gradients
    ]


def clipped(limit: float, way: str = "backward") -> CrossingHook:
    """Scale arrays going that way so that their norm is at most `limit`.

        >>> async with ag.context() as ctx:
        ...     handle = ctx.on_crossing(ag.boundary.clipped(1.0, way="forward"))
        ...     w = ag.tensor([3.0, 4.0], requires_grad=True)
        ...     y = await ag.rpc_async("worker1", ag.norm, args=(w,))
        ...     print(round(float(y), 6))
        1.0
    """

    def hook(crossing: Crossing, array: Any) -> Any:
        """Scale one array."""
        if crossing.way != way:
            return None
        library = library_of(array)
        if library is not None:
            norm = library.norm(array)
            return array * (limit / norm) if norm > limit else None
        # Entries of one position add up, so their norm is known only when they are one.
        values = array.coalesce().values if is_sparse_array(array) else array
        norm = float(np.linalg.norm(values))
        return array * np.asarray(limit / norm, array.dtype) if norm > limit else None

    return hook


def noisy(scale: float, generator: np.random.Generator, way: str = "backward") -> CrossingHook:
    """Add normal noise to arrays going that way.

        >>> async with ag.context() as ctx:
        ...     handle = ctx.on_crossing(ag.boundary.noisy(0.0, np.random.default_rng(0), "forward"))
        ...     w = ag.tensor([3.0, 4.0], requires_grad=True)
        ...     y = await ag.rpc_async("worker1", ag.norm, args=(w,))
        ...     print(round(float(y), 6))
        5.0
    """

    def hook(crossing: Crossing, array: Any) -> Any:
        """Add noise to one array."""
        if crossing.way != way:
            return None
        library = library_of(array)
        if library is not None:
            return library.noise(array, scale, generator)
        return array + generator.normal(0.0, scale, array.shape).astype(array.dtype)

    return hook


def as_dtype(name: str) -> CrossingHook:
    """Send floating arrays in a smaller dtype; "bfloat16" needs the package ml_dtypes.

        >>> async with ag.context() as ctx:
        ...     handle = ctx.on_crossing(ag.boundary.as_dtype("float16"))
        ...     w = ag.tensor([1.0002], requires_grad=True)
        ...     print((await ag.rpc_async("worker1", ag.multiply, args=(w, 1))).tolist())
        [1.0]
    """
    dtype: np.dtype[Any] | None = None
    if name != "bfloat16":
        dtype = np.dtype(name)
    elif find_spec("ml_dtypes") is not None:
        # numpy has no such dtype. Imported here, because the package is optional.
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)

    def hook(crossing: Crossing, array: Any) -> Any:
        """Convert one array, if it is floating."""
        library = library_of(array)
        if library is not None:
            return library.cast(array, name)
        if dtype is None:
            raise ModuleNotFoundError("arrays of bfloat16 need the package ml_dtypes")
        return array.astype(dtype) if array.dtype.kind == "f" else None

    return hook
