"""Programs run over workers have the gradients that torch gives for them locally."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import aiograd as ag
from tests.dist.backward.test_engine_programs import WORKERS, Program, play, programs

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "twice": lambda a, b: a * 2.0 + b,
    "product": lambda a, b: a * b,
    "first": lambda a, b: a * 1.0,
    "rows": lambda a, b: torch.stack([a, b])[0],
}


def by_torch(program: Program) -> list[Any]:
    leaves = [
        torch.tensor([float(v), 2.0], dtype=torch.float64, requires_grad=True)
        for v in program.leaves
    ]
    values, products = list(leaves), 0
    for step in program.steps:
        a, b = (values[i % len(values)] for i in (step.first, step.second))
        op = step.op
        if op == "product":
            products += 1
            op = op if products <= 3 else "add"
        result = OPERATIONS[op](a, b)
        if step.kept:
            values.append(result)
    root = sum(values[i % len(values)].sum() for i in program.roots) * 1.0
    root.backward()
    return [root.item(), [None if x.grad is None else x.grad.tolist() for x in leaves]]


async def by_aiograd(program: Program) -> list[Any]:
    leaves = [ag.tensor([float(v), 2.0], requires_grad=True) for v in program.leaves]
    async with asyncio.timeout(30), ag.context() as ctx:
        root = await play(program, leaves, remote=True)
        await ctx.backward(root)
        found = ctx.gradients
        return [float(root), [found[x].tolist() if x in found else None for x in leaves]]


async def _open() -> ag.LocalCluster:
    return await ag.LocalCluster(WORKERS, processes=False)


@pytest.fixture
def run() -> Iterator[Callable[[Any], Any]]:
    with asyncio.Runner() as runner:
        cluster = runner.run(_open())
        try:
            yield runner.run
        finally:
            runner.run(cluster.close())


@settings(
    max_examples=int(os.environ.get("AIOGRAD_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(program=programs)
def test_programs_over_workers_agree_with_torch(
    run: Callable[[Any], Any], program: Program
) -> None:
    assert run(by_aiograd(program)) == by_torch(program)
