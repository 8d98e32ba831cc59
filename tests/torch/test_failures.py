"""Crashes, cuts and cancellations amid torch graphs: an error, never a partial gradient."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch

import aiograd as ag
from aiograd.errors import AiogradError, BackwardFailed
from tests.torch import functions as there
from tests.torch.check_programs import gather
from tests.torch.functions import LEAVES, leaf
from tests.torch.programs import RUNNING, Program, assert_same, locally, remotely

NAMES = ["driver", "worker0", "worker1", "worker2"]
RUNS, PAUSE = 8, 2.0  # runs of one simulated program, and the simulated seconds between them


@pytest.fixture(autouse=True)
def leaves():
    LEAVES.update(u=leaf(4, seed=1))
    yield
    LEAVES.clear()


# ── simulated ───────────────────────────────────────────────────────────────────────────────────


def simulated(seed: int, faults: Any) -> tuple[Program, list[Any]]:
    """Run a random program again and again on simulated workers.

    Gives the gradients of each run, by worker, or its error.
    """
    program = RUNNING[seed] = Program(seed, NAMES)
    found: list[Any] = []

    async def once() -> Any:
        async with ag.context() as ctx:
            roots = await program.run(remotely)
            if not roots:
                return {}
            try:
                await ctx.backward(*roots)
            except AiogradError:
                with pytest.raises(AiogradError):
                    _ = ctx.gradients
                raise
            return await gather(program)

    async def run() -> None:
        for _ in range(RUNS):
            try:
                found.append(await once())
            except AiogradError as error:
                found.append(error)
            await asyncio.sleep(PAUSE)  # simulated time, in which faults come

    try:
        ag.testing.simulate(run, seed=seed, workers=3, faults=faults)
    finally:
        RUNNING.clear()
    return program, found


def compare(program: Program, found: Any) -> None:
    roots = asyncio.run(program.run(locally))
    if not roots:
        assert not found
        return
    leaves = [leaf for name in NAMES for leaf in program.leaves[name]]
    expected = torch.autograd.grad(sum(roots), leaves, allow_unused=True)
    mine = [gradient for name in NAMES for gradient in found[name]]
    for each, theirs in zip(mine, expected, strict=True):
        assert_same(each, theirs, f"seed {program.seed}")


@pytest.mark.parametrize("faults", [None, "wire", "cuts", "deaths", "everything"])
def test_simulated_programs_give_plain_torchs_gradients_or_an_error(faults):
    ended_well = failed = 0
    for seed in range(20):
        program, found = simulated(seed, faults)
        assert len(found) == RUNS
        for each in found:
            if isinstance(each, AiogradError):
                failed += 1
            else:
                ended_well += 1
                compare(program, each)
    assert ended_well
    # Deaths are seen; nothing fails where nothing is lost.
    if faults != "wire":
        assert bool(failed) == (faults in ("deaths", "everything"))


def test_a_simulated_run_repeats_itself():
    (_, one), (_, two) = simulated(3, "everything"), simulated(3, "everything")
    assert [type(each) for each in one] == [type(each) for each in two]
    for mine, theirs in zip(one, two, strict=True):
        if isinstance(mine, dict):
            for name, gradients in mine.items():
                for each, other in zip(gradients, theirs[name], strict=True):
                    assert_same(each, other, name)


class Crashing(Program):
    """Crashes a worker at a hook or Function of its pass."""

    world: Any = None
    victim, left = "", 0

    def note(self, what: str, value: Any = None) -> Any:
        self.left -= 1
        if self.world is not None and not self.left:
            self.world.crash(self.victim)
        return super().note(what, value)


def test_a_worker_that_crashes_at_any_hook_fails_the_pass_or_the_gradients_are_right():
    outcomes: Counter[str] = Counter()
    for seed in range(40):
        program = Crashing(seed, NAMES)

        async def run(world: Any, program: Crashing = program) -> Any:
            async with ag.context() as ctx:
                roots = await program.run(remotely)
                if not roots:
                    return {}
                program.world, program.left = world, 1 + program.seed % 4
                program.victim = NAMES[1 + program.seed % 3]
                try:
                    await ctx.backward(*roots)
                except BackwardFailed as error:
                    with pytest.raises(BackwardFailed):
                        _ = ctx.gradients
                    return error
                return dict(ctx.gradients)

        RUNNING[seed] = program
        try:
            found = ag.testing.simulate(run, seed=seed, workers=3)
        finally:
            RUNNING.clear()
            program.world = None
        outcomes[type(found).__name__] += 1
        if isinstance(found, dict) and found:
            roots = asyncio.run(program.run(locally))
            mine = program.leaves["driver"]
            expected = torch.autograd.grad(sum(roots), mine, allow_unused=True)
            for leaf_, theirs in zip(mine, expected, strict=True):
                assert_same(found.get(leaf_), theirs, f"seed {seed}")
    assert outcomes["BackwardFailed"] > 5, outcomes


WORLD: list[Any] = []


def crashes(x: torch.Tensor) -> torch.Tensor:
    made = x * LEAVES["u"]

    def crash(gradient: torch.Tensor) -> None:
        WORLD[0].crash("worker1")

    made.register_hook(crash)
    return made.sin()


def test_a_participant_that_crashes_in_a_hook_fails_the_pass_and_no_gradient_is_shown():
    x = leaf(4)

    async def run(world: Any) -> str:
        WORLD[:] = [world]
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", crashes, args=(x,))
            z = await ag.rpc_async("worker0", there.times, args=(y,))
            with pytest.raises(BackwardFailed) as caught:
                await ctx.backward((z * x).sum())
            with pytest.raises(BackwardFailed):
                _ = ctx.gradients
            with pytest.raises(AiogradError):
                await ag.rpc_async("worker0", there.gradient_of, args=("u",))
            return caught.value.worker

    assert ag.testing.simulate(run, seed=1) == "worker1"


# ── real ────────────────────────────────────────────────────────────────────────────────────────


def dies(x: torch.Tensor) -> torch.Tensor:
    made = x * 3
    made.register_hook(lambda gradient: os._exit(7))
    return made.sin()


async def test_a_worker_process_that_dies_in_a_torch_hook_fails_the_pass():
    x = leaf(4)
    async with ag.LocalCluster(2):
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", dies, args=(x,))
            z = await ag.rpc_async("worker0", torch.sin, args=(y,))
            with pytest.raises(BackwardFailed) as caught:
                await ctx.backward((z * x).sum(), timeout=60)
            assert caught.value.worker == "worker1"
            with pytest.raises(BackwardFailed):
                _ = ctx.gradients
        async with ag.context() as ctx:  # the others go on
            await ctx.backward((await ag.rpc_async("worker0", torch.sin, args=(x,))).sum())
            torch.testing.assert_close(ctx.gradients[x], x.detach().cos())
        assert x.grad is None


STARTED, GO_ON = threading.Event(), threading.Event()


def waits(x: torch.Tensor) -> torch.Tensor:
    return Waits.apply(x * LEAVES["u"])


class Waits(torch.autograd.Function):
    """Code of the user's, so that the pass leaves the loop; it does not end before it may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        STARTED.set()
        GO_ON.wait(60)
        return gradient * 2


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_pass_that_is_ended_while_torchs_engine_runs_shows_nothing_of_it(how):
    x = leaf(4)
    STARTED.clear()
    GO_ON.clear()
    async with ag.LocalCluster(2, processes=False):
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", waits, args=(x,))
            root = (y * x).sum()
            seconds = 1.0 if how == "timed out" else None
            task = asyncio.ensure_future(ctx.backward(root, timeout=seconds))
            await asyncio.to_thread(STARTED.wait, 60)
            if how == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(BackwardFailed, match="did not end within 1 s"):
                    await task
            GO_ON.set()  # the engine's thread ends now: its gradients are void
            with pytest.raises(BackwardFailed):
                _ = ctx.gradients
        async with ag.context() as ctx:
            await ctx.backward((await ag.rpc_async("worker1", there.times, args=(x,))).sum())
            torch.testing.assert_close(ctx.gradients[x], LEAVES["u"].detach())
