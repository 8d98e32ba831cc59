"""Optimisers of torch over parameters of other workers: each trainer has its own gradient."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

import aiograd as ag
from aiograd.errors import BackwardFailed, StaleGradients
from aiograd.optim.schedules import StepLR
from tests.torch.functions import DTYPE, leaf


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(4, processes=False) as started:
        yield started


def parameter(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(leaf(*shape, seed=seed).detach())


def half_square(param: ag.RRef) -> torch.Tensor:
    """Its gradient is the parameter itself."""
    value = param.local_value()
    return (value * value).sum() / 2


async def value_of(param: ag.RRef) -> torch.Tensor:
    return (await param).detach()


async def pull(ctx: ag.Context, *params: ag.RRef) -> None:
    losses = [await ag.rpc_async(p.owner(), half_square, args=(p,)) for p in params]
    await ctx.backward(sum(losses))


# ── steps ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_steps_equal_those_of_torch_in_one_process(cluster, cls, settings):
    params = [ag.remote(f"worker{i}", parameter, args=(3,), kwargs={"seed": i}) for i in range(2)]
    here = [parameter(3, seed=i) for i in range(2)]
    theirs = cls(here, **settings)
    opt = await ag.torch.DistributedOptimizer(cls, params, **settings)
    for _ in range(4):
        async with ag.context() as ctx:
            await pull(ctx, *params)
            await opt.step(ctx)
        theirs.zero_grad()
        sum((p * p).sum() / 2 for p in here).backward()
        theirs.step()
    for mine, other in zip(params, here, strict=True):
        torch.testing.assert_close(await value_of(mine), other.detach())
        assert (await mine).grad is None


async def test_a_parameter_without_a_gradient_stays_as_it_is(cluster):
    params = [ag.remote("worker1", parameter, args=(3,), kwargs={"seed": i}) for i in range(2)]
    opt = await ag.torch.DistributedOptimizer(torch.optim.Adam, params, lr=0.1)
    before = [await value_of(p) for p in params]
    async with ag.context() as ctx:
        await pull(ctx, params[0])
        await opt.step(ctx)
    after = [await value_of(p) for p in params]
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


async def test_gradients_are_clipped_over_all_owners(cluster):
    params = [ag.remote(f"worker{i}", parameter, args=(3,), kwargs={"seed": i}) for i in range(2)]
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, params, lr=1.0)
    here = [parameter(3, seed=i) for i in range(2)]
    async with ag.context() as ctx:
        await pull(ctx, *params)
        norm = await opt.clip_grad_norm(ctx, 0.5)
        await opt.step(ctx)
    for p in here:
        p.grad = p.detach().clone()
    expected = torch.nn.utils.clip_grad_norm_(here, 0.5)
    assert norm == pytest.approx(float(expected))
    for mine, other in zip(params, here, strict=True):
        torch.testing.assert_close(await value_of(mine), other.detach() - other.grad)


async def test_a_state_is_saved_and_restored_and_schedulers_set_the_learning_rate(cluster):
    params = [ag.remote(f"worker{i}", parameter, args=(3,)) for i in range(2)]
    opt = await ag.torch.DistributedOptimizer(torch.optim.Adam, params, lr=0.1)
    scheduler = StepLR(opt, 1, gamma=0.5)
    async with ag.context() as ctx:
        await pull(ctx, *params)
        await opt.step(ctx)
    scheduler.step()
    saved = await opt.state_dict()
    assert sorted(saved) == ["worker0", "worker1"]
    assert saved["worker0"]["param_groups"][0]["lr"] == pytest.approx(0.05)
    average = saved["worker0"]["state"][0]["exp_avg"].clone()
    other = await ag.torch.DistributedOptimizer(torch.optim.Adam, params, lr=0.1)
    await other.load_state_dict(saved)
    async with ag.context() as ctx:
        await pull(ctx, *params)
        await opt.step(ctx)
    again = await other.state_dict()
    # A step of the first optimiser changes neither its saved state nor the second one's.
    assert torch.equal(again["worker0"]["state"][0]["exp_avg"], average)
    assert again["worker0"]["param_groups"][0]["lr"] == pytest.approx(0.05)


async def test_an_error_of_the_constructor_appears_where_the_optimiser_is_awaited(cluster):
    params = [ag.remote("worker1", parameter, args=(3,))]
    with pytest.raises(ValueError, match="learning rate"):
        await ag.torch.DistributedOptimizer(torch.optim.SGD, params, lr=-1.0)
    with pytest.raises(ValueError, match="twice"):
        await ag.torch.DistributedOptimizer(torch.optim.SGD, params * 2, lr=1.0)


async def test_the_optimiser_of_the_other_library_is_named(cluster):
    ours = [ag.remote("worker1", ag.ones, args=(3,), kwargs={"requires_grad": True})]
    theirs = [ag.remote("worker1", parameter, args=(3,))]
    with pytest.raises(TypeError, match=r"ag\.torch\.DistributedOptimizer"):
        await ag.optim.DistributedOptimizer(torch.optim.SGD, theirs, lr=0.1)
    with pytest.raises(TypeError, match="takes torch tensors, not Tensor"):
        await ag.torch.DistributedOptimizer(torch.optim.SGD, ours, lr=0.1)
    with pytest.raises(TypeError, match=r"ag\.optim\.DistributedOptimizer"):
        await ag.torch.DistributedOptimizer(lambda params: ag.optim.SGD([ag.ones(1)]), theirs)


async def test_a_bound_on_staleness_refuses_an_overtaken_trainer(cluster):
    params = [ag.remote("worker1", parameter, args=(3,))]
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, params, lr=0.1, staleness=0)
    mine, other = ag.context(), ag.context()
    for ctx in (mine, other):
        with ctx.active():
            await pull(ctx, *params)
    with other.active():
        await opt.step(other)
    with mine.active(), pytest.raises(StaleGradients):
        await opt.step(mine)
    await mine.release()
    await other.release()


# ── several trainers ────────────────────────────────────────────────────────────────────────────

ROUNDS = 12
# With these inputs a result is the very parameter that the operation saw, and the gradient of the
# input is made from what the operation saved of it.
INPUTS = (
    torch.eye(6, dtype=DTYPE),
    torch.ones(6, dtype=DTYPE),
    torch.tensor([[[0.0, 0.0, 1.0, 0.0, 0.0]]], dtype=DTYPE),
)


def results_of(inputs: Any, parameters: Any) -> tuple[torch.Tensor, ...]:
    matrix, scale, kernel = parameters
    return (
        torch.nn.functional.linear(inputs[0], matrix),  # saves a view of the parameter
        inputs[1] * scale,  # saves the parameter
        torch.nn.functional.conv1d(inputs[2], kernel),
    )


class Server:
    """The shared parameters."""

    def __init__(self) -> None:
        shapes = ((6, 6), (6,), (1, 1, 3))
        self.parameters = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]

    def rrefs(self) -> list[ag.RRef]:
        return [ag.RRef(each) for each in self.parameters]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return results_of(inputs, self.parameters)

    async def forward_async(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        await asyncio.sleep(0)  # others run, and step
        first, second, _ = results_of(inputs, self.parameters)
        await asyncio.sleep(0)
        return first, second, results_of(inputs, self.parameters)[2]

    def gradients(self, ctx_id: int) -> list[torch.Tensor]:
        found = ag.get_gradients(ctx_id)
        return [found[each] for each in self.parameters]


async def train(server: ag.RRef, params: list[ag.RRef], number: int, method: str) -> list[Any]:
    """Train, and return for each round the results, what they were weighted with, the gradients."""
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, params, lr=0.01, momentum=0.5)
    generator, order = torch.Generator().manual_seed(number), random.Random(number)
    rounds = []
    for _ in range(ROUNDS):
        inputs = [x.clone().requires_grad_() for x in INPUTS]
        async with ag.context() as ctx:
            results = await getattr(server.rpc_async(), method)(*inputs)
            weights = [torch.randn(y.shape, generator=generator, dtype=DTYPE) for y in results]
            for _ in range(order.randrange(3)):
                await asyncio.sleep(0)
            await ctx.backward(sum((y * c).sum() for y, c in zip(results, weights, strict=True)))
            gradients = [ctx.gradients[x] for x in inputs]
            gradients += await server.rpc_async().gradients(ctx.id)
            await opt.step(ctx)
        rounds.append(([y.detach() for y in results], weights, gradients))
    return rounds


@pytest.mark.parametrize("method", ["forward", "forward_async"])
async def test_three_trainers_get_the_gradients_of_the_values_they_saw(cluster, method: str):
    server = ag.remote("worker0", Server)
    params = await server.rpc_async().rrefs()
    trained = await asyncio.gather(
        *[ag.rpc_async(f"worker{n}", train, args=(server, params, n, method)) for n in (1, 2, 3)]
    )
    final = [await value_of(p) for p in params]
    here = Server().parameters
    for rounds in trained:
        # Without weight decay a step adds what only depends on the gradients of its optimiser, so
        # steps of several of them, one after another, come to the same end in any order.
        serial = torch.optim.SGD(here, lr=0.01, momentum=0.5)
        for results, weights, gradients in rounds:
            seen = [results[0].T, results[1], results[2].flip(-1)]
            again = [x.detach().requires_grad_() for x in (*INPUTS, *seen)]
            replayed = results_of(again[:3], again[3:])
            torch.testing.assert_close(list(replayed), results, rtol=0, atol=0)
            expected = torch.autograd.grad(replayed, again, weights)
            torch.testing.assert_close(gradients, list(expected))
            for mine, gradient in zip(here, gradients[3:], strict=True):
                mine.grad = gradient
            serial.step()
    torch.testing.assert_close(final, [each.detach() for each in here])


async def test_two_trainers_with_graphs_across_each_others_steps(cluster):
    """torch's own parameter server fails here: 'modified by an inplace operation'."""
    param = ag.remote("worker1", parameter, args=(3,))
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, [param], lr=0.5)
    start = await value_of(param)
    mine, other = ag.context(), ag.context()
    with mine.active():
        first = await ag.rpc_async("worker1", half_square, args=(param,))
    with other.active():
        second = await ag.rpc_async("worker1", half_square, args=(param,))
    await mine.backward(first)
    await opt.step(mine)
    torch.testing.assert_close(await value_of(param), start * 0.5)
    await other.backward(second)  # of the values it saw: the start
    await opt.step(other)
    torch.testing.assert_close(await value_of(param), start * 0.0)
    await mine.release()
    await other.release()


