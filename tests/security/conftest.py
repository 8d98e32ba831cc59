"""Whole workers in one loop, some of them restricted, and a log of what pickle looks up."""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiograd as ag
from aiograd.cluster.config import Plan
from aiograd.cluster.worker import Worker
from aiograd.rpc.transport.network import Network
from tests.support.agents import SECRET


class Lookups:
    """Counts what unpickling asks for; the hook stays for the whole process, and listens to one."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.listening = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.listening and event in ("pickle.find_class", "os.system"):
            self.events.append(f"{event} {args!r:.80}")


_LOOKUPS = Lookups()
sys.addaudithook(_LOOKUPS)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was unpickled, and what unpickling asked for, while the test ran."""
    _LOOKUPS.events = []
    loads = pickle.loads

    def noted(data: Any, **rest: Any) -> Any:
        _LOOKUPS.events.append(f"pickle.loads {bytes(data)!r:.80}")
        return loads(data, **rest)

    monkeypatch.setattr(pickle, "loads", noted)
    _LOOKUPS.listening = True
    yield _LOOKUPS.events
    _LOOKUPS.listening = False


@asynccontextmanager
async def workers_by_mode(*modes: str, **settings: Any) -> AsyncIterator[list[Worker]]:
    """Workers worker0 …, one per mode, in one loop over a memory network; the first is current."""
    network = Network()
    found: list[Worker] = []
    try:
        for i, mode in enumerate(modes):
            options = ag.Options(mode=mode, **settings)
            plan = Plan(
                name=f"worker{i}",
                rank=i,
                options=options,
                network=network,
                listen=(f"memory:{i}",),
                secret=SECRET,
                coordinator=found[0].agent.info if found else None,
            )
            found.append(await Worker.planned(plan).start())
        found[0].make_current()
        yield found
    finally:
        for worker in reversed(found):
            await worker.close(graceful=False)


@pytest.fixture
def workers() -> Callable[..., Any]:
    """`async with workers("trusted", "restricted") as (a, b):`: one worker per mode."""
    return workers_by_mode
