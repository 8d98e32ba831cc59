"""Behaviour that torch leaves undefined or that differs from torch on purpose."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import (
    BackwardFailed,
    DeadlineExceeded,
    GradError,
    NoContext,
    RemoteError,
    UnknownContext,
    WorkerLost,
)
from tests.conformance.conftest import counters
from tests.conformance.forms import (
    FORMS,
    call,
    current_context_id,
    has_context,
    leaf,
    outside,
    plus,
)
from tests.support.waiting import until, until_not

OPENED = threading.Event()


@pytest.fixture(autouse=True)
def _everything_ends():
    OPENED.clear()
    Switch.on = True
    yield
    OPENED.set()


class Switch(ag.Function):
    """Passes its input on; on the way back it fails while the switch is on."""

    on = True

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        if Switch.on:
            raise ValueError("switched on")
        return g * 1.0


class Held(ag.Function):
    """Waits on the way back until the test lets it go."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        OPENED.wait(20)
        return g * 1.0


def held(x: ag.Tensor) -> ag.Tensor:
    return Held.apply(x)


def only_first(x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    return x * 3.0


async def test_z_unused_arg_zero_grad_is_no_entry_because_no_root_depends_on_it(workers):
    used, unused = leaf(seed=1), leaf(seed=2)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", only_first, args=(used, unused))
        await ctx.backward(y.sum())
        assert ctx.gradients[used].tolist() == [[3.0] * 3] * 3
        with pytest.raises(KeyError):
            ctx.gradients[unused]


def number(x: ag.Tensor) -> float:
    return float(x.sum())


async def test_z_unused_send_hang_never_happens(workers):
    t = leaf()
    async with workers(3) as cluster, ag.context() as ctx:
        await ag.rpc_async("worker0", number, args=(t,))  # an answer without a gradient
        never_fetched = ag.remote("worker1", plus, args=(t, t))
        await never_fetched.future()
        y = await ag.rpc_async("worker2", plus, args=(t, t))
        await ctx.backward(y.sum())
        assert ctx.gradients[t].tolist() == [[2.0] * 3] * 3
        for worker in cluster:
            assert (await worker.call(ag.debug_info))["backward_passes"] == 0


async def test_z_error_leaves_peer_stuck_never_happens(workers):
    t = leaf()
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", plus, args=(t, t))
        y = await ag.rpc_async("worker1", plus, args=(Switch.apply(y), t))
        loss = y.sum()
        with pytest.raises(BackwardFailed, match="switched on"):
            await ctx.backward(loss, retain_graph=True)
        assert (await ag.rpc_async("worker1", ag.debug_info))["backward_passes"] == 0
        Switch.on = False
        await ctx.backward(loss, retain_graph=True)
        assert ctx.gradients[t].tolist() == [[3.0] * 3] * 3


async def test_z_same_ctx_concurrent_backward(workers):
    t = leaf()
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", plus, args=(t, t))
        loss = y.sum()
        await asyncio.gather(*[ctx.backward(loss, retain_graph=True) for _ in range(8)])
        assert ctx.gradients[t].tolist() == [[16.0] * 3] * 3


async def test_z_backward_bound_by_rpc_timeout_has_a_time_of_its_own(workers):
    t = leaf()
    async with workers(2, timeout=0.5), ag.context() as ctx:
        y = await ag.rpc_async("worker1", held, args=(t,))
        with pytest.raises(BackwardFailed) as caught:
            await ctx.backward(y.sum(), retain_graph=True, timeout=0.05)
        assert isinstance(caught.value, DeadlineExceeded)
        assert caught.value.worker == "worker1"
        patient = asyncio.create_task(ctx.backward(y.sum(), retain_graph=True, timeout=math.inf))
        with pytest.raises(DeadlineExceeded):
            await ag.rpc_async("worker0", forever)  # the default, passed meanwhile
        assert not patient.done()
        OPENED.set()
        await patient
        assert ctx.gradients[t].tolist() == [[1.0] * 3] * 3


async def forever() -> None:
    await asyncio.Event().wait()


async def test_z_second_backward_no_retain(workers):
    t = leaf()
    async with workers(2), ag.context() as ctx:
        saved = (await ag.rpc_async("worker1", ag.mul, args=(t, t))).sum()
        await ctx.backward(saved)
        with pytest.raises(GradError, match="worker1") as caught:
            await ctx.backward(saved)
        assert caught.value.reason == "freed"


async def until_opened(x: ag.Tensor) -> ag.Tensor:
    await until(OPENED.is_set)
    return x * 2.0


async def test_z_rpc_outlives_ctx(workers):
    t = leaf()
    async with workers(2):
        async with ag.context() as ctx:
            future = ag.rpc_async("worker1", until_opened, args=(t,))
            await ag.rpc_async("worker1", current_context_id)
        await until_not(lambda: ag.rpc_async("worker1", has_context, args=(ctx.id,)), 8.0)
        OPENED.set()
        result = await future  # arrives as outside of any context: by value
        np.testing.assert_array_equal(result.numpy(), 2 * t.numpy())
        assert result.is_leaf
        assert not await ag.rpc_async("worker1", has_context, args=(ctx.id,))


async def test_z_local_backward_through_recv(workers):
    t = leaf()
    async with workers(2):
        async with ag.context():
            y = await ag.rpc_async("worker1", plus, args=(t, t))
            with pytest.raises(GradError, match=r"ctx\.backward") as caught:
                y.sum().backward()
            assert caught.value.reason == "received"
        with pytest.raises(GradError):
            y.sum().backward()
        assert t.grad is None


def is_independent_leaf(x: ag.Tensor) -> bool:
    return x.requires_grad and x.is_leaf and x.grad_fn is None


@pytest.mark.parametrize("form", FORMS)
async def test_z_no_ctx_requires_grad(workers, form):
    t = leaf()
    async with workers(2):
        assert await call(form, "worker1", is_independent_leaf, t)
        assert await call(form, "worker1", is_independent_leaf, t * 2.0)
        result = await call(form, "worker1", plus, t, t)
        assert is_independent_leaf(result)
        with pytest.warns(ag.GraphCutWarning):
            result.sum().backward()
        assert result.grad.tolist() == [[1.0] * 3] * 3
        assert t.grad is None
        assert not (await call(form, "worker1", plus, t.detach(), 1.0)).requires_grad


async def test_z_builtin_without_grad_not_recorded(workers):
    async with workers(2), ag.context() as ctx:
        await ag.rpc_async("worker1", ag.add, args=(ag.ones(2), ag.ones(2)))
        assert ctx.known_workers == set()
        assert not await outside(ag.rpc_async, "worker1", has_context, (ctx.id,))


def are_one(x: Any, y: Any, more: list[Any]) -> bool:
    return x is y and all(each is x for each in more)


async def test_z_same_array_twice(workers):
    t, array = leaf(), np.ones(5)
    async with workers(2), ag.context() as ctx:
        assert await ag.rpc_async("worker1", are_one, args=(t, t, [t, t]))
        (send,) = ctx.send_nodes.values()
        assert len(send.next_nodes) == 1
        assert await ag.rpc_async("worker1", are_one, args=(array, array, [array]))
        y = await ag.rpc_async("worker1", ag.mul, args=(t, t))
        await ctx.backward(y.sum())
        np.testing.assert_allclose(ctx.gradients[t].numpy(), 2 * t.numpy())


def change(array: np.ndarray, names: list[str]) -> tuple[np.ndarray, list[str]]:
    array += 1
    names.append("changed")
    return array, names


@pytest.mark.parametrize("size", [3, 20_000])
async def test_z_self_call_by_value(workers, size):
    array, names = np.zeros(size), ["mine"]
    async with workers(1):
        result, others = await ag.rpc_async("driver", change, args=(array, names))
        assert not array.any()
        assert names == ["mine"]
        assert (result == 1).all()
        assert others == ["mine", "changed"]
        assert not np.shares_memory(array, result)


async def test_z_known_workers_self(workers):
    async with workers(2), ag.context() as ctx:
        await ag.rpc_async("driver", plus, args=(leaf(), leaf()))
        assert ctx.known_workers == {"driver"}


ERRORS = [
    KeyError("k"),
    IndexError("i"),
    AttributeError("a"),
    ZeroDivisionError("z"),
    OSError(2, "no such file"),
    TimeoutError("t"),
    ValueError("v"),
    TypeError("y"),
    RuntimeError("r"),
    NotImplementedError("n"),
    ArithmeticError("m"),
    LookupError("l"),
    AssertionError("s"),
    ImportError("p"),
    MemoryError("x"),
    EOFError("e"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ExceptionGroup("g", [ValueError("one"), KeyError("two")]),
]


def raise_it(number: int) -> None:
    raise ERRORS[number] from ValueError("the cause")


@pytest.mark.parametrize("form", FORMS)
async def test_z_exception_types(workers, form):
    async with workers(2):
        for number, error in enumerate(ERRORS):
            with pytest.raises(type(error)) as caught:
                await call(form, "worker1", raise_it, number)
            assert type(caught.value) is type(error)
            assert str(caught.value) == str(error)
            assert isinstance(caught.value.__cause__, ValueError)
            if isinstance(error, ExceptionGroup):
                assert [type(each) for each in caught.value.exceptions] == [ValueError, KeyError]


def leave(kind: type[BaseException]) -> None:
    raise kind("leaving")


async def leave_async(kind: type[BaseException]) -> None:
    raise kind("leaving")


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (leave, SystemExit),
        (leave, KeyboardInterrupt),
        (leave, StopIteration),
        (leave_async, StopAsyncIteration),
        (leave_async, asyncio.CancelledError),
    ],
)
@pytest.mark.parametrize("form", FORMS)
async def test_z_remote_sysexit(workers, form, func, kind):
    async with workers(2):
        with pytest.raises(RemoteError) as caught:
            await call(form, "worker1", func, kind)
        assert caught.value.type_name.endswith(kind.__name__)
        assert caught.value.worker == "worker1"
        assert await call(form, "worker1", plus, 1, 2) == 3


