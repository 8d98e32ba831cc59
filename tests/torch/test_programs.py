"""Random programs over two to five workers give plain torch's gradients, hooks and node runs."""

from __future__ import annotations

import os

import pytest
import torch

import aiograd as ag
from tests.torch.programs import RUNNING, Program, assert_same, gradients_here, locally, remotely

# Per kind of program and event loop; AIOGRAD_TORCH_PROGRAMS=5000 for a long run.
COUNT = int(os.environ.get("AIOGRAD_TORCH_PROGRAMS", "75"))
BATCH = 25
BATCHES = [range(start, min(start + BATCH, COUNT)) for start in range(0, COUNT, BATCH)]


async def gather(program: Program) -> dict[str, list[torch.Tensor | None]]:
    return {
        name: await ag.rpc_async(name, gradients_here, args=(program.seed, name))
        for name in program.names
    }


async def first_order(seed: int, names: list[str]) -> None:
    program = RUNNING[seed] = Program(seed, names)
    passes = 1 + seed % 3 // 2
    async with ag.context() as ctx:
        roots = await program.run(remotely)
        if not roots:
            return
        for left in reversed(range(passes)):
            await ctx.backward(*roots, retain_graph=left > 0)
        found = await gather(program)
    notes, retained = dict(program.notes), [t.grad for t in program.retained]
    roots = await program.run(locally)
    leaves = [leaf for name in names for leaf in program.leaves[name]]
    total: list[torch.Tensor | None] = [None] * len(leaves)
    for left in reversed(range(passes)):
        expected = torch.autograd.grad(sum(roots), leaves, allow_unused=True, retain_graph=left > 0)
        total = [
            b if a is None else a + b if b is not None else a
            for a, b in zip(total, expected, strict=True)
        ]
    mine = [gradient for name in names for gradient in found[name]]
    for number, (each, theirs) in enumerate(zip(mine, total, strict=True)):
        assert_same(each, theirs, f"seed {seed}, leaf {number}")
    assert notes == dict(program.notes), f"seed {seed}"
    for number, (each, theirs) in enumerate(zip(retained, program.retained, strict=True)):
        assert_same(each, theirs.grad, f"seed {seed}, retained {number}")
        assert (each is None) == (theirs.grad is None), f"seed {seed}, retained {number}"
    assert all(leaf.grad is None for leaf in leaves)


async def second_order(seed: int, names: list[str]) -> None:
    program = RUNNING[seed] = Program(seed, names, hooks=seed % 2 == 0)
    async with ag.context() as ctx:
        roots = await program.run(remotely)
        if not roots:
            return
        inputs = program.leaves[names[0]]
        gradients = await ag.grad(roots, inputs, create_graph=True, allow_unused=True)
        second = [(g * g).sum() for g in gradients if g is not None and g.requires_grad]
        if not second:
            return
        await ctx.backward(*second)
        found = await gather(program)
    roots = await program.run(locally)
    first = torch.autograd.grad(sum(roots), inputs, create_graph=True, allow_unused=True)
    for number, (each, theirs) in enumerate(zip(gradients, first, strict=True)):
        assert_same(each, theirs, f"seed {seed}, derivative {number}")
    leaves = [leaf for name in names for leaf in program.leaves[name]]
    total = sum((g * g).sum() for g in first if g is not None and g.requires_grad)
    expected = torch.autograd.grad(total, leaves, allow_unused=True)
    mine = [gradient for name in names for gradient in found[name]]
    for number, (each, theirs) in enumerate(zip(mine, expected, strict=True)):
        assert_same(each, theirs, f"seed {seed}, leaf {number}")


@pytest.mark.deadline(120 + COUNT)
@pytest.mark.parametrize("order", [first_order, second_order], ids=["first", "second"])
@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds.start}-")
async def test_random_programs_equal_plain_torch(seeds, order):
    async with ag.LocalCluster(4, processes=False):
        workers = ["driver", *[f"worker{i}" for i in range(4)]]
        try:
            for seed in seeds:
                await order(seed, workers[: 2 + seed % 4])
        finally:
            RUNNING.clear()
    assert not RUNNING
