"""Local clusters whose workers live in this loop."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

import aiograd as ag
from aiograd.cluster.api import current_worker, debug_info, get_worker_info, init_rpc, workers
from aiograd.cluster.local import LocalCluster
from aiograd.errors import RpcError, SerializationError, UnknownWorker, WorkerClosed, WorkerLost
from aiograd.rpc.api import inline, rpc_async
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.options import Options


async def who() -> WorkerInfo:
    return get_worker_info()


def plain_who() -> WorkerInfo:
    return get_worker_info()


async def test_workers_and_driver_call_each_other(cluster):
    async with cluster(2) as c:
        assert get_worker_info() == WorkerInfo("driver", 2)
        assert await c["worker0"].call(who) == WorkerInfo("worker0", 0)
        assert await rpc_async("worker1", plain_who) == WorkerInfo("worker1", 1)
        assert await rpc_async("worker1", rpc_from_there, ("driver",)) == WorkerInfo("driver", 2)
        assert [info.name for info in workers()] == ["worker0", "worker1", "driver"]
    with pytest.raises(WorkerClosed):
        current_worker()


async def rpc_from_there(to: str) -> WorkerInfo:
    return await rpc_async(to, who)


async def test_the_workers_are_listed_without_the_driver(cluster):
    async with cluster(3) as c:
        assert [worker.name for worker in c] == ["worker0", "worker1", "worker2"]
        assert [worker.rank for worker in c.workers] == [0, 1, 2]
        assert len(c) == 3
        assert c["worker1"].info == c[1].info == WorkerInfo("worker1", 1)
        assert c["worker1"] == c[1]
        assert len({c["worker1"], c[1], c[0]}) == 2
        assert "worker1" in c
        with pytest.raises(UnknownWorker):
            c["driver"]
        with pytest.raises(LookupError, match="worker7"):
            c["worker7"]


async def test_a_handle_can_be_called_and_can_be_the_receiver(cluster):
    async with cluster(1) as c:
        assert await c["worker0"].call(divmod, 7, 2) == (3, 1)
        assert await c["worker0"].call(int, "ff", base=16) == 255
        assert await rpc_async(c["worker0"], who) == WorkerInfo("worker0", 0)


async def test_a_handle_arrives_elsewhere_as_the_worker_it_means(cluster):
    async with cluster(2) as c:
        assert await c["worker0"].call(rpc_from_there, c["worker1"]) == WorkerInfo("worker1", 1)


async def test_workers_can_have_names_of_their_own(cluster):
    async with cluster(2, names=["left", "right:1"]) as c:
        assert await c["right:1"].call(who) == WorkerInfo("right:1", 1)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"n_workers": 2, "names": ["a"]}, ValueError),
        ({"n_workers": 1, "names": "a"}, ValueError),
        ({"n_workers": 1, "names": ["a b"]}, ValueError),
        ({"n_workers": 2, "names": ["a", "a"]}, RpcError),
        ({"n_workers": 1, "names": ["driver"]}, RpcError),
        ({"n_workers": -1}, ValueError),
        ({"n_workers": 1.5}, TypeError),
        ({"n_workers": True}, TypeError),
        ({"n_workers": 1, "options": {}}, TypeError),
        ({"n_workers": 1, "options": Options(transport="memory")}, ValueError),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings, error):
    with pytest.raises(error):
        LocalCluster(**settings)


async def test_a_cluster_can_be_awaited_and_closed(cluster):
    c = await cluster(1)
    assert await asyncio.create_task(_call_worker0()) == WorkerInfo("worker0", 0)
    await c.close()
    await c.close()
    with pytest.raises(WorkerClosed):
        await c["worker0"].call(who)
    with pytest.raises(RpcError, match="another"):
        await c


async def _call_worker0() -> WorkerInfo:
    return await rpc_async("worker0", who)


async def test_a_cluster_is_found_where_context_variables_are_lost(cluster):
    # as in a notebook, where every cell that awaits has a context of its own
    loop = asyncio.get_running_loop()
    c = await loop.create_task(cluster(2)._open(), context=contextvars.Context())

    def cell(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return loop.create_task(work, context=contextvars.Context())

    assert await cell(_call_worker0()) == WorkerInfo("worker0", 0)
    assert await cell(who()) == WorkerInfo("driver", 2)
    await cell(c.restart("worker1"))
    assert await cell(who()) == WorkerInfo("driver", 2)  # still, though another one came later
    await cell(c.close())
    with pytest.raises(WorkerClosed):
        await cell(who())


async def test_several_clusters_at_once(cluster):
    async with cluster(1) as first:
        async with cluster(2) as second:
            assert await first["worker0"].call(_workers_there) == 2
            assert await second["worker0"].call(_workers_there) == 3
            assert current_worker() is second.driver
        assert current_worker() is first.driver
        assert await rpc_async("worker0", _workers_there) == 2


async def _workers_there() -> int:
    return len(workers())


async def test_repeated_start_and_stop(cluster):
    for _ in range(5):
        async with cluster(2):
            assert await rpc_async("worker1", who) == WorkerInfo("worker1", 1)


async def test_init_rpc_beside_a_cluster_needs_a_context_of_its_own(cluster):
    async with cluster(1):
        with pytest.raises(RpcError, match="already"):
            await init_rpc("me")


async def test_a_cluster_without_workers_is_a_driver_alone(cluster):
    async with cluster(0) as c:
        assert len(c) == 0
        assert await rpc_async("driver", who) == WorkerInfo("driver", 0)


async def test_counters_are_zero_at_rest_everywhere(cluster):
    async with cluster(2):
        await rpc_async("worker0", rpc_from_there, ("worker1",))
        for counters in (debug_info(), await rpc_async("worker0", debug_info)):
            assert counters.pop("workers") == 3
            assert set(counters.values()) == {0}


async def test_scaling_up_and_down(cluster):
    async with cluster(2) as c:
        await c.scale(4)
        assert [worker.info for worker in c] == [
            WorkerInfo("worker0", 0),
            WorkerInfo("worker1", 1),
            WorkerInfo("worker2", 3),
            WorkerInfo("worker3", 4),
        ]
        assert await c["worker3"].call(rpc_from_there, "worker2") == WorkerInfo("worker2", 3)
        assert await c["worker0"].call(rpc_from_there, "worker3") == WorkerInfo("worker3", 4)
        await c.scale(1)
        assert [worker.name for worker in c] == ["worker0"]
        assert [info.name for info in workers()] == ["worker0", "driver"]
        with pytest.raises(UnknownWorker):
            rpc_async("worker3", who)
        await c.scale(2)
        assert c.workers[1].info == WorkerInfo("worker4", 5)  # no rank is given twice


async def test_a_worker_that_leaves_finishes_its_work_first(cluster):
    async with cluster(2) as c:
        work = c["worker1"].call(asyncio.sleep, 0.05, "done")
        await c.scale(1)
        assert await work == "done"


async def test_a_killed_worker_is_lost_and_can_be_restarted(cluster, caplog):
    caplog.set_level(logging.INFO, "aiograd.cluster")
    async with cluster(2) as c:
        waiting = c["worker1"].call(asyncio.sleep, 60)
        await c["worker1"].call(who)
        await c.kill("worker1")
        with pytest.raises(WorkerLost, match="worker1"):
            await waiting
        with pytest.raises(WorkerLost):
            await c["worker1"].call(who)
        assert "dead" in repr(c)
        assert len(c) == 2
        await c.restart("worker1")
        assert await c["worker1"].call(who) == WorkerInfo("worker1", 1)
        assert await c["worker0"].call(rpc_from_there, "worker1") == WorkerInfo("worker1", 1)
        await c.restart("worker0")  # one that lives
        assert await c["worker1"].call(rpc_from_there, "worker0") == WorkerInfo("worker0", 0)
    assert "restarting worker" in caplog.text


async def test_leaving_after_an_error_does_not_wait(cluster):
    async def fail() -> None:
        async with cluster(2) as c:
            c["worker0"].call(asyncio.sleep, 60).add_done_callback(lambda f: f.exception())
            await c["worker0"].call(who)
            raise ZeroDivisionError

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        await fail()
    assert time.monotonic() - start < 2.0


async def test_leaving_waits_at_most_for_the_grace(cluster, caplog):
    start = time.monotonic()
    async with cluster(2, options=Options(grace=0.3)) as c:
        work = c["worker0"].call(asyncio.sleep, 60)
        await c["worker0"].call(who)
    assert 0.3 <= time.monotonic() - start < 1.3
    assert isinstance(work.exception(), WorkerClosed)


async def test_a_cluster_without_grace_leaves_at_once_and_says_no_more_than_that(cluster, caplog):
    async with cluster(2, options=Options(grace=0.0)) as c:
        await c["worker0"].call(who)
        caplog.clear()
    assert not [record for record in caplog.records if "dismiss" in record.getMessage()]


async def test_what_belongs_to_a_worker_cannot_travel_and_says_what_to_send_instead(cluster):
    async def nothing():
        yield

    async with cluster(1) as c, ag.context() as ctx:
        worker = c["worker0"]
        for value, cure in (
            (c, 'get cluster["worker0"]'),
            (current_worker(), "ag.current_worker()"),
            (ctx, "send ctx.id"),
            (worker.stream(nothing), "send its items"),
        ):
            with pytest.raises(SerializationError, match=re.escape(cure)) as caught:
                worker.call(print, [value])
            assert "args[0][0]" in str(caught.value)
        with pytest.raises(SerializationError, match=r"func\.c .*LocalCluster cannot travel"):
            worker.call(lambda: c["worker0"])


async def test_a_cancelled_start_leaves_nothing_behind(cluster):
    start = asyncio.create_task(cluster(3)._open())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    with pytest.raises(WorkerClosed):
        current_worker()


async def test_a_cluster_shows_itself(cluster):
    c = cluster(2)
    assert "not started" in repr(c)
    async with c:
        assert "worker0 running" in repr(c)
        assert "running" in repr(c["worker0"])
        page = c._repr_html_()
        assert page.count("<tr") == 3
        assert "worker1" in page
        await c.kill("worker0")
        assert "dead" in c._repr_html_()
    assert "closed" in repr(c)
    assert "closed" in c._repr_html_()


async def test_unknown_workers_are_named(cluster):
    async with cluster(1) as c:
        for change in (c.kill, c.restart):
            with pytest.raises(UnknownWorker, match="nobody"):
                await change("nobody")
        with pytest.raises(UnknownWorker):
            c.logs("nobody")


@inline
def rank_of(name):
    return get_worker_info(name).rank


async def test_a_worker_knows_the_others_before_it_can_be_called(cluster):
    async with cluster(2) as c:

        async def ask_until(ended: asyncio.Task[None]) -> None:
            while not ended.done():
                try:
                    assert await rpc_async("worker1", rank_of, ("worker0",)) == 0
                except WorkerLost:  # while it is not there
                    await asyncio.sleep(0)

        for _ in range(5):
            await c.kill("worker1")
            restarting = asyncio.create_task(c.restart("worker1"))
            await asyncio.gather(restarting, *(ask_until(restarting) for _ in range(5)))


# ── handles ───────────────────────────────────────────────────────────────────────────────────────


def fail() -> None:
    raise ValueError("on purpose")


async def test_a_forgotten_call_of_a_handle_is_logged_with_the_users_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ag.LocalCluster(1, processes=False) as cluster:
        with caplog.at_level(logging.WARNING, "aiograd"):
            call = cluster["worker0"].call(fail)
            line = sys._getframe().f_lineno - 1
            await asyncio.wait([call])
            del call
            await cluster["worker0"].call(int)
    assert any(f"{__file__}:{line}" in record.getMessage() for record in caplog.records)


def show(**given: int) -> dict[str, int]:
    return given


async def sleeps() -> None:
    await asyncio.get_running_loop().create_future()


async def yields_never() -> AsyncIterator[int]:
    await sleeps()
    yield 1


async def test_a_handle_within_seconds_limits_calls_values_and_streams() -> None:
    async with ag.LocalCluster(1, processes=False) as cluster:
        worker = cluster["worker0"]
        soon = worker.within(0.05)
        assert soon == worker
        with pytest.raises(ag.errors.DeadlineExceeded):
            await soon.call(sleeps)
        with pytest.raises(ag.errors.RRefError, match=r"within 0\.05 s"):
            await soon.remote(sleeps)
        with pytest.raises(ag.errors.DeadlineExceeded):
            await anext(soon.stream(yields_never))
        assert await worker.call(show, timeout=3) == {"timeout": 3}
        with pytest.raises(ValueError, match="timeout"):
            worker.within(-1)


async def test_short_forms_take_arguments_of_any_name() -> None:
    given = {"func": 1, "self": 2, "to": 3}
    async with ag.LocalCluster(1, processes=False) as cluster:
        assert await cluster["worker0"].call(show, **given) == given
        assert await cluster["worker0"].remote(show, **given) == given
        assert await ag.Group(["worker0"]).call(show, **given) == [given]
