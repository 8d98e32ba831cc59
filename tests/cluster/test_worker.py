"""Workers that join, know each other, and leave."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import stat
import time
from dataclasses import replace
from datetime import timedelta

import pytest

import aiograd as ag
from aiograd.cluster.api import (
    current_worker,
    debug_info,
    get_worker_info,
    init_rpc,
    shutdown,
    workers,
)
from aiograd.cluster.config import WorkerPlan, plan_worker
from aiograd.cluster.joining.rendezvous import Rendezvous
from aiograd.cluster.worker import Worker
from aiograd.errors import (
    AuthError,
    RpcError,
    RRefLeak,
    UnknownWorker,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.api import rpc_async
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network
from tests.support.waiting import until

QUICK = Options(grace=2.0, timeout=10.0, secret=b"0123456789abcdef")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["unix", "tcp", "file"])
def rendezvous(request, tmp_path) -> str:
    if request.param == "tcp":
        return f"127.0.0.1:{free_port()}"
    return f"{request.param}:{tmp_path}/meet"


async def who() -> WorkerInfo:
    return get_worker_info()


# ── names and infos ─────────────────────────────────────────────────────────────────────────────


async def test_worker_info(world):
    names = [f"worker{n}" for n in range(4)]
    a, *_ = await world.static(*names)

    async def look():
        assert get_worker_info() == WorkerInfo("worker0", 0)
        assert get_worker_info("worker2") == get_worker_info(2) == WorkerInfo("worker2", 2)
        with pytest.raises(UnknownWorker, match="worker9"):
            get_worker_info("worker9")
        return workers()

    infos = await world.run_as(a, look)
    assert [(info.name, info.rank) for info in infos] == list(zip(names, range(4), strict=True))


async def test_worker_info_pickle(world):
    a, _ = await world.static("a", "b")
    info = WorkerInfo("b", 1)
    assert pickle.loads(pickle.dumps(info)) == info
    assert len({info, WorkerInfo("b", 1), WorkerInfo("b", 2)}) == 2
    assert await a.agent.call("b", _same, (info,)) == info


async def _same(value):
    return value


@pytest.mark.parametrize("name", ["abc*", " ", "", "a b", "x" * 500])
async def test_worker_name_rules(name):
    with pytest.raises(ValueError, match="name"):
        await init_rpc(name)
    with pytest.raises(ValueError, match="name"):
        WorkerInfo(name, 0)


async def test_address_forms(world):
    a, _b = await world.static("a", "b")
    for to in ("b", 1, WorkerInfo("b", 1)):
        assert await a.agent.call(to, who) == WorkerInfo("b", 1)
    for unknown in (3, -1, "c", WorkerInfo("c", 1)):
        with pytest.raises(UnknownWorker):
            a.agent.call(unknown, who)
    for half in (0.5, -0.5):
        with pytest.raises(ValueError, match="rank"):
            a.agent.call(half, who)


# ── starting ────────────────────────────────────────────────────────────────────────────────────


async def test_workers_meet_in_every_way(rendezvous):
    async def run(rank: int) -> list[WorkerInfo]:
        worker = await init_rpc(
            f"w{rank}", rank=rank, world_size=3, rendezvous=rendezvous, options=QUICK
        )
        assert current_worker() is worker
        answers = [await rpc_async(other, who) for other in range(3)]
        await shutdown()
        return answers

    everyone = [WorkerInfo(f"w{rank}", rank) for rank in range(3)]
    assert await asyncio.gather(*(run(rank) for rank in reversed(range(3)))) == [everyone] * 3


async def test_tensors_take_the_fast_codec_to_a_rank_that_was_dialled_before_the_layers_came(
    rendezvous, monkeypatch
):
    ranks = [
        Worker(f"w{rank}", rank=rank, world_size=2, rendezvous=rendezvous, options=QUICK)
        for rank in range(2)
    ]
    await asyncio.gather(*[worker.start() for worker in ranks])
    general = []
    try:
        for worker in ranks:
            codec = worker.agent.codec
            monkeypatch.setattr(codec, "encode", lambda value, *_: general.append(value))
        for worker, other in (ranks, ranks[::-1]):
            total = await worker.agent.call(other.rank, ag.add, (ag.ones(3), ag.ones(3)))
            assert total.tolist() == [2.0] * 3
        assert general == []
    finally:
        monkeypatch.undo()
        await asyncio.gather(*[worker.close() for worker in ranks])


async def test_a_file_rendezvous_brings_a_secret_and_is_removed(tmp_path):
    path = tmp_path / "meet"

    async def run(rank: int) -> int:
        async with Worker(f"w{rank}", rank=rank, world_size=2, rendezvous=f"file:{path}"):
            assert await rpc_async(1 - rank, who) == WorkerInfo(f"w{1 - rank}", 1 - rank)
            return stat.S_IMODE(path.stat().st_mode)

    assert await asyncio.gather(run(1), run(0)) == [0o600, 0o600]
    assert os.listdir(tmp_path) == []


async def test_a_file_rendezvous_of_another_user_is_an_auth_error_at_once(tmp_path, monkeypatch):
    path = tmp_path / "meet"
    path.touch(mode=0o600)
    path.write_text('{"addresses": ["unix:/nowhere"], "secret": "%s"}' % ("ab" * 32))
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        me = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: me + 1)
    worker = Worker("b", rank=1, world_size=2, rendezvous=f"file:{path}")
    with pytest.raises(AuthError, match="another user"):
        await worker.start()


async def test_workers_of_one_user_need_no_secret_on_one_host(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run(rank: int) -> WorkerInfo:
        async with Worker(f"w{rank}", rank=rank, rendezvous=f"unix:{tmp_path}/s", world_size=2):
            return await rpc_async(1 - rank, who)

    assert await asyncio.gather(run(0), run(1)) == [WorkerInfo("w1", 1), WorkerInfo("w0", 0)]


async def test_a_wrong_secret_is_refused(tmp_path):
    place = f"unix:{tmp_path}/meet"
    wrong = Options(secret=b"another secret of 16", timeout=5.0)
    async with Worker("a", rank=0, rendezvous=place, options=QUICK):
        with pytest.raises(AuthError):
            await Worker("b", rank=1, rendezvous=place, options=wrong).start()


async def test_workers_beyond_this_host_meet_over_tls_by_the_secret_alone():
    place = f"0.0.0.0:{free_port()}"
    first, second = (
        Worker(name, rank=rank, world_size=2, rendezvous=place, options=QUICK)
        for rank, name in enumerate("ab")
    )
    await asyncio.gather(first.start(), second.start())
    try:
        link = second.agent.link("a")
        assert await second.agent.call("a", abs, (-1,)) == 1
        assert link.connection.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert first.agent.cluster == second.agent.cluster != bytes(16)
    finally:
        await asyncio.gather(first.close(), second.close())


async def test_a_missing_rank_0_is_reported_in_bounded_time(rendezvous):
    plan = plan_worker("b", 1, 2, rendezvous, QUICK, {})
    with pytest.raises(RpcError, match="rank 0"):
        await Worker.from_plan(replace(plan, join_timeout=0.2)).start()


async def test_a_short_timeout_for_calls_is_none_for_starting(world):
    a, b = await world.static("a", "b", options=Options(timeout=1e-6))
    assert await a.agent.call("b", who, timeout=5.0) == b.info


async def test_a_world_that_stays_incomplete_says_who_is_missing(world):
    a, b = (world.worker(name, rank, 4, join_timeout=0.2) for rank, name in enumerate("ab"))
    outcomes = await asyncio.gather(a.start(), b.start(), return_exceptions=True)
    assert all(isinstance(outcome, RpcError) for outcome in outcomes)
    assert "ranks 2, 3" in str(outcomes[0])


@pytest.mark.parametrize("rendezvous", ["unix", "tcp"], indirect=True)
async def test_a_rendezvous_in_use_is_an_rpc_error(rendezvous):
    async with Worker("a", rank=0, rendezvous=rendezvous, options=QUICK):
        with pytest.raises(RpcError, match="in use"):
            await Worker("b", rank=0, rendezvous=rendezvous, options=QUICK).start()
    async with Worker("c", rank=0, rendezvous=rendezvous, options=QUICK):
        assert await rpc_async("c", who) == WorkerInfo("c", 0)


async def test_a_socket_left_by_a_dead_worker_is_taken_over(tmp_path):
    path = str(tmp_path / "meet")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with Worker("a", rank=0, rendezvous=f"unix:{path}", options=QUICK):
        assert await rpc_async("a", who) == WorkerInfo("a", 0)


async def test_init_duplicate_name(world):
    a, b, c = (world.worker(name, rank, 3) for rank, name in enumerate(["x", "y", "y"]))
    outcomes = await asyncio.gather(a.start(), b.start(), c.start(), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, RpcError)
        assert "'y'" in str(outcome)


async def test_init_duplicate_name_in_an_open_cluster_leaves_the_first_one_unharmed(world):
    a, b = await world.open("a", "b")
    with pytest.raises(RpcError, match="unique"):
        await world.worker("b", 5).start()
    with pytest.raises(RpcError, match="unique"):
        await world.worker("a", 5).start()
    assert await a.agent.call("b", who) == WorkerInfo("b", 1)
    assert await b.agent.call("a", who) == WorkerInfo("a", 0)


async def test_init_wrong_types():
    with pytest.raises(TypeError, match="options"):
        await init_rpc("a", options={})
    with pytest.raises(TypeError, match="rank"):
        await init_rpc("a", rank="0")


class CountingNetwork(Network):
    """A transport of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.listened: list[str] = []

    async def listen(self, address, factory, **settings):
        self.listened.append(address)
        return await super().listen(address, factory, **settings)


