"""Calls, their arguments and their results."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from tests.conformance.forms import FORMS, LAYOUTS, call, full, leaf, plus


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("form", FORMS)
async def test_call_builtin(workers, form, to):
    async with workers(2):
        ones = ag.ones(3, 3)
        assert (await call(form, to, ag.add, ones, ones)).tolist() == [[2.0] * 3] * 3
        assert (await call(form, to, ag.add, ones, 5)).tolist() == [[6.0] * 3] * 3
        rows, columns = await call(form, to, np.nonzero, np.eye(3))
        assert rows.tolist() == columns.tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_call_builtin_twenty_in_a_row(workers, layout):
    async with workers(2):
        for seed in range(20):
            x, y = leaf(layout, seed, False), leaf(layout, seed + 1, False)
            result = await ag.rpc_async("worker1", ag.add, args=(x, y))
            assert result.is_sparse == (layout == "sparse")
            np.testing.assert_array_equal(full(result), full(x) + full(y))


class Counter:
    """A class whose instances and methods travel."""

    def __init__(self, start: int) -> None:
        self.value = start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]

    def increased(self, by: int) -> int:
        return self.value + by

    @classmethod
    def of_class(cls, by: int) -> tuple[str, int]:
        return cls.__name__, by

    @staticmethod
    def of_nothing(by: int) -> int:
        return by


def by_name(a: int, b: int, c: int = 100) -> tuple[int, int, int]:
    return a, b, c


def nothing() -> None:
    return None


@pytest.mark.parametrize("form", FORMS)
async def test_call_py_callables(workers, form):
    async with workers(2):
        assert await call(form, "worker1", min, 5, 4, 3) == 3
        assert await call(form, "worker1", by_name, b=2, a=1) == (1, 2, 100)
        assert await call(form, "worker1", Counter, 7) == Counter(7)
        assert await call(form, "worker1", Counter(7).increased, 3) == 10
        assert await call(form, "worker1", Counter.of_class, 3) == ("Counter", 3)
        assert await call(form, "worker1", Counter.of_nothing, 3) == 3
        assert await call(form, "worker1", nothing) is None


async def test_call_py_callables_two_at_once(workers):
    async with workers(2):
        first = ag.rpc_async("worker0", Counter.of_nothing, args=(1,))
        second = ag.rpc_async("worker1", min, args=(2, 3))
        assert await asyncio.gather(first, second) == [1, 2]


def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


@pytest.mark.parametrize("form", FORMS)
async def test_call_arrays(workers, form):
    async with workers(2):
        result = await call(form, "worker1", both, np.ones((3, 3)), np.ones((3, 3)))
        assert isinstance(result, np.ndarray)
        assert result.tolist() == [[2.0] * 3] * 3
        assert result.flags.writeable


async def test_call_arrays_a_hundred_at_once_keep_their_order(workers):
    async with workers(2):
        calls = [
            ag.rpc_async("worker1", both, args=(np.full((n, n), n), np.full((n, n), n)))
            for n in range(100)
        ]
        results = await asyncio.gather(*calls)
        for n, result in enumerate(results):
            assert result.shape == (n, n)
            assert (result == 2 * n).all()


def as_it_is(value: np.ndarray) -> np.ndarray:
    return value


VIEWS = {
    "transposed": lambda a: a.T,
    "every second": lambda a: a[::2, 1::3],
    "backwards": lambda a: a[::-1],
    "expanded": lambda a: np.broadcast_to(a[0], (4, a.shape[1])),
}


@pytest.mark.parametrize("size", [10, 120])  # taken at once, and borrowed
@pytest.mark.parametrize("view", VIEWS)
async def test_call_noncontiguous(workers, view, size):
    strided = VIEWS[view](np.arange(float(size * size)).reshape(size, size))
    async with workers(2):
        for given in (strided, ag.from_numpy(strided)):
            result = np.asarray(await ag.rpc_async("worker1", as_it_is, args=(given,)))
            assert result.shape == strided.shape
            np.testing.assert_array_equal(result, strided)
            result[...] = 0  # ours, whatever its strides
        assert strided.any()


RECEIVED: dict[str, object] = {}  # by the name of the worker that was called


def receive(value: object) -> None:
    RECEIVED[ag.get_worker_info().name] = value


async def send_rank_to_the_next() -> None:
    everyone = ag.workers()
    me = ag.get_worker_info().rank
    await ag.rpc_async((me + 1) % len(everyone), receive, args=(me,))


async def test_call_source(workers):
    RECEIVED.clear()
    async with workers(3) as cluster:
        senders = [worker.call(send_rank_to_the_next) for worker in cluster]
        await asyncio.gather(*senders, send_rank_to_the_next())
        assert RECEIVED == {"worker1": 0, "worker2": 1, "driver": 2, "worker0": 3}


def light() -> int:
    return 0


def heavy(t: ag.Tensor) -> int:
    values = ag.sparse.values(t) if t.is_sparse else t
    for step in range(1, 100):
        values *= step
        values /= step + 1
    return 0


@ag.inline
def heavy_inline(t: ag.Tensor) -> int:
    return heavy(t)


async def test_call_stress_light(workers):
    async with workers(2):
        calls = [ag.rpc_async("worker1", light) for _ in range(1000)]
        assert await asyncio.gather(*calls) == [0] * 1000


def big(layout: str) -> ag.Tensor:
    if layout == "dense":
        return ag.ones(100, 100)
    return ag.sparse.coo_tensor(np.array(np.divmod(np.arange(500), 100)), np.ones(500), (100, 100))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_call_stress_heavy(workers, layout):
    async with workers(2):
        calls = [ag.rpc_async("worker1", heavy, args=(big(layout),)) for _ in range(20)]
        assert await asyncio.gather(*calls) == [0] * 20


async def test_call_stress_registered(workers):
    async with workers(2):
        calls = [ag.rpc_async("worker1", heavy_inline, args=(big("dense"),)) for _ in range(20)]
        assert await asyncio.gather(*calls) == [0] * 20
        ones = ag.ones(100, 100)
        ops = [ag.rpc_async("worker1", ag.matmul, args=(ones, ones)) for _ in range(20)]
        for result in await asyncio.gather(*ops):
            assert (result.numpy() == 100).all()


async def test_call_bad_op_args(workers):
    async with workers(2):
        for args in ((), (ag.ones(2),), (ag.ones(2),) * 5):
            with pytest.raises(TypeError):
                await ag.rpc_async("worker1", ag.add, args=args)
        with pytest.raises(TypeError):
            await ag.rpc_async("worker1", ag.add, args=(1, 2), kwargs={"no_such": 3})
        assert (await ag.rpc_async("worker1", plus, args=(1, 2))) == 3
