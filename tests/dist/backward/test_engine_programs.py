"""Arbitrary programs over several workers have the gradients of the same program run locally."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiograd as ag

EXAMPLES = int(os.environ.get("AIOGRAD_EXAMPLES", "150"))  # per event loop
WORKERS = 4

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "twice": lambda a, b: a * 2.0 + b,
    "product": lambda a, b: a * b,
    "first": lambda a, b: a * 1.0,  # one argument is not used
    "rows": lambda a, b: ag.stack([a, b])[0],  # one element of a used result is not
}


@dataclass(frozen=True)
class Step:
    """value[first] op value[second], made by a way through workers; its result may go unused."""

    op: str
    first: int
    second: int
    way: tuple[int, ...]  # empty: here; else the workers the call is passed along
    kept: bool
    by_reference: bool = False  # the result stays on the last worker and is fetched


steps = st.builds(
    Step,
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 99),
    st.integers(0, 99),
    st.lists(st.integers(0, WORKERS - 1), max_size=3).map(tuple),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
)


@dataclass(frozen=True)
class Program:
    leaves: tuple[int, ...]
    steps: tuple[Step, ...]
    roots: tuple[int, ...]


programs = st.builds(
    Program,
    st.lists(st.integers(-3, 3), min_size=1, max_size=3).map(tuple),
    st.lists(steps, min_size=1, max_size=8).map(tuple),
    st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
)


async def along(op: str, a: Any, b: Any, way: tuple[int, ...]) -> Any:
    """Pass the operands along the way and compute at its end."""
    if not way:
        return OPERATIONS[op](a, b)
    return await ag.rpc_async(f"worker{way[0]}", along, args=(op, a, b, way[1:]))


async def play(program: Program, leaves: list[ag.Tensor], remote: bool) -> ag.Tensor:
    """Run the program, on workers or all here, and return the sum of its roots."""
    values: list[Any] = list(leaves)
    products = 0
    for step in program.steps:
        a, b = (values[i % len(values)] for i in (step.first, step.second))
        op = step.op
        if op == "product":
            products += 1
            op = op if products <= 3 else "add"  # or the numbers would not stay exact
        if not remote or not step.way:
            result = OPERATIONS[op](a, b)
        elif step.by_reference:
            first, *rest = step.way
            rref = ag.remote(f"worker{first}", along, args=(op, a, b, tuple(rest)))
            result = await rref.to_here()
        else:
            result = await along(op, a, b, step.way)
        if step.kept:
            values.append(result)
    return sum(values[i % len(values)].sum() for i in program.roots) * 1.0


async def gradients(program: Program, remote: bool) -> list[Any]:
    leaves = [ag.tensor([float(v), 2.0], requires_grad=True) for v in program.leaves]
    async with ag.context() as ctx:
        root = await play(program, leaves, remote)
        await ctx.backward(root, retain_graph=True)
        first = [ctx.gradients[x].tolist() if x in ctx.gradients else None for x in leaves]
        found = await ag.grad(root, leaves, create_graph=True, allow_unused=True)
        seconds = [g.sum() for g in found if g is not None and g.requires_grad]
        second: list[Any] = []
        if seconds:
            curvature = sum(s * s for s in seconds) * 1.0
            second = [
                None if g is None else g.tolist()
                for g in await ag.grad(curvature, leaves, allow_unused=True)
            ]
        return [float(root), first, [None if g is None else g.tolist() for g in found], second]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Runs coroutines on one loop with an open cluster, for all examples of a test."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        cluster = runner.run(_open())
        try:
            yield runner.run
        finally:
            runner.run(cluster.close())


async def _open() -> ag.LocalCluster:
    return await ag.LocalCluster(WORKERS, processes=False)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(program=programs)
def test_gradients_of_any_program_equal_a_local_run(
    run: Callable[[Any], Any], program: Program
) -> None:
    assert run(_limited(program)) is None


async def _limited(program: Program) -> None:
    async with asyncio.timeout(30):
        assert await gradients(program, remote=True) == await gradients(program, remote=False)
        assert ag.debug_info()["backward_passes"] == 0