async def test_init_backend_registry():
    network = CountingNetwork()
    plan = WorkerPlan(
        name="a",
        rank=0,
        rendezvous=Rendezvous("memory", "meet"),
        network=network,
        secret=b"0123456789abcdef",
    )
    async with Worker.from_plan(plan) as worker:
        assert network.listened == ["memory:meet"]
        assert await rpc_async("a", who) == worker.info
        with pytest.raises(RpcError, match="in use"):
            await Worker.from_plan(plan).start()
    with pytest.raises(ValueError, match="transport"):
        Options(transport="carrier pigeon")


async def test_init_world_one():
    worker = await init_rpc("me", world_size=1)
    assert await rpc_async("me", _double, (2,)) == 4
    assert await rpc_async(0, _double, args=(3,)) == 6
    assert workers() == [worker.info] == [WorkerInfo("me", 0)]
    await shutdown()


async def _double(x):
    return 2 * x


async def test_init_timeouts():
    await init_rpc("me", options=Options(timeout=0.5))
    assert current_worker().options.timeout == 0.5
    await shutdown()
    with pytest.raises(TypeError, match="seconds"):
        Options(timeout=timedelta(seconds=100))


async def test_init_threads():
    async with Worker("me", options=Options(threads=27)) as worker:
        assert worker.options.threads == 27


