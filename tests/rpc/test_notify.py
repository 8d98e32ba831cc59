"""Notifications are coalesced, and sent until they are acknowledged."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiograd.errors import WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.extension import DROP, FAIL, SEND, FaultAction
from aiograd.rpc.notify import Coalescer, Notifier
from tests.support.agents import running_agents
from tests.support.waiting import until

# ── coalescing ──────────────────────────────────────────────────────────────────────────────────


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
    monkeypatch.setattr("aiograd.rpc.notify.INTERVAL", 0.1)
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
    monkeypatch.setattr("aiograd.rpc.notify.INTERVAL", 3600.0)
    coalescer.schedule()
    await until(lambda: sent)
    coalescer.schedule()
    await until(lambda: coalescer._timer is not None)
    coalescer.close()
    assert coalescer._timer.cancelled()
    assert len(sent) == 1


# ── sending until acknowledged ──────────────────────────────────────────────────────────────────


class First:
    """Does something to the first message of a kind."""

    def __init__(self, verdict: FaultAction) -> None:
        self.verdicts = [verdict]

    def on_send(self, kind: str, to: str) -> FaultAction:
        return self.verdicts.pop() if kind == "note" and self.verdicts else SEND


@pytest.fixture
async def agents(monkeypatch: Any) -> AsyncIterator[list[Agent]]:
    monkeypatch.setattr("aiograd.rpc.notify.SWEEP", 0.02)
    async with running_agents(2) as both:
        both[1].services["note"] = lambda sender, text: f"{text} from {sender.name}"
        yield both


@pytest.fixture
async def notifier(agents: list[Agent]) -> AsyncIterator[Notifier]:
    notifier = Notifier(agents[0], set(), contextvars.copy_context())
    yield notifier
    notifier.close()


async def outcome(notifier: Notifier, to: Any) -> tuple[Any, Any]:
    ended: list[tuple[Any, Any]] = []
    notifier.notify(to, lambda *result: ended.append(result), "note", "hello", lazy=False)
    await until(lambda: ended)
    return ended[0]


async def test_a_notification_ends_with_its_answer(agents, notifier):
    assert await outcome(notifier, agents[1].info) == ("hello from worker0", None)


@pytest.mark.parametrize("verdict", [DROP, FAIL], ids=["lost", "refused"])
async def test_a_notification_without_an_answer_is_sent_again(agents, notifier, verdict):
    agents[0].fault_injector = First(verdict)
    assert await outcome(notifier, agents[1].info) == ("hello from worker0", None)
    assert not agents[0].fault_injector.verdicts


async def test_an_error_of_the_service_ends_a_notification(agents, notifier):
    def fail(sender, text):
        raise ValueError(text)

    agents[1].services["note"] = fail
    answer, error = await outcome(notifier, agents[1].info)
    assert (answer, type(error), str(error)) == (None, ValueError, "hello")


async def test_a_notification_for_a_former_incarnation_fails_at_once(agents, notifier):
    former = agents[1].info.__class__("worker1", 1, bytes(16))
    ended: list[Any] = []
    notifier.notify(former, lambda answer, error: ended.append(error), "note", "x", lazy=True)
    assert isinstance(ended[0], WorkerLost)
    assert "another worker has its name" in str(ended[0])


async def test_a_notification_is_not_repeated_in_another_session(agents, notifier):
    heard: list[str] = []
    agents[1].services["note"] = lambda sender, text: heard.append(text)
    assert await agents[0].request("worker1", "note", "a first one") is None
    agents[0].fault_injector = First(DROP)
    ended: list[Any] = []
    notifier.notify(agents[1].info, lambda _, error: ended.append(error), "note", "x", lazy=False)
    link = agents[0].links.get(agents[1].incarnation)
    link.abort(WorkerLost("worker1", why="on purpose"))
    await until(lambda: ended)
    assert isinstance(ended[0], WorkerLost)
    assert await agents[0].request("worker1", "note", "a later one") is None
    assert heard == ["a first one", "a later one"]
