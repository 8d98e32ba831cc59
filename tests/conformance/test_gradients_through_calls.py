"""Gradients through calls equal those of a local run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.conformance.forms import FORMS, LAYOUTS, call, full, leaf, plus, same, total

Forward = Callable[..., Awaitable[Any]]


class Run:
    """Calls functions in one form; what is nested in them should take the same."""

    def __init__(self, form: str) -> None:
        self.form = form

    async def __call__(self, to: str, func: Any, *args: Any) -> Any:
        return await call(self.form, to, func, *args)


def fresh(tensor: ag.Tensor) -> ag.Tensor:
    """Another leaf with the same value."""
    copy = tensor.detach() * 1.0
    return copy.requires_grad_(tensor.requires_grad)


async def local_gradients(forward: Forward, inputs: list[ag.Tensor]) -> list[ag.Tensor | None]:
    """Run everything here, and play it backwards into `.grad`."""
    own = [fresh(tensor) for tensor in inputs]

    roots = await forward(Run("local"), *own)
    roots = roots if isinstance(roots, list) else [roots]
    sum(roots[1:], roots[0]).backward()
    return [tensor.grad for tensor in own]


async def check(form: str, forward: Forward, inputs: list[ag.Tensor]) -> None:
    """Gradients through calls are those of the local run, with an entry for nothing else."""
    expected = await local_gradients(forward, inputs)

    async with ag.context() as ctx:
        roots = await forward(Run(form), *inputs)
        await ctx.backward(*(roots if isinstance(roots, list) else [roots]))
        assert set(ctx.gradients) == {t for t in inputs if t.requires_grad}
        for tensor, gradient in zip(inputs, expected, strict=True):
            assert tensor.grad is None
            assert (gradient is None) == (not tensor.requires_grad)
            if gradient is not None:
                same(ctx.gradients[tensor], gradient)
                assert ctx.gradients[tensor].shape == tensor.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("form", FORMS)
async def test_bwd_simple(workers, form, to, layout):
    async def forward(run, t1, t2):
        return total(await run(to, ag.add, t1, t2))

    async with workers(2):
        await check(form, forward, [leaf(layout, 1), leaf(layout, 2)])


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_bwd_not_in_grad_attr(workers, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 2)
    async with workers(2), ag.context() as ctx:
        loss = total(await ag.rpc_async("worker1", plus, args=(t1, t2)))
        await ctx.backward(loss, retain_graph=True)
        assert t1.grad is None
        assert t2.grad is None
        once = full(ctx.gradients[t1]).copy()
        assert once.any()
        total(t1 * t2).backward()
        before = full(t1.grad).copy()
        await ctx.backward(loss)
        np.testing.assert_array_equal(full(t1.grad), before)
        np.testing.assert_array_equal(full(ctx.gradients[t1]), 2 * once)


# ── references ──────────────────────────────────────────────────────────────────────────────────


def make_leaf(layout: str) -> ag.Tensor:
    return leaf(layout, 7)


def add_to_reference(rref: ag.RRef, t: ag.Tensor) -> ag.Tensor:
    return ag.run_sync(rref.to_here()) + t


async def add_to_reference_async(rref: ag.RRef, t: ag.Tensor) -> ag.Tensor:
    return await rref.to_here() + t


def gradient_of(rref: ag.RRef, context_id: int) -> ag.Tensor:
    return ag.get_gradients(context_id)[rref.local_value()]


async def use_a_leaf_of(owner: str, callee: str, layout: str, func: Any) -> str:
    """A leaf on `owner` plus one of ours, added by `callee`: both get their gradients; whose."""
    t = leaf(layout, 3)
    rref = ag.remote(owner, make_leaf, args=(layout,))
    expected = await local_gradients(_sum_of_two, [leaf(layout, 7), fresh(t)])
    async with ag.context() as ctx:
        added = ag.remote(callee, func, args=(rref, t))
        await ctx.backward(total(await added.to_here()))
        assert set(ctx.gradients) == {t}
        same(ctx.gradients[t], expected[1])
        same(await ag.rpc_async(owner, gradient_of, args=(rref, ctx.id)), expected[0])
    return ag.get_worker_info().name


async def _sum_of_two(run: Any, t1: ag.Tensor, t2: ag.Tensor) -> ag.Tensor:
    return total(t1 + t2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("func", [add_to_reference, add_to_reference_async])
async def test_bwd_rref_owner_callee(workers, func, layout):
    async with workers(2):
        assert await use_a_leaf_of("worker1", "worker1", layout, func) == "driver"


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_bwd_rref_owner_callee_of_everybody_at_once(workers, layout):
    async with workers(3) as cluster:
        arguments = ("worker0", "worker0", layout, add_to_reference)
        others = [cluster[name].call(use_a_leaf_of, *arguments) for name in ("worker1", "worker2")]
        done = await asyncio.gather(*others, use_a_leaf_of(*arguments))
        assert done == ["worker1", "worker2", "driver"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("func", [add_to_reference, add_to_reference_async])
async def test_bwd_rref_third_party(workers, func, layout):
    async with workers(2):
        assert await use_a_leaf_of("worker1", "worker0", layout, func) == "driver"


async def train_once(server: str, rref: ag.RRef, layout: str, func: Any) -> int:
    """One trainer: a context of its own, which it leaves open for the server to look at."""
    ctx = ag.context()
    with ctx.active():
        t = leaf(layout, 3)
        added = await ag.rpc_async(server, func, args=(rref, t))
    await ctx.backward(total(added))
    assert set(ctx.gradients) == {t}
    return ctx.id


async def leave(context_id: int) -> None:
    await ag.get_context(context_id).release()


async def serve_trainers(layout: str, func: Any) -> set[str]:
    """Be the parameter server of everybody else; compare what each of them left here. Who has."""
    me = ag.get_worker_info().name
    trainers = [info.name for info in ag.workers() if info.name != me]
    parameter = leaf(layout, 7)
    rref = ag.RRef(parameter)
    ids = await asyncio.gather(
        *[ag.rpc_async(name, train_once, args=(me, rref, layout, func)) for name in trainers]
    )
    assert len(set(ids)) == len(trainers) == 3
    (expected, _) = await local_gradients(_sum_of_two, [parameter, leaf(layout, 3)])
    found = [ag.get_gradients(number)[parameter] for number in ids]
    for gradient in found:
        same(gradient, expected)
    assert len({id(gradient) for gradient in found}) == 3
    for name, number in zip(trainers, ids, strict=True):
        await ag.rpc_async(name, leave, args=(number,))
    return set(trainers)


EVERYBODY = ("worker0", "worker1", "worker2", "driver")
EVERYBODY_ELSE = [set(EVERYBODY) - {each} for each in EVERYBODY]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_bwd_trainer_ps(workers, layout):
    async with workers(3) as cluster:
        servers = [
            worker.call(serve_trainers, layout, add_to_reference_async) for worker in cluster
        ]
        served = await asyncio.gather(*servers, serve_trainers(layout, add_to_reference_async))
        assert served == EVERYBODY_ELSE


async def test_bwd_trainer_ps_registered_op(workers):
    async with workers(3) as cluster:
        servers = [worker.call(serve_trainers, "dense", add_to_reference) for worker in cluster]
        served = await asyncio.gather(*servers, serve_trainers("dense", add_to_reference))
        assert served == EVERYBODY_ELSE


# ── shapes, outputs, roots ──────────────────────────────────────────────────────────────────────


async def test_bwd_round_trips(workers):
    rng = np.random.default_rng(0)
    inputs = [
        ag.tensor(rng.standard_normal((3, 3)), requires_grad=i in (0, 2, 4)) for i in range(5)
    ]

    async def forward(run, t1, t2, t3, t4, t5):
        added = await run("worker0", ag.add, t1, t2)
        product = await run("worker1", ag.mul, t3, t4)
        first = await run("worker2", stacked, [added, product])
        second = await run("worker0", stacked, [t5, t5])
        third = await run("worker1", ag.bmm, first, second)
        return (await run("worker2", ag.matmul, first, third)).sum()

    async with workers(3):
        for form in FORMS:
            await check(form, forward, inputs)


async def test_bwd_round_trips_sparse(workers):
    inputs = [leaf("sparse", seed, seed in (0, 2, 4)) for seed in range(5)]

    async def forward(run, t1, t2, t3, t4, t5):
        added = await run("worker0", ag.add, t1, t2)
        product = await run("worker1", ag.mul, t3, t4)
        first = await run("worker2", stacked, [added, product])
        second = await run("worker0", stacked, [t5, t5])
        third = await run("worker1", ag.mul, first, second)
        return total(await run("worker2", ag.add, first, third))

    async with workers(3):
        for form in FORMS:
            await check(form, forward, inputs)


def stacked(tensors: list[ag.Tensor]) -> ag.Tensor:
    return ag.stack(tensors)


def chain(*tensors: ag.Tensor) -> ag.Tensor:
    return ag.linalg.multi_dot(list(tensors))


@pytest.mark.parametrize("form", FORMS)
async def test_bwd_dims(workers, form):
    rng = np.random.default_rng(1)
    shapes = [(4, 6), (6, 5), (5, 7), (7, 9)]
    inputs = [ag.tensor(rng.standard_normal(shape), requires_grad=True) for shape in shapes]

    async def forward(run, t1, t2, t3, t4):
        product = await run("worker1", ag.matmul, t1, t2)
        return (await run("worker0", chain, product, t3, t4)).sum()

    async with workers(2):
        await check(form, forward, inputs)


@pytest.mark.parametrize("form", FORMS)
async def test_bwd_unused_input_of_a_stack_has_zeros(workers, form):
    inputs = [leaf(seed=seed) for seed in range(3)]

    async def forward(run, *tensors):
        made = await run("worker1", stacked, list(tensors))
        return ag.matmul(made[0], made[2]).sum()

    async with workers(2):
        await check(form, forward, inputs)
        async with ag.context() as ctx:
            made = await call(form, "worker1", stacked, inputs)
            await ctx.backward(ag.matmul(made[0], made[2]).sum())
            assert not ctx.gradients[inputs[1]].numpy().any()


def split_in_five(t: ag.Tensor) -> list[ag.Tensor]:
    return list(ag.split(t, 5))


@pytest.mark.parametrize("form", FORMS)
async def test_bwd_multi_outputs(workers, form):
    t = ag.tensor(np.random.default_rng(2).standard_normal((100, 2)), requires_grad=True)

    async def forward(run, t):
        parts = await run("worker1", split_in_five, t)
        assert len(parts) == 5
        return (parts[0] + parts[2] * parts[4]).sum()

    async with workers(2):
        await check(form, forward, [t])


@pytest.mark.parametrize("form", FORMS)
async def test_bwd_multi_roots(workers, form):
    async def forward(run, t1, t2):
        return [
            (await run("worker0", ag.add, t1, t2)).sum(),
            (await run("worker1", ag.mul, t1, t2)).sum(),
            ag.cos(await run("worker2", plus, t1, 1.0)).sum(),
            (await run("worker1", ag.div, t1, t2)).sum(),
        ]

    async with workers(3):
        await check(form, forward, [leaf(seed=1), leaf(seed=2)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
async def test_bwd_dtypes(workers, form, layout):
    t1 = (leaf(layout, 1, False).astype(np.float32)).requires_grad_()
    t2 = leaf(layout, 2)
    assert (t1.dtype, t2.dtype) == (np.float32, np.float64)

    async def forward(run, t1, t2):
        return total(await run("worker1", ag.add, t1, t2))

    async with workers(2):
        await check(form, forward, [t1, t2])
        async with ag.context() as ctx:
            await ctx.backward(total(await call(form, "worker1", ag.add, t1, t2)))
            assert ctx.gradients[t1].dtype == np.float32
            assert ctx.gradients[t2].dtype == np.float64


# ── functions ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
async def test_bwd_py_function(workers, form, layout):
    async def forward(run, t1, t2):
        return total(await run("worker1", plus, t1, t2))

    async with workers(2):
        await check(form, forward, [leaf(layout, 1), leaf(layout, 2)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["local", *FORMS])
async def test_bwd_registered_op(workers, form, layout):
    async def forward(run, t1, t2):
        return total(await run("worker1", ag.multiply, await run("worker0", ag.add, t1, t2), t2))

    async with workers(2):
        await check(form, forward, [leaf(layout, 1), leaf(layout, 2)])


def complex_function(t1: ag.Tensor, t2: ag.Tensor, t3: ag.Tensor) -> ag.Tensor:
    a = ag.nn.functional.linear(t1, t2, t3)
    b = ag.nn.functional.linear(t2, t3, t1)
    c = ag.nn.functional.linear(t3, t1, t2)
    return ag.linalg.multi_dot([a, b, c])


@pytest.mark.parametrize("form", FORMS)
async def test_bwd_complex_py(workers, form):
    async def forward(run, *tensors):
        return (await run("worker1", complex_function, *tensors)).sum()

    async with workers(2):
        await check(form, forward, [leaf(seed=seed) for seed in range(3)])


def product_of_all(t1: ag.Tensor, t2: ag.Tensor, t3: ag.Tensor, t4: ag.Tensor) -> ag.Tensor:
    return t1 * t2 * t3 * t4


async def through_a_third(form: str, third: str, *tensors: ag.Tensor) -> ag.Tensor:
    nested = await call(form, third, product_of_all, *tensors)
    t1, t2, t3, t4 = tensors
    return t1 * t2 * t3 * t4 * nested


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
async def test_bwd_nested_py(workers, form, layout):
    inputs = [leaf(layout, 1) for _ in range(4)]

    async def forward(run, *tensors):
        return total(await run("worker1", through_a_third, run.form, "worker0", *tensors))

    async with workers(2):
        await check(form, forward, inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_bwd_no_rpc(workers, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 2)
    async with workers(1), ag.context() as ctx:
        await ctx.backward(total(t1 + t2))
        assert set(ctx.gradients) == {t1, t2}
        assert ctx.known_workers == set()
        assert t1.grad is None
        expected = await local_gradients(_sum_of_two, [t1, t2])
        same(ctx.gradients[t1], expected[0])
        same(ctx.gradients[t2], expected[1])
        if layout == "dense":
            assert ctx.gradients[t1].tolist() == [[1.0] * 3] * 3
