"""Compare random programs with plain torch: a batch at a time, or many from the command line.

    python -m tests.torch.check_programs --count 20000 --start 0

Program n has the seed n // 2 and is of first order if n is even, of second order if it is odd. The
event loop changes from batch to batch. A program that differs is named with its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import torch
import uvloop

import aiograd as ag
from tests.torch.programs import RUNNING, Program, assert_same, gradients_here, locally, remotely

Check = Callable[[int, list[str], Counter[str]], Coroutine[Any, Any, None]]
BATCH = 100  # programs of one cluster, from the command line


async def gather(program: Program) -> dict[str, list[torch.Tensor | None]]:
    return {
        name: await ag.rpc_async(name, gradients_here, args=(program.seed, name))
        for name in program.names
    }


async def first_order(seed: int, names: list[str], tally: Counter[str]) -> None:
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
    tally["compared"] += 1
    tally["passes"] += passes
    tally["hooks and functions"] += sum(notes.values())


async def second_order(seed: int, names: list[str], tally: Counter[str]) -> None:
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
    notes = dict(program.notes)
    roots = await program.run(locally)
    leaves = [leaf for name in names for leaf in program.leaves[name]]
    # By all leaves: other workers do not know which ones are asked for, so every node runs.
    first = torch.autograd.grad(sum(roots), leaves, create_graph=True, allow_unused=True)
    first = first[: len(inputs)]  # those of the first worker
    for number, (each, theirs) in enumerate(zip(gradients, first, strict=True)):
        assert_same(each, theirs, f"seed {seed}, derivative {number}")
    total = sum((g * g).sum() for g in first if g is not None and g.requires_grad)
    expected = torch.autograd.grad(total, leaves, allow_unused=True)
    mine = [gradient for name in names for gradient in found[name]]
    for number, (each, theirs) in enumerate(zip(mine, expected, strict=True)):
        assert_same(each, theirs, f"seed {seed}, leaf {number}")
    assert notes == dict(program.notes), f"seed {seed}"
    tally["compared"] += 1
    tally["passes"] += 2
    tally["hooks and functions"] += sum(notes.values())


ORDERS: dict[str, Check] = {"first": first_order, "second": second_order}


async def check(order: str, seeds: Iterable[int]) -> Counter[str]:
    """Run programs on a cluster of their own; count what was compared, raise if one differs."""
    tally: Counter[str] = Counter()
    async with ag.LocalCluster(4, processes=False):
        workers = ["driver", *[f"worker{i}" for i in range(4)]]
        try:
            for seed in seeds:
                await ORDERS[order](seed, workers[: 2 + seed % 4], tally)
                tally["programs"] += 1
                RUNNING.clear()
        finally:
            RUNNING.clear()
    return tally


async def _check_each(numbers: range, tally: Counter[str]) -> list[str]:
    """Run a batch of numbered programs; return those that differ."""
    failed = []
    for order, parity in (("first", 0), ("second", 1)):
        seeds = [number // 2 for number in numbers if number % 2 == parity]
        try:
            tally.update(await check(order, seeds))
        except Exception:
            # Again one by one, to name all that differ.
            for seed in seeds:
                try:
                    tally.update(await check(order, [seed]))
                except Exception as error:
                    tally["programs"] += 1
                    traceback.print_exc()
                    failed.append(f"{order} order, seed {seed}: {error!r:.200}")
    return failed


def main() -> None:
    """Run the programs that the command line asks for, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--start", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    end, failed, tally = given.start + given.count, [], Counter[str]()
    began = time.monotonic()
    for batch, start in enumerate(range(given.start, end, BATCH)):
        loop = uvloop.new_event_loop if batch % 2 else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=loop) as runner:
            failed += runner.run(_check_each(range(start, min(start + BATCH, end)), tally))
        seconds = time.monotonic() - began
        counts = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))
        print(f"up to {start + BATCH}: {counts}; {len(failed)} differ; {seconds:.0f} s", flush=True)
    for each in failed:
        print(each)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
