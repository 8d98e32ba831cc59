"""Futures, their callbacks, and waiting for many of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded, SerializationError
from tests.conformance.forms import FORMS, call, plus
from tests.support.waiting import until, until_not

OPENED = threading.Event()  # what the blocked functions below wait for


@pytest.fixture(autouse=True)
def _everything_ends():
    OPENED.clear()
    yield
    OPENED.set()


def raises() -> None:
    raise ValueError("Expected error")


async def never() -> None:
    await asyncio.Event().wait()


def blocked() -> str:
    assert OPENED.wait(20)
    return "opened"


async def nothing_pending() -> None:
    """Cancelled calls are forgotten here, and soon at the callee too."""
    # A cancel is promised to be seen within 0.5 s.
    await until_not(lambda: ag.debug_info()["pending_calls"], 2.0)


async def test_fut_wait_twice(workers):
    async with workers(2):
        future = ag.rpc_async("worker1", raises)
        errors = []
        for _ in range(2):
            with pytest.raises(ValueError, match="Expected error") as caught:
                await future
            errors.append(caught.value)
        assert errors[0] is errors[1]
        good = ag.rpc_async("worker1", plus, args=(1, 2))
        assert (await good, await good, good.result()) == (3, 3, 3)
        many = [ag.rpc_async("worker1", raises) for _ in range(20)]
        for each in many:
            with pytest.raises(ValueError, match="Expected error"):
                await each


async def after(future: ag.Future, func: object, *args: object) -> object:
    """What `then` is elsewhere: a coroutine that awaits the parent."""
    return func(await future, *args)


async def test_fut_then(workers):
    async with workers(2):
        future = ag.rpc_async("worker1", plus, args=(1, 2))
        seen = []
        for number in range(10):
            future.add_done_callback(lambda done, n=number: seen.append((n, done.result())))
        assert await future == 3
        await until(lambda: len(seen) == 10)
        assert seen == [(number, 3) for number in range(10)]
        link: object = ag.rpc_async("worker1", plus, args=(1, 2))
        for _ in range(20):
            link = asyncio.ensure_future(after(link, plus, 1))
        assert await link == 23
        assert await future == 3


async def call_and_add(parent: ag.Future) -> int:
    return await ag.rpc_async("worker0", plus, args=(await parent, 10))


async def test_fut_then_may_call_again(workers):
    async with workers(2):
        assert await call_and_add(ag.rpc_async("worker1", plus, args=(1, 2))) == 13
        inner: list[ag.Future] = []
        outer = ag.rpc_async("worker1", plus, args=(1, 2))
        outer.add_done_callback(
            lambda done: inner.append(ag.rpc_async("worker1", plus, args=(done.result(), 1)))
        )
        await outer
        await until(lambda: inner)
        assert await inner[0] == 4


async def test_fut_then_errors_stay_with_the_child(workers):
    def too_few() -> None:
        pass

    async with workers(2):
        parent = ag.rpc_async("worker1", plus, args=(1, 2))
        for child in (after(parent, too_few), after(parent, plus, "not a number")):
            with pytest.raises(TypeError):
                await child
        with pytest.raises(TypeError):
            await after(parent, None)
        assert await parent == 3


async def another_error(parent: ag.Future) -> None:
    try:
        await parent
    except ValueError as error:
        raise RuntimeError("Another expected error") from error


async def test_fut_then_errors_of_the_parent_are_seen_by_the_child(workers):
    async with workers(2):
        parent = ag.rpc_async("worker1", raises)
        with pytest.raises(RuntimeError, match="Another expected error") as caught:
            await another_error(parent)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(ValueError, match="Expected error"):
            await parent


async def by_callback(to: str) -> int:
    """Answer by a future that a callback of a nested call sets."""
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    nested = ag.rpc_async(to, plus, args=(1, 2))
    nested.add_done_callback(lambda done: answer.set_result(done.result() + 10))
    return await answer


async def by_callbacks_of_callbacks(to: str) -> int:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def second(done: ag.Future) -> None:
        answer.set_result(done.result() + 10)

    def first(done: ag.Future) -> None:
        ag.rpc_async(to, plus, args=(done.result(), 100)).add_done_callback(second)

    ag.rpc_async(to, plus, args=(1, 2)).add_done_callback(first)
    return await answer


async def test_fut_callback_remote(workers):
    async with workers(2):
        assert await ag.rpc_async("worker1", by_callback, args=("worker0",)) == 13
        assert await ag.rpc_async("worker1", by_callbacks_of_callbacks, args=("worker0",)) == 113
        assert await ag.rpc_async("worker1", by_callback, args=("driver",)) == 13


async def test_fut_done_callback(workers):
    async with workers(2):
        order = []
        future = ag.rpc_async("worker1", plus, args=(1, 2))
        future.add_done_callback(lambda done: order.append("callback"))
        child = asyncio.ensure_future(after(future, lambda value: order.append("child")))
        assert await future == 3
        await child
        assert order == ["callback", "child"]
        later = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: later.set_result(done.result()))
        assert await later == 3


async def test_fut_done_flag(workers):
    async with workers(2):
        good, bad = ag.rpc_async("worker1", plus, args=(1, 2)), ag.rpc_async("worker1", raises)
        assert not good.done()
        assert not bad.done()
        await asyncio.wait([good, bad])
        assert good.done()
        assert bad.done()
        assert good.exception() is None
        assert isinstance(bad.exception(), ValueError)
        with pytest.raises(ValueError, match="Expected error"):
            bad.result()


async def test_fut_set_twice(workers):
    async with workers(1):
        future = ag.Future()
        future.set_result(1)
        with pytest.raises(asyncio.InvalidStateError):
            future.set_result(2)
        with pytest.raises(asyncio.InvalidStateError):
            future.set_exception(ValueError())
        assert await future == 1
        called = ag.rpc_async("worker0", plus, args=(1, 2))
        await called
        with pytest.raises(asyncio.InvalidStateError):
            called.set_result(4)


async def give_a_future() -> object:
    return asyncio.get_running_loop().create_future()


def give_calls() -> object:
    return [ag.rpc_async("worker0", plus, args=(1, 2))]


@pytest.mark.parametrize("form", FORMS)
async def test_fut_not_picklable(workers, form):
    async with workers(2):
        for future in (ag.Future(), asyncio.get_running_loop().create_future()):
            with pytest.raises(SerializationError, match="Future") as caught:
                await call(form, "worker1", plus, future, 1)
            assert "args[0]" in caught.value.path
        for func in (give_a_future, give_calls):
            with pytest.raises(SerializationError, match="Future"):
                await call(form, "worker1", func)
        assert await call(form, "worker1", plus, 1, 2) == 3


# ── waiting for many ────────────────────────────────────────────────────────────────────────────


async def awaited(future: ag.Future) -> object:
    return await future


async def test_waitall_scope(workers):
    async with workers(2):
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(awaited(ag.rpc_async("worker1", plus, args=(number, 1))))
                assert await ag.rpc_async("worker1", plus, args=(number, 2)) == number + 2
            blocked_call = group.create_task(awaited(ag.rpc_async("worker0", blocked)))
            OPENED.set()
        assert blocked_call.result() == "opened"
        assert ag.debug_info()["pending_calls"] == 0


async def fail_in_the_body() -> None:
    async with asyncio.TaskGroup() as group:
        waiting = ag.rpc_async("worker1", never)
        group.create_task(awaited(waiting))
        await ag.rpc_async("worker1", plus, args=(1, 2))
        assert not waiting.done()
        raise KeyError("in the body")


async def test_waitall_errors(workers):
    async with workers(2):
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(awaited(ag.rpc_async("worker1", never, timeout=0.05)))
        assert caught.group_contains(DeadlineExceeded)
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(awaited(ag.rpc_async("worker1", raises)))
        assert caught.group_contains(ValueError, match="Expected error")
        with pytest.raises(BaseExceptionGroup) as caught:
            await fail_in_the_body()
        assert caught.group_contains(KeyError)
        await nothing_pending()


@pytest.mark.parametrize("form", ["function", "op"])
async def test_waitall_exit_early(workers, form):
    async with workers(2):
        waiting = ag.rpc_async("worker1", blocked)
        if form == "function":
            failing = [ag.rpc_async("worker0", raises) for _ in range(2)]
        else:
            wrong = (ag.ones(3, 3), ag.ones(2, 2))
            failing = [ag.rpc_async("worker0", ag.matmul, args=wrong) for _ in range(2)]
        with pytest.raises(ValueError, match="Expected error" if form == "function" else "matmul"):
            await asyncio.gather(waiting, *failing)
        assert not waiting.done()
        await asyncio.wait(failing)
        assert all(isinstance(each.exception(), ValueError) for each in failing)
        OPENED.set()
        assert await waiting == "opened"


@ag.inline
def raises_inline() -> None:
    raise ValueError("Expected error")


async def test_waitall_exit_early_registered(workers):
    async with workers(2):
        waiting = ag.rpc_async("worker1", blocked)
        with pytest.raises(ValueError, match="Expected error"):
            await asyncio.gather(waiting, ag.rpc_async("worker1", raises_inline))
        assert not waiting.done()
        OPENED.set()
        await waiting


@pytest.mark.parametrize("good", [0, 10])
async def test_waitall_exceptions(workers, good):
    async with workers(2):
        calls = [ag.rpc_async("worker1", plus, args=(n, 1)) for n in range(good)]
        calls += [ag.rpc_async("worker1", raises) for _ in range(1 if good else 10)]
        with pytest.raises(ValueError, match="Expected error"):
            await asyncio.gather(*calls)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[:good] == [n + 1 for n in range(good)]
        assert all(isinstance(each, ValueError) for each in results[good:])
