"""`simulate`: programs of the user's own, their faults, and their errors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from aiograd.testing import simulate
from aiograd.testing.simulator import Fault, SimulationFailed
from aiograd.testing.simulator.loop import SimulationError


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


def test_unknown_faults_are_refused():
    with pytest.raises(ValueError, match="earthquake"):
        simulate(hang, faults="earthquake")
