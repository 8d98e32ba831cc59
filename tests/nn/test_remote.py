"""A handle to a module elsewhere, with a timeout. `tests/conformance` compares it with torch's."""

from __future__ import annotations

import asyncio
import threading
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


@ag.serial
class Careful(ag.nn.Module):
    """Counts how many of its calls run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.most = 0
        self.order: list[Any] = []
        self.gate = threading.Event()
        Careful.last = self  # the workers of these tests share a process

    last: Careful

    def forward(self, number: int) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.gate.wait(10)
        self.order.append(number)
        self.inside -= 1
        return number

    def train(self, mode: bool = True) -> Careful:
        self.order.append(f"train {mode}")
        return super().train(mode)


async def test_calls_of_a_serial_module_run_one_at_a_time_in_order(cluster: Any) -> None:
    async with cluster(1):
        module = await ag.nn.RemoteModule("worker0", Careful)
        first = [module(number) for number in range(5)]
        switched = asyncio.create_task(module.eval())
        await asyncio.sleep(0)  # the task sends its call
        last = module.forward_async(5)
        again = module.module_rref.rpc_async().forward(6)  # the queue is that of the object
        Careful.last.gate.set()
        assert await asyncio.gather(*first, last, again) == list(range(7))
        await switched
        assert Careful.last.most == 1
        assert Careful.last.order == [0, 1, 2, 3, 4, "train False", 5, 6]


class Where(ag.nn.Module):
    def forward(self) -> str:
        return threading.current_thread().name


class WhereInline(ag.nn.Module):
    @ag.inline
    def forward(self) -> str:
        return threading.current_thread().name


class WhereLater(ag.nn.Module):
    async def forward(self) -> str:
        return threading.current_thread().name


async def test_forward_runs_where_a_function_of_its_kind_runs(cluster: Any) -> None:
    async with cluster(1):
        here = threading.current_thread().name
        found = [
            await ag.nn.RemoteModule("worker0", kind)() for kind in (Where, WhereInline, WhereLater)
        ]
        assert found[0] != here
        assert found[1:] == [here, here]
