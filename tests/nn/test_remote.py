"""A handle to a module elsewhere, with a timeout. `tests/conformance` compares it with torch's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded


class Slow(ag.nn.Module):
    async def forward(self, seconds: float, timeout: str = "an argument of forward") -> str:
        await asyncio.sleep(seconds)
        return timeout


async def test_a_call_within_a_time_fails_after_it(cluster: Any) -> None:
    async with cluster(1):
        module = ag.nn.RemoteModule("worker0", Slow)
        with pytest.raises(DeadlineExceeded, match=r"0\.05"):
            await module.within(0.05)(60)
        assert await module.within(30)(0) == "an argument of forward"
        assert await module.within(30).forward_async(0, timeout="mine") == "mine"
        assert module.timeout is None
        assert module.within(3).within(None).timeout is None
        for bad in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                module.within(bad)


async def test_the_time_of_a_handle_stays_here(cluster: Any) -> None:
    async with cluster(2):
        module = ag.nn.RemoteModule("worker0", Slow).within(3)
        sent = await ag.rpc_async("worker1", _timeout_of, args=(module,))
        assert sent is None


def _timeout_of(module: Any) -> Any:
    return module.timeout
