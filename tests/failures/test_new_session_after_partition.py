"""F3: two members lose each other for longer than `Options.resume`, and reconnect.

The coordinator reaches both all the time, so both stay members.
"""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.testing.chaos_proxy import Proxy
from tests.failures.pairs import (
    call_and_wait,
    hold,
    reach_through,
    try_call,
    use_held,
    who_is_there,
)
from tests.failures.work import now
from tests.support.waiting import until

PAIR = ("worker0", "worker1")


def other(name):
    return PAIR[1 - PAIR.index(name)]


async def both(function, *args):
    """Run a function on both, with the name of the other one; their answers."""
    calls = [ag.rpc_async(name, function, (other(name), *args)) for name in PAIR]
    return await asyncio.gather(*calls)


@pytest.mark.deadline(60)
async def test_f3_two_members_find_each_other_again_after_a_long_cut(cluster, figure, tmp_path):
    async with cluster(2, resume=0.5, handshake_timeout=1.0) as running:
        directory = running.driver.agent.directory
        proxies = {
            name: Proxy(f"unix:{tmp_path}/{name}", directory.find(name).addresses[0])
            for name in PAIR
        }
        async with proxies["worker0"], proxies["worker1"]:
            for name in PAIR:
                where = proxies[other(name)].address
                await ag.rpc_async(name, reach_through, (other(name), where))
            assert await both(hold, 7) == [7, 7]
            pending = asyncio.ensure_future(both(call_and_wait))
            await until(lambda: calls_run())
            for proxy in proxies.values():
                proxy.silent = True
                proxy.cut()
            cut = now()
            assert await pending == [("WorkerLost", other(name), "unknown") for name in PAIR]
            figure("F3", "two members lose each other: `WorkerLost`", 0.5 + 0.5, now() - cut)
            assert await both(use_held) == ["OwnerLost", "OwnerLost"]
            assert await both(try_call) == ["no", "no"]
            everyone = [name for name, _ in await who_is_there()]  # as the coordinator knows
            for name in PAIR:
                seen = dict(await ag.rpc_async(name, who_is_there))
                assert list(seen) == everyone
                assert seen[other(name)]  # suspect

            for proxy in proxies.values():
                proxy.silent = False
                proxy.cut()
            restored = now()
            await until(lambda: found_each_other(), within=10)
            what = "the network between two members returns: calls work again"
            figure("F3", what, 10.0, now() - restored)
            assert await both(use_held) == ["OwnerLost", "OwnerLost"]
            assert await both(hold, 8) == [8, 8]
            for name in PAIR:
                seen = dict(await ag.rpc_async(name, who_is_there))
                assert list(seen) == everyone
                assert not seen[other(name)]


async def calls_run():
    """Whether the call of each to the other one runs, besides that of the test."""
    found = [await ag.rpc_async(name, ag.debug_info) for name in PAIR]
    return all(info["running_calls"] == 2 for info in found)


async def found_each_other():
    return await both(try_call) == ["yes", "yes"]