async def test_init_dynamic(world):
    a, b = await world.open("a", "b")
    assert await b.agent.call("a", who) == WorkerInfo("a", 0)
    c = world.worker("c", 2)
    await c.start()
    for worker in (a, b):  # they know the late joiner as soon as it has joined
        assert await worker.agent.call("c", who) == WorkerInfo("c", 2)
        assert await c.agent.call(worker.name, who) == worker.info
    await b.close()
    assert [info.name for info in a.workers()] == ["a", "c"]
    with pytest.raises(UnknownWorker):
        a.agent.call("b", who)
    await world.close([a, c])


@pytest.mark.parametrize("form", ["file:/tmp/x", "127.0.0.1:1"])
async def test_init_dynamic_no_rank(form, monkeypatch):
    with pytest.raises(ValueError, match="rank"):
        await init_rpc("a", rendezvous=form)
    monkeypatch.setenv("AIOGRAD_RENDEZVOUS", form)
    with pytest.raises(ValueError, match="RANK"):
        await init_rpc("a")


async def test_init_dynamic_static_mix(world):
    a, _, _ = await world.static("a", "b", "c")
    with pytest.raises(RpcError, match="static"):
        await world.worker("d", 3).start()
    assert await a.agent.call("b", who) == WorkerInfo("b", 1)


