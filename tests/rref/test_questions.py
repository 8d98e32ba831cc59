"""Questions about forks that were sent away: when they are asked, and when not."""

from __future__ import annotations

import asyncio
import math

import pytest

import aiograd as ag
from aiograd.rpc.scope import DEADLINE
from aiograd.rref import RRefs
from aiograd.testing import simulate
from aiograd.testing.simulator import Fault


async def test_questions_do_not_inherit_the_deadline_of_a_call(monkeypatch):
    options = ag.Options(lease=0.02)
    async with ag.Worker("alone", rank=0, world_size=1, options=options) as worker:
        loop = asyncio.get_running_loop()
        messenger = worker.agent.parts[RRefs].messenger
        asked = loop.create_future()

        def audit(at_shutdown: bool) -> list[asyncio.Future[None]]:
            if not asked.done():
                asked.set_result(DEADLINE.get())
            return []

        monkeypatch.setattr(messenger, "audit", audit)
        DEADLINE.set(loop.time() + 0.001)
        messenger.schedule_audit()
        assert await asked == math.inf


async def nap(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def make(number: int) -> int:
    return number


async def look(rref: ag.RRef) -> int:
    return await rref


def test_a_fork_whose_call_waits_for_its_turn_is_not_given_up():
    async def program() -> int:
        rref = ag.remote("worker1", make, args=(4,))
        await rref
        first = ag.rpc_async("worker0", nap, args=(5.0,))
        second = ag.rpc_async("worker0", look, args=(rref,))  # leaves when the first has ended
        del rref
        await first
        return await second

    assert simulate(program, options=ag.Options(max_inflight=1, lease=0.5)) == 4


def test_a_question_is_answered_also_where_the_way_is_longer_than_the_lease():
    async def program() -> None:
        rref = ag.remote("worker0", make, args=(4,))
        await rref
        with pytest.raises(ag.errors.DeadlineExceeded):
            await ag.rpc_async("worker0", look, args=(rref,), timeout=1.0)  # is lost on its way
        await rref.release()

    far = Fault(0.0, "clog", "driver", "worker0", seconds=600.0, amount=0.2)
    lost = Fault(1, "drop", "driver", on="call")
    simulate(program, faults=[far, lost], options=ag.Options(lease=0.1), limit=60.0)
