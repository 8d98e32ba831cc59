"""The simulator itself: time, order, wire, nodes, determinism."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

import aiograd as ag
from aiograd.testing import simulate
from aiograd.testing.simulator import Fault, SimulationFailed
from aiograd.testing.simulator.loop import Deadlock, SimLoop, SimulationError
from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.run import minimize, run, shrink
from aiograd.testing.simulator.world import here


@pytest.fixture
def loop():
    loop = SimLoop(random.Random(1))
    yield loop
    loop.close()


# ── the loop ────────────────────────────────────────────────────────────────────────────────────


def test_an_hour_passes_in_no_time(loop):
    begin = time.perf_counter()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == 3600
    assert time.perf_counter() - begin < 1


def test_timeouts_come_exactly_in_time(loop):
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(10)
        return loop.time()

    assert loop.run_until_complete(wait()) == 2.5


def test_a_deadlock_is_noticed_at_once(loop):
    async def wait() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(wait())
    with pytest.raises(Deadlock):
        loop.run_until_complete(task)
    task._log_destroy_pending = False
    task.get_coro().close()


def test_callbacks_that_never_let_time_pass_are_noticed(loop):
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    task = loop.create_task(spin())
    with pytest.raises(SimulationError, match="without time passing"):
        loop.run_until_complete(task)
    task._log_destroy_pending = False
    task.get_coro().close()


@pytest.mark.parametrize(
    "leave",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: asyncio.to_thread(print),
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 1),
        lambda loop: asyncio.open_unix_connection("nowhere"),
        lambda loop: asyncio.create_subprocess_exec("true"),
    ],
)
def test_what_would_leave_the_simulation_is_refused(loop, leave):
    async def go() -> None:
        await leave(loop)

    with pytest.raises(SimulationError):
        loop.run_until_complete(go())


# ── programs ────────────────────────────────────────────────────────────────────────────────────


def double(x):
    return 2 * x


def ask_next(name, x):
    return ag.rpc_sync(name, double, args=(x,))


async def hang():
    await asyncio.sleep(10_000)


def test_a_program_runs_on_simulated_workers():
    async def program() -> list[int]:
        calls = [ag.rpc_async(f"worker{i}", double, args=(i,)) for i in range(3)]
        return list(await asyncio.gather(*calls))

    assert simulate(program, workers=3) == [0, 2, 4]


def test_blocking_calls_in_threads_are_simulated():
    async def program() -> int:
        return await ag.rpc_async("worker0", ask_next, args=("worker1", 21))

    assert simulate(program) == 42


def test_a_crash_whose_connections_stay_open_is_an_error_when_its_end_is_told():
    async def program(world):
        loop = asyncio.get_running_loop()
        waiting = ag.rpc_async("worker0", asyncio.sleep, (30,))
        await asyncio.sleep(1)
        world.crash("worker0", told=0.2)
        later = ag.rpc_async("worker0", here)  # its listener accepts, and nobody answers
        began = loop.time()
        with pytest.raises(ag.errors.WorkerLost, match="its process ended"):
            await waiting
        assert loop.time() - began == pytest.approx(0.2, abs=0.01)
        with pytest.raises(ag.errors.WorkerLost):
            await later
        return loop.time() - began

    assert simulate(program, workers=1) == pytest.approx(0.2, abs=0.01)


def test_a_crash_is_an_error_at_once():
    async def program(world) -> float:
        call = ag.rpc_async("worker0", hang)
        await asyncio.sleep(1)
        world.crash("worker0")
        with pytest.raises(ag.errors.WorkerLost):
            await call
        return asyncio.get_running_loop().time()

    assert simulate(program) < 1.1


def test_a_host_without_power_is_noticed_within_six_seconds():
    async def program(world) -> float:
        await ag.rpc_async("worker0", double, args=(1,))
        call = ag.rpc_async("worker0", hang)
        world.crash("worker0", silent=True)
        with pytest.raises(ag.errors.WorkerLost):
            await call
        return asyncio.get_running_loop().time()

    assert 4 < simulate(program) < 6.5


def test_a_paused_worker_goes_on_where_it_was():
    async def program(world) -> int:
        await ag.rpc_async("worker0", double, args=(1,))
        world.pause("worker0", 20.0)
        return await ag.rpc_async("worker0", double, args=(4,))

    assert simulate(program) == 8


def test_a_restarted_worker_is_somebody_else():
    async def program(world) -> int:
        rref = ag.remote("worker0", double, args=(4,))
        assert await rref == 8
        world.crash("worker0")
        await world.restart("worker0")
        await asyncio.sleep(1)
        with pytest.raises(ag.errors.OwnerLost):
            await rref
        return await ag.rpc_async("worker0", double, args=(5,))

    assert simulate(program) == 10


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_exact_in_any_order_of_messages(seed):
    async def program() -> np.ndarray:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            calls = [ag.rpc_async(f"worker{i}", double, args=(x,)) for i in range(2)]
            a, b = await asyncio.gather(*calls)
            await ctx.backward((a * b).sum())
            return ctx.gradients[x].numpy()

    assert np.array_equal(simulate(program, seed=seed, faults="lazy"), [8.0, 16.0])


def test_faults_may_be_given_by_hand():
    async def program() -> float:
        with pytest.raises(ag.errors.WorkerLost):
            await ag.rpc_async("worker0", hang)
        return asyncio.get_running_loop().time()

    assert 3 <= simulate(program, faults=[Fault(3.0, "crash", "worker0")]) < 3.1


async def take_time(seconds):
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("away", [0.0, 0.5, 1.0, 1.9])
def test_a_connection_that_breaks_for_less_than_two_seconds_is_not_noticed(away):
    async def program() -> float:
        return await ag.rpc_async("worker0", take_time, args=(5.0,))

    faults = [Fault(3.0, "reset", "driver", "worker0")]
    if away:
        faults.append(Fault(3.0, "cut", "driver", "worker0", away))
    assert 5 <= simulate(program, faults=faults) < 5.1


def test_a_connection_that_stays_broken_is_a_lost_worker():
    async def program() -> float:
        with pytest.raises(ag.errors.WorkerLost):
            await ag.rpc_async("worker0", hang)
        return asyncio.get_running_loop().time()

    faults = [Fault(3.0, "cut", "driver", "worker0", 60.0)]
    assert 3 < simulate(program, faults=[Fault(3.0, "reset", "driver", "worker0"), *faults]) < 9
    assert 3 < simulate(program, faults=faults) < 9.5  # at most a heartbeat, then silence


def test_a_program_that_hangs_is_an_error():
    async def program() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationError, match="not ended"):
        simulate(program, limit=100)


def test_an_error_of_the_program_carries_seed_and_events():
    async def program() -> None:
        await ag.rpc_async("worker0", double, args=(1,))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        simulate(program, seed=5)
    assert any("seed 5" in note for note in caught.value.__notes__)
    assert any("worker0 call" in note for note in caught.value.__notes__)


def test_a_forgotten_task_that_fails_is_an_error():
    async def fail() -> None:
        raise ValueError("forgotten")

    async def program() -> None:
        asyncio.create_task(fail())  # noqa: RUF006 - forgotten on purpose
        await asyncio.sleep(1)

    with pytest.raises(SimulationFailed, match="forgotten"):
        simulate(program)


@ag.inline
def promise_and_crash():
    """Give a coroutine, which the worker does not live long enough to begin."""
    node = here()
    node.world.crash(node.name)
    node.world.promised = promised = never_begun()
    return promised


async def never_begun():
    raise AssertionError("its worker has crashed")


def test_what_a_crash_has_kept_from_beginning_is_ended_without_a_word():
    async def program(world):
        with pytest.raises(ag.errors.WorkerLost):
            await ag.rpc_async("worker0", promise_and_crash)
        assert inspect.getcoroutinestate(world.promised) == inspect.CORO_CREATED
        return world.promised

    assert inspect.getcoroutinestate(simulate(program)) == inspect.CORO_CLOSED


@pytest.mark.parametrize("frozen", [True, False])
def test_what_the_garbage_collector_need_not_look_at_stays_so(frozen):
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        run(make_plan(0))
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.freeze()


def test_unknown_faults_are_refused():
    with pytest.raises(ValueError, match="earthquake"):
        simulate(hang, faults="earthquake")


# ── determinism and shrinking ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [3, 5, 11])
def test_the_same_seed_gives_the_same_trace(seed):
    first, second = run(make_plan(seed)), run(make_plan(seed))
    assert first.digest == second.digest
    assert first.outcomes == second.outcomes


def test_another_seed_gives_another_trace():
    assert run(make_plan(3)).digest != run(make_plan(5)).digest


def test_hash_seeds_do_not_matter():
    code = (
        "from aiograd.testing.simulator.plan import make_plan\n"
        "from aiograd.testing.simulator.run import run\n"
        "print([run(make_plan(seed)).digest for seed in (1, 2, 6, 13)])"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "7")
    }
    assert len(traces) == 1


def test_minimize_keeps_what_is_needed():
    tried = []

    def fails(items: list[int]) -> bool:
        tried.append(items)
        return {3, 11} <= set(items)

    assert minimize(range(16), fails) == [3, 11]
    assert len(tried) < 60


def test_minimize_of_a_failure_without_faults_is_nothing():
    assert minimize(range(8), lambda items: True) == []


def test_shrinking_leaves_out_faults_that_do_not_matter():
    from aiograd.testing.simulator.planted_bugs import planted

    with planted("no_lease"):
        seed = next(
            seed
            for seed in range(200)
            if len(make_plan(seed).faults) > 2 and not run(make_plan(seed)).ok
        )
        report = shrink(make_plan(seed))
    assert not report.ok
    assert len(report.plan.faults) < len(make_plan(seed).faults)


def test_a_failing_seed_says_what_to_look_at():
    from aiograd.testing.simulator.planted_bugs import planted

    with planted("late_deadline"):
        report = next(r for s in range(50) if not (r := run(make_plan(s))).ok)
    assert f"seed {report.plan.seed}: FAILED" in str(report)
    assert "I1" in str(report)
    assert 0 < len(report.trace) <= 50
    assert "VIOLATION" in report.trace[-1]
