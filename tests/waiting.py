"""Wait for what has no event to await: the state of another worker, of a thread, of a process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], within: float = 20.0) -> None:
    """Wait until a condition holds, or gives something true when awaited; fail if it never does."""
    try:
        async with asyncio.timeout(within) as limit:
            while not await _outcome(condition()):
                await asyncio.sleep(0.002)
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"what was waited for did not come within {within:g} s") from None


async def _outcome(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found
