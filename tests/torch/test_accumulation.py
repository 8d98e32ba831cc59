"""Hooks on the AccumulateGrad nodes of leaves run once, last, on the sum; DDP works at owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import aiograd as ag
from aiograd.errors import BackwardFailed, GradError
from tests.torch import functions as there
from tests.torch.functions import DTYPE, LEAVES, leaf


@pytest.fixture(autouse=True)
def leaves():
    LEAVES.update(u=leaf(4, seed=1))
    yield
    LEAVES.clear()


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as started:
        yield started


def node_of(variable: torch.Tensor) -> Any:
    return variable.view_as(variable).grad_fn.next_functions[0][0]


def call(function: Any, *args: Any, to: str = "worker1") -> Any:
    return ag.rpc_async(to, function, args=args)


async def test_hooks_of_a_leafs_node_run_once_on_the_sum_here_and_elsewhere(cluster):
    x, seen = leaf(4), []
    nodes = {"x": node_of(x), "u": node_of(LEAVES["u"])}
    for name, node in nodes.items():
        node.register_prehook(lambda grads, name=name: seen.append((f"pre {name}", *grads)))
        node.register_hook(lambda _, grads, name=name: seen.append((f"post {name}", *grads)))
    async with ag.context() as ctx:
        y = await call(there.sine, x)
        await ctx.backward((y * (await call(there.times, x)) * x).sum())
        made = (x * LEAVES["u"]).sin() * (x * LEAVES["u"]) * x
        expected = dict(zip("xu", torch.autograd.grad(made.sum(), [x, LEAVES["u"]]), strict=True))
        torch.testing.assert_close(ctx.gradients[x], expected["x"])
        torch.testing.assert_close(await call(there.gradient_of, "u"), expected["u"])
    assert sorted(what for what, _ in seen) == ["post u", "post x", "pre u", "pre x"]
    for what, gradient in seen:
        torch.testing.assert_close(gradient, expected[what[-1]])
    assert x.grad is None
    assert LEAVES["u"].grad is None


async def test_hooks_of_the_tensor_run_once_and_before_those_of_its_node(cluster):
    x, seen = leaf(4), []
    node = node_of(x)
    x.register_hook(lambda g: seen.append("tensor") or g * 2)
    node.register_prehook(lambda grads: seen.append("pre") or (grads[0] * 3,))
    node.register_hook(lambda *_: seen.append("post"))
    async with ag.context() as ctx:
        await ctx.backward((x * 2 + (await call(there.times, x))).sum())
        torch.testing.assert_close(ctx.gradients[x], (2 + LEAVES["u"].detach()) * 6)
    assert seen == ["tensor", "pre", "post"]


async def test_a_leaf_that_is_sent_itself_runs_the_hooks_of_its_node(cluster):
    x, seen = leaf(4), []
    node = node_of(x)
    node.register_hook(lambda *_: seen.append(1))
    async with ag.context() as ctx:
        await ctx.backward((await call(there.times, x)).sum())
        torch.testing.assert_close(ctx.gradients[x], LEAVES["u"].detach())
    assert seen == [1]


async def test_a_hook_that_is_added_between_repeated_passes_is_seen(cluster):
    x, seen = leaf(4), []
    async with ag.context() as ctx:
        root = (x * 2 * await call(there.times, x)).sum()
        node = node_of(x)
        await ctx.backward(root, retain_graph=True)
        handle = node.register_hook(lambda *_: seen.append(1))
        await ctx.backward(root, retain_graph=True)
        handle.remove()
        await ctx.backward(root, retain_graph=True)
    assert seen == [1]


async def test_derivatives_by_a_leaf_do_not_run_the_hooks_of_nodes(cluster):
    """As torch.autograd.grad does it, on every worker that takes part."""
    x, seen = leaf(4), []
    nodes = [node_of(x), node_of(LEAVES["u"])]
    for node in nodes:
        node.register_hook(lambda *_: seen.append(1))
    async with ag.context():
        await ag.grad((await call(there.times, x)).sum(), [x])
    assert not seen


async def test_leaves_with_the_same_gradient_get_memory_of_their_own(cluster):
    a, b = leaf(4), leaf(4)
    nodes = [node_of(a), node_of(b)]
    for node in nodes:
        node.register_hook(lambda *_: None)
    async with ag.context() as ctx:
        await ctx.backward((a + b).sum())
        one, two = ctx.gradients[a], ctx.gradients[b]
        one.add_(1)
        torch.testing.assert_close(two, torch.ones(4, dtype=DTYPE))


async def test_a_hook_that_raises_fails_the_pass_and_leaves_no_gradient(cluster):
    x, y = leaf(4), leaf(4)
    node = node_of(LEAVES["u"])

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    node.register_hook(fail)
    async with ag.context() as ctx:
        with pytest.raises(BackwardFailed, match="hook of an AccumulateGrad node") as caught:
            await ctx.backward(((await call(there.times, x)) * y).sum())
        assert caught.value.worker == "worker1"
        assert caught.value.op == "AccumulateGrad"
        with pytest.raises(BackwardFailed):
            _ = ctx.gradients


async def test_a_gradient_that_a_nodes_hook_changes_cannot_be_recorded(cluster):
    x, seen = leaf(4), []
    node = node_of(x)
    node.register_hook(lambda *_: seen.append(1))
    async with ag.context() as ctx:
        await ctx.backward((x * x * x).sum(), create_graph=True)
        (second,) = await ag.grad(ctx.gradients[x].sum(), [x])
        torch.testing.assert_close(second, 6 * x.detach())
        node.register_prehook(lambda grads: (grads[0] * 2,))
        with pytest.raises(GradError, match="create_graph"):
            await ctx.backward((x * x * x).sum(), create_graph=True)
    assert seen == [1, 1]


# ── DistributedDataParallel at the owners, in processes of their own ────────────────────────────

WIDTH = 6


def join_group(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def leave_group() -> None:
    dist.destroy_process_group()


class Owner:
    def __init__(self) -> None:
        torch.manual_seed(5)
        self.plain = torch.nn.Linear(WIDTH, WIDTH, dtype=DTYPE)
        self.module = DistributedDataParallel(self.plain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).sin()

    async def gradient(self) -> torch.Tensor:
        assert self.plain.weight.grad is None
        return ag.get_gradients(ag.current_context())[self.plain.weight]


async def test_one_pass_averages_the_gradients_of_ddp_modules_of_two_workers(tmp_path: Path):
    async with ag.LocalCluster(2):
        names = ["worker0", "worker1"]
        joining = [
            ag.rpc_async(name, join_group, args=(str(tmp_path / "store"), rank))
            for rank, name in enumerate(names)
        ]
        for each in joining:
            await each
        owners = [ag.remote(name, Owner) for name in names]
        inputs = [leaf(3, WIDTH, seed=seed) for seed in (1, 2)]
        for _ in range(2):  # the reducer is ready for the next pass
            async with ag.context() as ctx:
                calls = [o.rpc_async().forward(x) for o, x in zip(owners, inputs, strict=True)]
                results = [await each for each in calls]
                await ctx.backward((results[0] * results[1]).sum())
                found = [await o.rpc_async().gradient() for o in owners]
                mine = [ctx.gradients[x] for x in inputs]
        torch.manual_seed(5)
        plain = [torch.nn.Linear(WIDTH, WIDTH, dtype=DTYPE)]
        plain.append(torch.nn.Linear(WIDTH, WIDTH, dtype=DTYPE))
        plain[1].load_state_dict(plain[0].state_dict())
        made = [layer(x).sin() for layer, x in zip(plain, inputs, strict=True)]
        weights = [layer.weight for layer in plain]
        *theirs, one, two = torch.autograd.grad((made[0] * made[1]).sum(), [*inputs, *weights])
        for each in found:
            torch.testing.assert_close(each, (one + two) / 2)
        for each, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(each, expected)
        for each in [ag.rpc_async(name, leave_group) for name in names]:
            await each