async def test_the_owners_own_graphs_keep_what_they_saw(cluster):
    w, x = parameter(3), leaf(3, seed=2)
    start = w.detach().clone()
    params = [ag.RRef(w)]
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, params, lr=0.5)
    mine, other = ag.context(), ag.context()
    loss = (x * w).sum()
    await other.backward((w * w).sum() / 2)
    await opt.step(other)
    await mine.backward(loss)
    torch.testing.assert_close(mine.gradients[x], start)
    torch.testing.assert_close(w.detach(), start / 2)
    await mine.release()
    await other.release()


async def test_a_failed_pass_names_the_worker_of_a_written_parameter(cluster):
    param = ag.remote("worker1", parameter, args=(3,))
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, [param], lr=0.5)
    del opt
    async with ag.context() as ctx:
        loss = await ag.rpc_async("worker1", half_square, args=(param,))
        await ag.rpc_async("worker1", spoil, args=(param,))
        with pytest.raises(BackwardFailed, match="worker1"):
            await ctx.backward(loss)


def spoil(param: ag.RRef) -> None:
    with torch.no_grad():
        param.local_value().add_(1)


def scaled(x: torch.Tensor, param: ag.RRef) -> torch.Tensor:
    value = param.local_value()
    return (x * value).sin() * value


def recomputing(x: torch.Tensor, param: ag.RRef) -> torch.Tensor:
    return ag.checkpoint(scaled)(x, param)


async def test_a_checkpoint_runs_again_with_the_values_of_its_first_run(cluster):
    param, x = ag.remote("worker1", parameter, args=(3,)), leaf(3, seed=5)
    opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, [param], lr=0.5)
    start = (await value_of(param)).requires_grad_()
    expected = torch.autograd.grad(((x * start).sin() * start).sum(), [x, start])
    mine, other = ag.context(), ag.context()
    with mine.active():
        result = await ag.rpc_async("worker1", recomputing, args=(x, param))
    with other.active():
        await pull(other, param)
        await opt.step(other)
    assert not torch.equal(await value_of(param), start)
    await mine.backward(result.sum())
    torch.testing.assert_close(mine.gradients[x], expected[0])
    with mine.active():
        found = await ag.rpc_async("worker1", gradient_at_owner, args=(param, mine.id))
    torch.testing.assert_close(found, expected[1])
    await mine.release()
    await other.release()


def gradient_at_owner(param: ag.RRef, context_id: int) -> torch.Tensor:
    return ag.get_gradients(context_id)[param.local_value()]
