"""References as a part of the agent: gradients, real processes, and what others may plug in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded, Overloaded, OwnerLost, RRefError
from aiograd.rpc.agent import Agent
from aiograd.rpc.extension import SEND, FaultAction
from aiograd.rref import RRef, RRefs, attach, remote
from aiograd.rref.registry import current_rrefs


def value() -> str:
    return "a value"


# ── backward: the plumbing ──────────────────────────────────────────────────────────────────────


class Passes:
    """Stands for the autograd layer."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def __call__(self, value: Any, context_id: int | None, retain_graph: bool) -> None:
        await asyncio.sleep(0)
        if context_id == 13:
            raise ValueError("no luck")
        self.seen.append((value, context_id, retain_graph))


class Context:
    id = 7


async def test_backward_runs_at_the_owner(workers: Any) -> None:
    async with workers(2) as w:
        w[0].backward_hook, w[1].backward_hook = here, there = Passes(), Passes()
        rref = remote("worker1", value)
        await rref.backward(Context(), retain_graph=True)
        await rref.backward(5)
        assert there.seen == [("a value", 7, True), ("a value", 5, False)]
        own = RRef("mine")
        await own.backward()
        await own.backward(5)
        assert here.seen == [("mine", None, False), ("mine", 5, False)]
        with pytest.raises(ValueError, match="no luck"):
            await rref.backward(13)
        with pytest.raises(RRefError, match="must be given"):
            await rref.backward()
        for wrong in ("5", 5.0, True):
            with pytest.raises(TypeError, match="a context or its id is needed"):
                await rref.backward(wrong)
        w[1].backward_hook = None
        with pytest.raises(RRefError, match="no autograd"):
            await rref.backward(5)
        del rref
        await w.at_rest()


# ── plugging in ─────────────────────────────────────────────────────────────────────────────────


async def test_an_agent_without_references_says_so() -> None:
    agent = Agent("alone", 0, secret=bytes(32))
    try:
        await agent.start()
        with pytest.raises(ag.errors.WorkerClosed, match="without references"):
            RRef(1)
        refs = attach(agent)
        assert agent.parts[RRefs] is refs is current_rrefs()
        assert await remote("alone", value) == "a value"
        await refs.messenger.rest()
        assert refs.counters() == {"owner_rrefs": 0, "user_rrefs": 0}
    finally:
        await agent.close()


class DelayCreations:
    def on_send(self, kind: str, to: str) -> FaultAction:
        return FaultAction("delay", 0.3) if kind == "remote" else SEND


async def test_fi_remote_delayed_registered(workers: Any) -> None:
    async with workers(2) as w:
        for agent in w.agents:
            agent.ops = {"add": ag.add}
        w.agents[0].fault_injector = DelayCreations()
        for to in ("worker0", "worker1"):
            rref = remote(to, ag.add, args=(1.0, 2.0), timeout=0.05)
            with pytest.raises(DeadlineExceeded):
                await rref.future()
            with pytest.raises(RRefError, match="RRef creation"):
                await rref
            del rref
        await w.at_rest()


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_local_fetch_of_a_creation_that_never_left_says_why(
    workers: Any,
) -> None:
    async with workers(1, options=ag.Options(max_inflight=1)):
        first = ag.rpc_async("worker0", never)
        rref = remote("worker0", never, timeout=0.05)
        with pytest.raises(Overloaded, match="until the deadline"):
            await rref.to_here(timeout=20)
        assert first.cancel()


# ── real processes ──────────────────────────────────────────────────────────────────────────────


def keep(rref: RRef) -> None:
    import builtins

    builtins.kept = rref  # type: ignore[attr-defined]


async def fetch(rref: RRef) -> Any:
    return await rref


async def counters(name: str) -> dict[str, int]:
    found: dict[str, int] = await ag.rpc_async(name, ag.debug_info)
    return found


async def test_a_killed_user_gives_back_and_a_killed_owner_is_named() -> None:
    options = ag.Options(lease=0.3)
    async with ag.LocalCluster(3, options=options) as cluster:
        rref = ag.remote("worker0", value)
        await ag.rpc_async("worker1", keep, args=(rref,))
        await rref.release()
        assert (await counters("worker0"))["owner_rrefs"] == 1
        await cluster.kill("worker1")
        while (await counters("worker0"))["owner_rrefs"]:
            await asyncio.sleep(0.02)
        other = ag.remote("worker2", value)
        assert await ag.rpc_async("worker0", fetch, args=(other,)) == "a value"
        pending = ag.remote("worker2", asyncio.sleep, args=(60,)).to_here()
        await cluster.kill("worker2")
        for use in (lambda: pending, lambda: other.to_here()):
            with pytest.raises(OwnerLost) as caught:
                await use()
            assert caught.value.worker == "worker2"
        with pytest.raises(OwnerLost):
            ag.rpc_async("worker0", fetch, args=(other,))
        await cluster.restart("worker2")
        with pytest.raises(OwnerLost):
            await other
        assert await ag.remote("worker2", value) == "a value"


SCRIPT = """
import asyncio, aiograd as ag

def make():
    return [1]

async def main():
    async with ag.LocalCluster(1):
        global kept, cycle
        kept = ag.remote("worker0", make)
        cycle = [ag.remote("worker0", make)]
        cycle.append(cycle)
        print(await kept)

asyncio.run(main())
"""


def test_references_kept_until_the_interpreter_ends_make_no_noise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1]\n", "")
