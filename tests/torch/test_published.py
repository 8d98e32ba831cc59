"""Graphs and operations keep the memory of a parameter that is replaced meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from aiograd.torch import published
from tests.torch.functions import DTYPE, leaf


class NoContexts:
    def all(self) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def no_worker(monkeypatch):
    monkeypatch.setattr(published, "contexts", NoContexts)


def parameter(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(leaf(*shape, seed=seed).detach())


def test_a_pinned_graph_keeps_its_memory_and_notices_a_write_into_it():
    w, x = parameter(3), leaf(3, seed=2)
    published.register(w)
    old = w.detach().clone()
    with published.pinned():
        kept, spoiled = (x * w).sum(), (x * w * w).sum()
    published.publish([(w, parameter(3, seed=1))])
    kept.backward()
    assert torch.equal(x.grad, old)
    with published.pinned():
        spoiled = (x * w).sum()
    with torch.no_grad():
        w.mul_(2)
    published.publish([(w, parameter(3, seed=3))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        spoiled.backward()


def test_memory_that_the_user_replaces_is_pinned_too():
    w, x = parameter(3), leaf(3, seed=2)
    published.register(w)
    w.data = torch.full((3,), 5.0, dtype=DTYPE)
    with published.pinned():
        loss = (x * w).sum()
    published.publish([(w, parameter(3, seed=1))])
    loss.backward()
    assert x.grad.tolist() == [5.0] * 3


class SlowLock:
    """Lets another thread publish before a chosen thread takes the lock for the second time."""

    def __init__(self, thread: int) -> None:
        self.thread, self.taken = thread, 0
        self.between, self.published = threading.Event(), threading.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        if threading.get_ident() == self.thread:
            self.taken += 1
            if self.taken == 2:
                self.between.set()
                self.published.wait(0.2)
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_nothing_is_published_while_an_operation_runs_that_saved_the_parameter(monkeypatch):
    """torch saves before it computes, so the operation would compute with other values."""
    x, w = parameter(3), parameter(3, seed=1)
    published.register(x)
    published.register(w)
    lock = SlowLock(threading.get_ident())
    monkeypatch.setattr(published, "_lock", lock)

    def publish() -> None:
        lock.between.wait()  # the product has saved one of its factors
        published.publish([(w, parameter(3, seed=2)), (x, parameter(3, seed=3))])
        lock.published.set()

    thread = threading.Thread(target=publish)
    thread.start()
    with published.pinned():
        y = x * w
    thread.join()
    by_x, by_w = torch.autograd.grad(y.sum(), (x, w))
    assert lock.taken == 2
    torch.testing.assert_close(by_x * by_w, y.detach())  # computed with what was saved


def test_a_parameter_that_is_gone_is_forgotten():
    w = parameter(3)
    published.register(w)
    key = id(w)
    assert key in published._known
    del w
    assert key not in published._known


def kept() -> list[Any]:
    return [memory for memories, _, _ in published._old for memory in memories]


def test_old_memory_lives_while_a_run_may_read_it():
    w = parameter(3)
    published.register(w)
    entered, leave = threading.Event(), threading.Event()

    def reads() -> None:
        with published.pinned():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=reads)
    thread.start()
    entered.wait()
    first = published._known[id(w)].memory
    for seed in range(3):
        published.publish([(w, parameter(3, seed=seed))])
    assert first in kept()
    leave.set()
    thread.join()
    published.publish([(w, parameter(3, seed=5))])
    assert first not in kept()


async def test_coroutines_are_pinned_step_by_step():
    w, x = parameter(3), leaf(3, seed=2)
    published.register(w)
    running = []

    async def work(value: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        seen = w.detach().clone()
        loss = (x * w).sum()
        running.append(len(published._running))
        await asyncio.sleep(0)
        return value, loss, seen

    run = published.runs_pinned(work)
    tasks = [asyncio.create_task(run(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert not published._running  # they wait: what runs now is not theirs
    published.publish([(w, parameter(3, seed=9))])
    for number, task in enumerate(tasks):
        value, loss, seen = await task
        assert value == number
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, seen)
    assert running == [1, 1, 1]


async def test_a_cancelled_coroutine_sees_the_cancellation():
    published.register(w := parameter(1))
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(w.shape)
            raise

    task = asyncio.create_task(published.runs_pinned(work)())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [(1,)]
