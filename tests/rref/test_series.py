"""References that one line makes one after the other: found out once, then looked after."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import UnknownWorker
from aiograd.rpc.observe.profile import profile
from aiograd.rref.registry import current_rrefs
from aiograd.rref.series import Series


@pytest.fixture
def joined(monkeypatch) -> list[bool]:
    """Whether each reference that was made went on with a series."""
    seen: list[bool] = []
    another = Series.another

    def counted(self: Series, *args: Any) -> Any:
        made = another(self, *args)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(Series, "another", counted)
    return seen


def make(to: str, value: Any, **more: Any) -> ag.RRef:
    return ag.remote(to, ag.add, args=(value, value), **more)


async def begin(to: str = "worker0") -> None:
    """Fetch until values come along unasked; from then on there is a series."""
    for _ in range(3):
        await make(to, ag.tensor([1.0]))
    assert current_rrefs()._series is not None


async def nothing_is_kept_by(worker: Any) -> None:
    while (await worker.call(ag.debug_info))["owner_rrefs"]:
        pass  # the test's deadline is the limit


async def test_what_one_line_makes_is_found_out_once(cluster, joined):
    async with cluster(2) as c:
        await begin()
        joined.clear()
        rrefs = [make("worker0", ag.tensor([float(i)])) for i in range(100)]
        assert joined == [True] * 100
        values = await asyncio.gather(*[rref.to_here() for rref in rrefs])
        assert [float(value.numpy()[0]) for value in values] == [2.0 * i for i in range(100)]
        assert all(rref.owner_name() == "worker0" for rref in rrefs)
        assert len({str(rref) for rref in rrefs}) == 100
        del rrefs
        await nothing_is_kept_by(c[0])


async def test_another_worker_function_or_line_does_not_belong_to_it(cluster, joined):
    async with cluster(2):
        await begin()
        x = ag.tensor([3.0])
        there = make("worker1", x)
        assert not joined[-1]
        assert there.owner_name() == "worker1"
        await begin()
        assert joined[-1]
        product = ag.remote("worker0", ag.mul, args=(x, x))
        assert not joined[-1]
        await begin()
        assert joined[-1]
        elsewhere = ag.remote("worker0", ag.add, args=(x, x))
        assert not joined[-1]
        assert [float((await each).numpy()[0]) for each in (there, product, elsewhere)] == [6, 9, 6]


async def test_what_cannot_go_the_same_way_goes_another(cluster):
    large = ag.tensor(np.ones(100_000))
    async with cluster(1):
        await begin()
        for value in (large, ag.tensor([1.0]), large):
            assert (await make("worker0", value)).numpy().sum() == 2 * value.numpy().sum()
        await begin()
        with pytest.raises(TypeError, match="args is a tuple"):
            ag.remote("worker0", ag.add, args=7)
        await begin()
        with pytest.raises(UnknownWorker):
            make("nobody", large)


async def test_what_cannot_be_computed_is_told_as_ever(cluster, joined):
    async with cluster(1) as c:
        await begin()
        joined.clear()
        rref = ag_add_line("worker0", ag.tensor([1.0, 2.0]), ag.tensor([1.0, 2.0]))
        await rref
        await ag_add_line("worker0", ag.tensor([1.0]), ag.tensor([1.0]))
        wrong = ag_add_line("worker0", ag.tensor([1.0, 2.0]), ag.tensor([1.0, 2.0, 3.0]))
        assert joined[-1]
        with pytest.raises(ValueError, match="broadcast"):
            await wrong
        with pytest.raises(ValueError, match="broadcast"):
            await wrong.future()
        del wrong, rref
        await nothing_is_kept_by(c[0])


def ag_add_line(to: str, one: Any, other: Any) -> ag.RRef:
    return ag.remote(to, ag.add, args=(one, other))


async def test_in_a_context_gradients_flow_as_ever(cluster, joined):
    async with cluster(1):
        await begin()
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as context:
            y = await make("worker0", x)
            assert not joined[-1]
            await context.backward(y.sum())
            assert context.gradients[x].numpy().tolist() == [2.0, 2.0]


async def test_a_timeout_of_its_own_counts(cluster, joined):
    async with cluster(1):
        await begin()
        joined.clear()
        rref = make("worker0", ag.tensor([1.0]), timeout=math.inf)
        assert rref._call is not None
        assert rref._call._seconds == math.inf
        assert not joined
        assert (await rref).numpy().tolist() == [2.0]


async def test_a_call_that_makes_references_hands_its_deadline_on(cluster, joined):
    async with cluster(2):
        await begin()
        joined.clear()
        assert await ag.rpc_async("worker1", makes, args=("worker0",), timeout=30) == 8.0
        assert True not in joined


async def makes(to: str) -> float:
    total = 0.0
    for _ in range(4):
        rref = make(to, ag.tensor([1.0]))
        assert rref._call is not None
        assert rref._call._seconds <= 30
        total += float((await rref).numpy()[0])
    assert current_rrefs()._series is None
    return total


async def test_a_recording_sees_every_creation(cluster):
    async with cluster(1):
        await begin()
        with profile() as recording:
            for _ in range(3):
                await make("worker0", ag.tensor([1.0]))
        assert sum(span.kind == "remote" for span in recording) == 3


async def test_a_thread_makes_references_as_ever(cluster, joined):
    async with cluster(1):
        await begin()
        await make("worker0", ag.tensor([1.0]))
        assert joined[-1]
        rref = await asyncio.to_thread(make, "worker0", ag.tensor([1.0]))
        assert not joined[-1]
        assert (await rref).numpy().tolist() == [2.0]


async def test_a_worker_that_was_restarted_gets_a_series_of_its_own(cluster):
    async with cluster(1, processes=True) as c:
        await begin()
        series = current_rrefs()._series
        await c.restart("worker0")
        assert (await make("worker0", ag.tensor([1.0]))).numpy().tolist() == [2.0]
        assert current_rrefs()._series is not series