async def test_init_dynamic_static_mix_the_other_way_round(world):
    await world.open("a")
    with pytest.raises(RpcError, match="open"):
        await world.worker("b", 1, world_size=2).start()


async def test_a_worker_without_a_rank_is_given_one(world):
    a, b = await world.open("a", "b")
    await b.close()
    c = world.worker("c", 0)
    late = Worker.from_plan(replace(c._plan, rank=None))
    await late.start()
    try:
        assert late.rank == 2  # never one that somebody else had
        assert await a.agent.call("c", who) == WorkerInfo("c", 2)
        assert await late.agent.call("a", who) == WorkerInfo("a", 0)
    finally:
        await late.close()


async def test_a_cancelled_start_leaves_nothing_behind(world):
    worker = world.worker("a", 0, world_size=2)
    start = asyncio.create_task(worker.start())
    while worker._coordinator is None or not worker._coordinator._joining:
        await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    again = await world.static("a")  # its name and its address are free again
    await again[0].close()


async def test_dbg_keys(world):
    a, b = await world.static("a", "b")
    parts = [
        b.agent.links.counters(),
        *(part.counters() for part in b._parts if hasattr(part, "counters")),
    ]
    found = await a.agent.call("b", debug_info)
    assert found.keys() == {"workers", *(key for part in parts for key in part)}
    assert len(found) == 1 + sum(map(len, parts))  # no two layers use the same key
    assert found.pop("workers") == 2
    assert found.keys() >= {
        *("contexts", "backward_passes", "owner_rrefs", "user_rrefs"),
        *("pending_calls", "running_calls", "abandoned_calls", "buffered_bytes"),
    }
    assert set(found.values()) == {0}


async def test_looking_at_the_counters_from_afar_is_not_counted(world):
    (a,) = await world.static("a")
    found = await a.agent.call("a", debug_info)
    assert found.pop("workers") == 1
    assert set(found.values()) == {0}


# ── losses and restarts ─────────────────────────────────────────────────────────────────────────


async def test_everyone_learns_that_a_worker_is_gone(world):
    a, b, c = await world.static("a", "b", "c")
    waiting = b.agent.call("c", asyncio.sleep, (60,))
    await b.agent.call("c", who)
    await c.close(graceful=False)
    with pytest.raises(WorkerLost, match="c"):
        await waiting
    for worker in (a, b):
        await worker.member.wait_gone("c")
        with pytest.raises(WorkerLost):
            await worker.agent.call("c", who)


