"""F6: a blocked loop is logged; its worker becomes suspect, and is not lost."""

from __future__ import annotations

import aiograd as ag
from tests.failures.conftest import PACE
from tests.failures.work import echo, hold_the_loop, until

BLOCKED = max(2.0, 7.0 / PACE)  # seconds: longer than the watchdog and the others' patience


async def test_f6_a_blocked_loop_is_logged_and_its_worker_is_not_lost(cluster, figure):
    async with cluster(2) as c:
        assert await ag.rpc_async("worker0", echo, (1,)) == 1
        call = ag.rpc_async("worker0", hold_the_loop, (BLOCKED,))
        logged = await until(lambda: "blocked" in c.logs("worker0"))
        await until(lambda: "in hold_the_loop" in c.logs("worker0"))
        await until(lambda: "worker0" in c.driver.agent.links.suspects() or call.done())
        assert not call.done()
        assert c.state("worker0") == "running"
        began = await call
        figure("F6", "a loop is blocked: logged with its stack", 1.5, logged - began)
        assert await ag.rpc_async("worker0", echo, (2,)) == 2
        await until(lambda: not c.driver.agent.links.suspects())
