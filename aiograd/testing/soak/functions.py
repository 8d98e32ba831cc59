"""What the workers of a soak are asked to do: in whole numbers, so that sums are exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.rpc.api import inline, rpc_async, rpc_sync
from aiograd.rref import RRef


def double(x: Any) -> Any:
    return x + x


@inline
def triple(x: Any) -> Any:
    return 3 * x


async def negative(x: Any) -> Any:
    await asyncio.sleep(0)
    return -x


async def pass_on(to: str, x: Any) -> Any:
    """Double x on a third worker."""
    return await rpc_async(to, double, (x,))


def pass_on_in_thread(to: str, x: Any) -> Any:
    return rpc_sync(to, double, (x,))


def numbers(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=float)


async def total_of(reference: RRef) -> float:
    """Fetch what a third worker holds, and sum it up."""
    return float((await reference.to_here()).sum())


async def count_to(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield number


async def linger() -> None:
    await asyncio.sleep(3600.0)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x * w


async def squares_by(to: str, y: Tensor) -> Tensor:
    """The sum of squares, of which a third worker makes the squares."""
    squared: Tensor = await rpc_async(to, product, (y, y))
    total: Tensor = squared.sum()
    return total
