"""Whether operations are recorded, and for whom."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

import aiograd.autograd as ag


def leaf() -> ag.Tensor:
    return ag.tensor([1.0, 2.0], requires_grad=True)


def test_no_grad_records_nothing_and_is_put_back():
    x = leaf()
    with ag.no_grad():
        assert not ag.is_grad_enabled()
        assert not (x * 2).requires_grad
    assert ag.is_grad_enabled()
    assert (x * 2).requires_grad


def test_enable_grad_records_inside_no_grad():
    x = leaf()
    with ag.no_grad(), ag.enable_grad():
        assert (x * 2).requires_grad


def test_no_grad_decorates_functions():
    @ag.no_grad()
    def double(x: ag.Tensor) -> ag.Tensor:
        return x * 2

    assert double.__name__ == "double"
    assert not double(leaf()).requires_grad
    assert ag.is_grad_enabled()


def test_an_exception_puts_the_switch_back():
    with pytest.raises(KeyError), ag.no_grad():
        raise KeyError
    assert ag.is_grad_enabled()


def test_one_object_can_be_entered_again():
    mode = ag.no_grad()
    with mode:
        with mode:
            assert not ag.is_grad_enabled()
        assert not ag.is_grad_enabled()
    assert ag.is_grad_enabled()


async def test_no_grad_held_across_an_await_does_not_reach_other_tasks():
    inside, seen = asyncio.Event(), asyncio.Event()

    async def holds() -> None:
        with ag.no_grad():
            inside.set()
            await seen.wait()
            assert not (leaf() * 2).requires_grad

    async def looks() -> None:
        await inside.wait()
        assert (leaf() * 2).requires_grad
        seen.set()

    await asyncio.gather(holds(), looks())


async def test_a_task_made_inside_inherits_no_grad():
    async def made_inside() -> bool:
        return (leaf() * 2).requires_grad

    with ag.no_grad():
        task = asyncio.ensure_future(made_inside())
    assert await task is False


async def test_a_thread_with_the_tasks_context_follows_it():
    with ag.no_grad():
        assert not await asyncio.to_thread(lambda: (leaf() * 2).requires_grad)
    assert await asyncio.to_thread(lambda: (leaf() * 2).requires_grad)


def test_a_fresh_thread_records_whatever_others_do():
    found = []
    with ag.no_grad():
        thread = threading.Thread(
            target=contextvars.Context().run, args=(lambda: found.append(ag.is_grad_enabled()),)
        )
        thread.start()
        thread.join()
    assert found == [True]
