"""Notifications that are sent together."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from aiograd.rpc.coalesce import Coalescer
from tests.support.waiting import until


@pytest.fixture
async def sent():
    return []


@pytest.fixture
async def coalescer(sent):
    loop = asyncio.get_running_loop()
    coalescer = Coalescer(loop, contextvars.copy_context(), lambda: sent.append(loop.time()))
    yield coalescer
    coalescer.close()


async def test_the_first_notification_is_sent_in_the_next_tick(coalescer, sent):
    coalescer.schedule()
    assert not sent
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(sent) == 1


async def test_later_notifications_wait_for_the_interval_and_are_sent_together(
    coalescer, sent, monkeypatch
):
    monkeypatch.setattr("aiograd.rpc.coalesce.INTERVAL", 0.1)
    coalescer.schedule()
    await until(lambda: sent)
    for _ in range(20):
        coalescer.schedule()
        await asyncio.sleep(0)
    await until(lambda: len(sent) > 1)
    assert sent[1] - sent[0] >= 0.09


async def test_a_notification_during_a_send_schedules_another_send():
    loop = asyncio.get_running_loop()
    sent = []

    def send():
        sent.append(loop.time())
        if len(sent) == 1:
            coalescer.schedule()

    coalescer = Coalescer(loop, contextvars.copy_context(), send)
    coalescer.schedule()
    await until(lambda: len(sent) == 2)
    assert sent[1] > sent[0]
    coalescer.close()


async def test_any_thread_may_schedule(coalescer, sent):
    thread = threading.Thread(target=coalescer.schedule)
    thread.start()
    thread.join()
    await until(lambda: sent)
    assert len(sent) == 1


async def test_nothing_is_sent_after_close(coalescer, sent, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.coalesce.INTERVAL", 3600.0)
    coalescer.schedule()
    await until(lambda: sent)
    coalescer.schedule()
    await until(lambda: coalescer._timer is not None)
    coalescer.close()
    assert coalescer._timer.cancelled()
    assert len(sent) == 1
