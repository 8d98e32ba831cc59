"""Wait for a state that has no event to await: of another worker, a thread or a process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

INTERVAL = 0.002  # seconds; short against every timeout of the tests, and leaves the core to others


async def until(condition: Callable[[], Any], within: float = 20.0) -> None:
    """Wait until `condition()`, or what it returns when awaited, is true.

    Raise AssertionError when that does not happen `within` so many seconds.
    """
    try:
        async with asyncio.timeout(within) as limit:
            while not await _outcome(condition()):
                await asyncio.sleep(INTERVAL)
    except TimeoutError:
        # A condition may raise a TimeoutError of its own, and that one must not be renamed.
        if not limit.expired():
            raise
        raise AssertionError(f"the condition did not become true within {within:g} s") from None


async def _outcome(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


async def until_not(condition: Callable[[], Any], within: float = 20.0) -> None:
    """Wait until `condition()`, or what it returns when awaited, is false."""

    async def over() -> bool:
        return not await _outcome(condition())

    await until(over, within)
