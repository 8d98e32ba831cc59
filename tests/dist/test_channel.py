"""What dist asks of an agent: work on the loop or off it, and notifications that are retried."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiograd as ag
from aiograd.dist.registry import contexts
from aiograd.rpc.scope import AGENT
from aiograd.testing import Faults


async def test_a_function_runs_off_the_loop_and_its_error_is_raised(workers):
    async with workers(1):
        channel = contexts().channel
        assert await channel.in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await channel.in_thread(lambda: 1 // 0)


async def test_a_function_off_the_loop_has_the_variables_of_the_caller(workers):
    async with workers(1):
        assert await contexts().channel.in_thread(AGENT.get) is AGENT.get() is not None


async def test_an_action_runs_at_once_on_the_loop_and_soon_from_a_thread(workers):
    async with workers(1):
        channel, seen, done = contexts().channel, [], asyncio.Event()
        channel.on_loop(seen.append, threading.get_ident())
        assert seen == [threading.get_ident()]

        def note() -> None:
            seen.append(threading.get_ident())
            done.set()

        await asyncio.to_thread(channel.on_loop, note)
        await done.wait()
        assert seen == [threading.get_ident()] * 2


async def test_a_notification_is_sent_until_it_is_acknowledged(workers):
    async with workers(1) as cluster:
        channel = contexts().channel
        peer = channel.directory.get("worker0")
        cluster.driver.faults = Faults(fail=[], drop=["context.known"])
        answer = channel.notify(peer, "context.known", 1)  # dropped at its first attempt
        cluster.driver.faults = None
        assert await answer is False


async def test_only_the_incarnation_that_is_meant_can_be_reached(workers):
    async with workers(1):
        channel = contexts().channel
        peer = channel.directory.get("worker0")
        await ag.rpc_async("worker0", ag.debug_info)
        assert channel.reach("worker0", peer.incarnation).name == "worker0"
        assert channel.reach("worker0", bytes(16)) is None