@pytest.mark.parametrize("form", FORMS)
async def test_z_lambda(workers, form):
    offset = 10

    def local(x: int) -> int:
        return x + offset

    async with workers(2):
        assert await call(form, "worker1", lambda x: x * offset, 2) == 20
        assert await call(form, "worker1", local, 2) == 12


@pytest.mark.parametrize("seconds", [0, 0.0, -1, -0.5, math.nan, -math.inf])
async def test_z_negative_timeout(workers, seconds):
    async with workers(2):
        with pytest.raises(ValueError, match="timeout"):
            ag.rpc_async("worker1", plus, args=(1, 2), timeout=seconds)
        with pytest.raises(ValueError, match="timeout"):
            ag.remote("worker1", plus, args=(1, 2), timeout=seconds)
        async with ag.context() as ctx:
            with pytest.raises(ValueError, match="timeout"):
                await ctx.backward((leaf() * 1.0).sum(), timeout=seconds)


async def test_z_get_gradients(workers):
    t = leaf()
    async with workers(2):
        async with ag.context() as ctx:
            assert ctx.gradients == {}
            y = await ag.rpc_async("worker1", plus, args=(t, t))
            await ctx.backward(y.sum())
            first, second = ag.get_gradients(ctx.id), ag.get_gradients(ctx)
            assert first is not second
            assert first[t] is second[t]
        assert first[t].tolist() == [[2.0] * 3] * 3  # taken inside, readable afterwards
        with pytest.raises(UnknownContext):
            ag.get_gradients(ctx.id)
        with pytest.raises(UnknownContext):
            _ = ctx.gradients


