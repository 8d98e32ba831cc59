"""The forms a call can take, and tensors to try them with, for all modules of this folder."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

import aiograd as ag

T = TypeVar("T")

FORMS = ("async", "sync", "remote")
LAYOUTS = ("dense", "sparse")


async def call(form: str, to: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function in one of its forms; "local" runs it here, without a call."""
    if form == "local":
        result = func(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    if form == "sync":
        value, error = await asyncio.to_thread(_blocking, to, func, args, kwargs)
        if error is not None:
            raise error
        return value
    if form == "remote":
        return await ag.remote(to, func, args, kwargs).to_here()
    assert form == "async"
    return await ag.rpc_async(to, func, args, kwargs)


def _blocking(to: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return ag.rpc_sync(to, func, args, kwargs), None
    except Exception as error:  # carried over by us: an executor would make a new TimeoutError
        return None, error


async def outside(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run something outside of autograd contexts, as the worker started last: the driver."""

    async def body() -> T:
        return await work(*args)

    return await asyncio.get_running_loop().create_task(body(), context=contextvars.Context())


def leaf(layout: str = "dense", seed: int = 0, grad: bool = True) -> ag.Tensor:
    """A 3 × 3 tensor, full or with five entries."""
    rng = np.random.default_rng(seed)
    if layout == "dense":
        return ag.tensor(rng.standard_normal((3, 3)), requires_grad=grad)
    places = np.array(np.divmod(rng.permutation(9)[:5], 3))
    return ag.sparse.coo_tensor(places, rng.standard_normal(5), (3, 3), requires_grad=grad)


def total(tensor: ag.Tensor) -> ag.Tensor:
    """The sum of all entries, whatever the layout."""
    return ag.sparse.sum(tensor) if tensor.is_sparse else tensor.sum()


def full(tensor: ag.Tensor) -> Any:
    """The value as an array, whatever the layout."""
    return (ag.sparse.to_dense(tensor) if tensor.is_sparse else tensor).numpy()


def same(found: ag.Tensor, expected: ag.Tensor) -> None:
    """Equal in layout, dtype, shape and value."""
    assert found.is_sparse == expected.is_sparse
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(full(found), full(expected), rtol=1e-12)


def plus(x: Any, y: Any) -> Any:
    return x + y


def current_context_id() -> int:
    return ag.current_context().id


def has_context(context_id: int) -> bool:
    try:
        return ag.get_context(context_id).id == context_id
    except ag.errors.UnknownContext:
        return False


async def backward_passes(name: str) -> int:
    """How many backward passes a worker takes part in at the moment."""
    return (await ag.rpc_async(name, ag.debug_info))["backward_passes"]