class Dying(asyncio.BufferedProtocol):
    """A worker that answers the first bytes with its death."""

    def __init__(self, die) -> None:
        self._die = die

    def connection_made(self, transport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(512)

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.write(b"aiograd")  # as a hello begins
        self._transport.close()
        self._die()


async def test_a_worker_that_dies_while_it_is_dialled_is_lost(world):
    a, b, c = await world.static("a", "b", "c")
    (address,) = c.agent.info.addresses
    listeners = b.agent.runtime.network.memory.listeners
    listeners[address] = lambda: Dying(lambda: listeners.pop(address, None))
    with pytest.raises(WorkerLost, match="c") as caught:
        await b.agent.call("c", who)
    assert caught.value.executed == "no"
    assert await a.agent.call("b", who) == WorkerInfo("b", 1)


@pytest.mark.parametrize("kind", ["static", "open"])
async def test_a_worker_comes_back_under_its_name(world, kind):
    a, b, c = await getattr(world, kind)("a", "b", "c")
    old = c.agent.incarnation
    await c.close(graceful=False)
    await a.member.wait_gone("c")
    again = world.worker("c", 2, world_size=3 if kind == "static" else None)
    await again.start()
    assert again.agent.incarnation != old
    for worker in (a, b):
        assert await worker.agent.call("c", who) == WorkerInfo("c", 2)
        assert await again.agent.call(worker.name, who) == worker.info


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────


async def test_shutdown_then_rpc(world):
    a, b = await world.static("a", "b")
    await world.close([a, b])
    with pytest.raises(WorkerClosed):
        a.agent  # noqa: B018 - it raises
    with pytest.raises(WorkerClosed):
        rpc_async("b", who)
    await a.close()  # again, and nothing happens


@pytest.mark.parametrize("calls", [0, 3])
async def test_shutdown_local(world, calls):
    a, b = await world.static("a", "b")
    for _ in range(calls):
        await a.agent.call("b", who)
    start = time.monotonic()
    await a.close(graceful=False)  # b is told nothing and does nothing
    assert time.monotonic() - start < 0.5
    assert not a.running
    assert b.running


async def test_a_waiting_caller_is_told_that_its_worker_was_closed(world):
    a, _b = await world.static("a", "b")
    waiting = a.agent.call("b", asyncio.sleep, (60,))
    await a.close(graceful=False)
    with pytest.raises(WorkerClosed):
        await waiting


DONE: list[str] = []  # what the functions below did; they run in this process


async def _work(name: str) -> None:
    await asyncio.sleep(0.001)
    DONE.append(name)


async def _hand_on(ring: list[str], hops: int) -> None:
    """Do something, and start the next one without waiting for it."""
    if hops:
        rpc_async(ring[hops % len(ring)], _hand_on, (ring, hops - 1))
    await _work(get_worker_info().name)


async def test_graceful_uneven(world):
    a, b, c = await world.static("a", "b", "c")
    DONE.clear()

    async def drive():
        for to in ("b", "c"):
            for _ in range(30):
                rpc_async(to, _work, (to,))
        await shutdown()

    await asyncio.gather(world.run_as(a, drive), b.close(), c.close())
    assert DONE == ["b"] * 30 + ["c"] * 30


async def test_graceful_uneven_counts_nested_calls_that_nobody_waits_for(world):
    names = ["a", "b", "c", "d"]
    workers = await world.static(*names)
    DONE.clear()
    for worker in workers:
        worker.agent.call("b", _hand_on, (names, 20))
    await world.close(workers)
    assert len(DONE) == 4 * 21


async def test_shutdown_waits_no_longer_than_its_grace_for_work_that_never_ends(world, caplog):
    a, b = await world.static("a", "b", options=Options(grace=0.2))
    waiting = a.agent.call("b", asyncio.sleep, (60,))
    start = time.monotonic()
    await world.close([a, b])
    assert time.monotonic() - start < 1.2
    with pytest.raises((WorkerClosed, WorkerLost)):
        await waiting
    assert "left after 0.2 s" in caplog.text


async def test_shutdown_waits_no_longer_than_its_grace_for_peers_that_stay(world, caplog):
    a, b, c = await world.static("a", "b", "c")
    start = time.monotonic()
    await asyncio.gather(a.close(timeout=0.2), c.close(timeout=0.1))
    assert time.monotonic() - start < 1.2
    assert b.running
    assert "left after" in caplog.text


async def test_a_cancelled_shutdown_still_closes_everything(world):
    a, b = await world.static("a", "b")
    leaving = asyncio.create_task(a.close())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not a.running
    with pytest.raises(WorkerLost):
        await b.agent.call("a", who)


async def test_nobody_joins_a_cluster_that_is_being_closed(world):
    a, b = await world.open("a", "b")
    going = asyncio.create_task(a.close())
    await b.member.dismissed
    with pytest.raises(RpcError, match="being closed"):
        await world.worker("c", 2).start()
    await asyncio.gather(going, b.close())


async def test_a_worker_that_failed_to_start_is_not_running(world):
    await world.open("a")
    again = world.worker("a", 7)
    with pytest.raises(RpcError, match="unique"):
        await again.start()
    assert not again.running
    assert "closed" in repr(again)
    with pytest.raises(WorkerClosed):
        again.agent  # noqa: B018 - it raises
    await again.close()


async def test_shutdown_goes_on_without_those_who_are_lost(world):
    a, b, c = await world.static("a", "b", "c", options=Options(grace=20.0))
    leaving = [asyncio.create_task(worker.close()) for worker in (a, b)]
    await asyncio.sleep(0)
    start = time.monotonic()
    await c.close(graceful=False)
    await asyncio.gather(*leaving)
    assert time.monotonic() - start < 2.0


async def test_shutdown_ends_when_the_leader_dies(world, caplog):
    a, b, c = await world.static("a", "b", "c", options=Options(grace=20.0))
    leaving = [asyncio.create_task(worker.close()) for worker in (b, c)]
    await asyncio.sleep(0)
    start = time.monotonic()
    await a.close(graceful=False)
    await asyncio.gather(*leaving)
    assert time.monotonic() - start < 2.0
    assert "left without waiting" in caplog.text


async def test_the_coordinator_of_an_open_cluster_leaves_last(world):
    a, b, c = await world.open("a", "b", "c")
    going = asyncio.create_task(a.close())
    await b.member.dismissed  # it was asked to leave, too
    assert not going.done()
    await asyncio.gather(b.close(), c.close(), going)


class Part:
    """A layer that takes part in leaving."""

    def __init__(self, events: list[str], error: Exception | None = None) -> None:
        self.events, self.error = events, error

    async def settle(self, deadline: float) -> None:
        self.events.append("settle")
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.events.append("close")

    def counters(self) -> dict[str, int]:
        return {"owner_rrefs": 0}


async def test_layers_settle_before_the_farewell_and_close_after_it(world):
    a, b = await world.static("a", "b")
    events: list[str] = []
    a._parts.append(Part(events))
    assert a.debug_info()["owner_rrefs"] == 0
    await world.close([a, b])
    assert events == ["settle", "close"]
    events.clear()
    (c,) = await world.open("c")
    c._parts.append(Part(events))
    await c.close(graceful=False)
    assert events == ["close"]


async def test_shutdown_errors(world):
    a, b, c = await world.static("a", "b", "c")
    events: list[str] = []
    for worker in (b, c):
        worker._parts.append(Part(events, RRefLeak("a reference was leaked")))
    outcomes = await asyncio.gather(a.close(), b.close(), c.close(), return_exceptions=True)
    assert outcomes[0] is None  # what peers do wrong is logged, not raised
    assert [type(outcome) for outcome in outcomes[1:]] == [RRefLeak, RRefLeak]
    assert events == ["settle", "settle", "close", "close"]
    assert not any(worker.running for worker in (a, b, c))


async def test_the_loop_wakes_at_least_once_a_second():
    async with Worker("me"):
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        handle = current_worker()._tick
        assert handle is not None
        assert handle.when() - loop.time() < 1.0
        loop.call_at(handle.when() + 0.01, woken.set_result, None)
        await woken
        again = current_worker()._tick
        assert again is not handle
        assert again.when() - loop.time() < 1.0


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_a_rendezvous_at_a_loopback_port_goes_on_over_a_unix_socket(transport):
    """Another user of this host may be in between at the port, and cannot enter the folder."""
    place, options = f"127.0.0.1:{free_port()}", replace(QUICK, transport=transport)
    first, second, third = (
        Worker(name, rank=rank, world_size=3, rendezvous=place, options=options)
        for rank, name in enumerate("abc")
    )
    await asyncio.gather(first.start(), second.start(), third.start())
    try:
        for worker in (second, third):
            link = worker.agent.link("a")
            await until(lambda link=link: link.ready)
            assert await worker.agent.call("a", abs, (-1,)) == 1
            assert await first.agent.call(worker.name, abs, (-2,)) == 2
            plain = type(link.connection.transport).__name__ != "SealedStream"
            assert link.address.startswith("unix:" if transport == "auto" else "tcp:")
            assert plain is (transport == "auto")
    finally:
        await asyncio.gather(*(worker.close() for worker in (first, second, third)))