async def test_z_hooks(workers):
    t = leaf()
    seen: list[str] = []
    t.register_hook(lambda g: seen.append("tensor"))
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", plus, args=(t, t))
        y.register_hook(lambda g: seen.append("received"))
        await ctx.backward(y.sum())
        assert seen == ["received", "tensor"]


async def test_z_creation_future_local(workers):
    async with workers(1):
        future = ag.RRef(5).future()
        assert await future is None
        assert future.done()


async def test_z_rref_equality(workers):
    async with workers(2):
        first = ag.remote("worker1", plus, args=(1, 2))
        second = ag.remote("worker1", plus, args=(1, 2))
        assert first == first
        assert first != second
        assert len({first, second}) == 2


async def test_z_new_thread_no_ctx(workers):
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(ag.current_context().id)
        except NoContext:
            found.append(None)

    async with workers(1), ag.context() as ctx:
        bare = threading.Thread(target=look)
        copied = threading.Thread(target=contextvars.copy_context().run, args=(look,))
        for thread in (bare, copied):
            thread.start()
            thread.join()
        assert found == [None, ctx.id]
        assert await asyncio.to_thread(current_context_id) == ctx.id
        assert await asyncio.create_task(_current_id()) == ctx.id


async def _current_id() -> int:
    return current_context_id()


async def test_z_cleanup_latency(workers):
    async with workers(3) as cluster:
        async with ag.context():
            for worker in cluster:
                await worker.call(plus, leaf(), leaf())
        began = time.monotonic()
        await until_not(lambda: counters(cluster))
        assert time.monotonic() - began < 2.0


async def test_z_dead_peer(workers):
    t = leaf()
    async with workers(2, processes=True, rest=False, grace=1.0) as cluster:
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", plus, args=(t, t))
            under_way = ag.rpc_async("worker1", forever)
            await cluster.kill("worker1")
            began = time.monotonic()
            with pytest.raises(WorkerLost):
                await under_way
            with pytest.raises((WorkerLost, LookupError)):
                await ag.rpc_async("worker1", plus, args=(1, 2))
            with pytest.raises(BackwardFailed):
                await ctx.backward(y.sum())
            assert time.monotonic() - began < 4.0
        began = time.monotonic()
    assert time.monotonic() - began < 1.0 + 1.0 + 2.0  # grace, its second, and the processes' end
