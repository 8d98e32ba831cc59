"""What a context offers, on torch tensors: compared with plain torch in one process."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aiograd as ag
from aiograd.dist import boundary
from aiograd.errors import BackwardFailed, GradError, MissingGradient
from aiograd.rpc.agent import current_agent
from aiograd.rpc.extension import FaultAction
from tests.torch import functions as there
from tests.torch.functions import DTYPE, LEAVES, leaf


@pytest.fixture(autouse=True)
def leaves():
    LEAVES.update(u=leaf(4, seed=1), table=leaf(10, 4, seed=2))
    yield
    LEAVES.clear()


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as started:
        yield started


def assert_close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def call(function: Any, *args: Any, to: str = "worker1") -> Any:
    return ag.rpc_async(to, function, args=args)


async def test_a_residual_around_a_call_has_the_gradients_of_plain_torch(cluster):
    """out = h + m * rpc(m), m = g(h): the exits of the first stage reach each other."""
    x, k = leaf(4, seed=3), leaf(4, seed=4)
    async with ag.context() as ctx:
        h = (x * k).tanh()
        m = (h * k).exp()
        out = h + m * await call(there.times, m)
        await ctx.backward(out.sum())
        h = (x * k).tanh()
        m = (h * k).exp()
        expected = torch.autograd.grad((h + m * (m * LEAVES["u"])).sum(), [x, k, LEAVES["u"]])
        assert_close(ctx.gradients[x], expected[0])
        assert_close(ctx.gradients[k], expected[1])
        assert_close(await call(there.gradient_of, "u"), expected[2])
    assert x.grad is None
    assert LEAVES["u"].grad is None


async def test_a_received_tensor_is_no_leaf_and_refuses_a_local_backward(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        one, two = await call(there.two, x)
        assert one.grad_fn is two.grad_fn
        assert not one.is_leaf
        with pytest.raises(GradError, match=r"ctx\.backward"):
            one.sum().backward(retain_graph=True)
        one.mul_(2)  # changed in place, as any other result
        await ctx.backward((one + two).sum())
        made = x * LEAVES["u"]
        (expected,) = torch.autograd.grad((2 * made.sin() + made.cos()).sum(), [x])
        assert_close(ctx.gradients[x], expected)


async def test_unused_results_and_several_roots(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        one, two = await call(there.two, x)
        await call(there.times, two)
        await call(there.times, x, to="worker0")
        await ctx.backward(one.sum(), (one * x).sum(), (x * x).sum())
        made = (x * LEAVES["u"]).sin()
        (expected,) = torch.autograd.grad(made.sum() + (made * x).sum() + (x * x).sum(), [x])
        assert_close(ctx.gradients[x], expected)


async def test_passes_add_up_and_a_freed_graph_is_named(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        root = ((await call(there.sine, x)) * x).sum()
        for _ in range(3):
            await ctx.backward(root, retain_graph=True)
        (expected,) = torch.autograd.grad(((x * LEAVES["u"]).sin() * x).sum(), [x])
        assert_close(ctx.gradients[x], 3 * expected)
        await ctx.backward(root)
        with pytest.raises(GradError, match="retain_graph=True") as caught:
            await ctx.backward(root)
        assert caught.value.reason == "freed"
        assert caught.value.worker == "driver"
        assert caught.value.op == "MulBackward0"


async def test_a_graph_freed_on_another_worker_names_that_worker(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        y = await call(there.sine, x)
        await ctx.backward(y.sum())
        with pytest.raises(BackwardFailed, match="freed") as caught:
            await ctx.backward((y + 1).sum())
        assert caught.value.worker == "worker1"
        assert caught.value.op == "SinBackward0"


async def test_saved_tensors_are_freed_as_the_pass_goes(cluster):
    x = leaf(1000)
    async with ag.context() as ctx:
        h = x * 2
        big = h.exp()
        node, gone = big.grad_fn, weakref.ref(big)
        out = (big * await call(there.identity, h) + h).sum()
        del big
        await ctx.backward(out)
        with pytest.raises(RuntimeError, match="freed"):
            _ = node._saved_result
        del out
        gc.collect()
        assert gone() is None


async def test_hooks_run_once_on_the_sum(cluster):
    x, seen = leaf(4), []
    x.register_hook(lambda g: seen.append("leaf") or g * 2)
    async with ag.context() as ctx:
        h = x * 2
        h.register_hook(lambda g: seen.append("inner") or g * 10)
        h.retain_grad()
        y = await call(there.times, h)
        y.register_hook(lambda g: seen.append("received") or g * 3)
        await ctx.backward((h * y).sum() + (y * x).sum())
        kept, found = h.grad, ctx.gradients[x]
        assert sorted(seen) == ["inner", "leaf", "received"]
        h = x * 2
        h.register_hook(lambda g: g * 10)
        h.retain_grad()
        y = h * LEAVES["u"]
        y.register_hook(lambda g: g * 3)
        (expected,) = torch.autograd.grad((h * y).sum() + (y * x).sum(), [x])
        assert_close(found, expected)
        assert_close(kept, h.grad)


async def test_modules_keep_their_backward_hooks_and_checkpoints(cluster):
    layer, seen, x = torch.nn.Linear(4, 4, dtype=DTYPE), [], leaf(2, 4)
    layer.register_full_backward_hook(lambda *_: seen.append("full"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("pre"))
    async with ag.context() as ctx:
        h = x * 2
        y = await call(there.identity, h)
        out = checkpoint(lambda t: layer(t).relu(), y, use_reentrant=False)
        await ctx.backward((out * h).sum())
        assert seen == ["pre", "full"]
        h = x * 2
        expected = torch.autograd.grad((layer(h).relu() * h).sum(), [x, layer.weight, layer.bias])
        for each, theirs in zip((x, layer.weight, layer.bias), expected, strict=True):
            assert_close(ctx.gradients[each], theirs)


async def test_a_reentrant_checkpoint_is_refused_with_advice(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        y = checkpoint(torch.sin, await call(there.times, x), use_reentrant=True)
        with pytest.raises(GradError, match="use_reentrant=False"):
            await ctx.backward(y.sum())


async def test_sparse_and_complex_gradients(cluster):
    scale = leaf(4)
    async with ag.context() as ctx:
        y = await call(there.embed, torch.tensor([1, 2, 1]), scale)
        z = torch.randn(4, dtype=torch.complex128).requires_grad_()
        w = await call(there.times, z)
        await ctx.backward(y.sum(), (w.abs() ** 2).sum())
        found = await call(there.gradient_of, "table")
        assert found.is_sparse
        places = torch.tensor([1, 2, 1])
        (expected,) = torch.autograd.grad(there.embed(places, scale).sum(), [LEAVES["table"]])
        assert_close(found.to_dense(), expected.to_dense())
        (expected,) = torch.autograd.grad(((z * LEAVES["u"]).abs() ** 2).sum(), [z])
        assert_close(ctx.gradients[z], expected)


async def test_gradients_of_leaves_share_no_memory(cluster):
    a, b = leaf(4), leaf(4, seed=5)
    async with ag.context() as ctx:
        y = await call(there.identity, a + b)
        await ctx.backward(y.sum())
        one, two = ctx.gradients[a], ctx.gradients[b]
        one.add_(1)
        assert_close(two, torch.ones(4, dtype=DTYPE))


async def test_gradients_have_the_strides_of_their_leaf(cluster):
    weight = leaf(3, 4).detach().t().contiguous().t().requires_grad_()
    async with ag.context() as ctx:
        y = await call(there.identity, weight * 2)
        await ctx.backward(y.sum())
        assert ctx.gradients[weight].stride() == weight.stride()


async def test_a_parameter_sent_as_an_argument_gets_its_gradient(cluster):
    weight = torch.nn.Parameter(torch.rand(4, dtype=DTYPE))
    async with ag.context() as ctx:
        y = await call(there.times, weight)
        await ctx.backward(y.sum())
        assert_close(ctx.gradients[weight], LEAVES["u"].detach())


async def test_derivatives_by_leaves_results_and_received_tensors(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        h = x * 3
        h.register_hook(lambda g: g * 2)
        y = await call(there.sine, h)
        out = (y * h).sum()
        found = await ag.grad(out, [x, h, y], retain_graph=True)
        other = x * 3
        other.register_hook(lambda g: g * 2)
        z = (other * LEAVES["u"]).sin()
        expected = torch.autograd.grad((z * other).sum(), [x, other, z])
        for each, theirs in zip(found, expected, strict=True):
            assert_close(each, theirs)
        assert not ctx.gradients
        with pytest.raises(GradError, match="not used"):
            await ag.grad(out, [leaf(4)], retain_graph=True)
        assert await ag.grad(out, [leaf(4)], allow_unused=True) == (None,)


async def test_derivatives_of_a_local_graph_need_no_context(cluster):
    x = leaf(4)
    (found,) = await ag.grad((x * x).sum(), [x])
    assert_close(found, 2 * x.detach())


async def test_third_derivatives_cross_workers(cluster):
    x = leaf(4)
    async with ag.context():
        found: Any = (await call(there.sine, x)).sum()
        for _ in range(3):
            (gradient,) = await ag.grad(found, [x], create_graph=True)
            found = gradient.sum()
    u = LEAVES["u"].detach()
    assert_close(gradient.detach(), (-(u**3) * (x * u).cos()).detach())


async def test_roots_held_by_a_reference(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        rref = ag.remote("worker1", there.two, args=(x,))
        one, _ = await rref
        total = ag.remote("worker1", torch.sum, args=(one,))
        await total.backward(ctx)
        (expected,) = torch.autograd.grad((x * LEAVES["u"]).sin().sum(), [x])
        assert_close(ctx.gradients[x], expected)


async def test_a_failure_names_worker_and_torch_node_and_shows_no_number(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        y = await call(there.fails, x)
        with pytest.raises(BackwardFailed, match="on purpose") as caught:
            await ctx.backward(y.sum())
        assert caught.value.worker == "worker1"
        assert caught.value.op == "FailsBackward"
        with pytest.raises(BackwardFailed):
            _ = ctx.gradients


async def test_a_write_to_what_backward_needs_is_an_error(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        y = await call(there.spoils, x)
        with pytest.raises(GradError, match="inplace") as caught:
            await ctx.backward(y.sum())
        assert caught.value.reason == "modified"
        assert caught.value.worker == "worker1"


async def test_bad_roots_are_refused_as_ours_are(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        for root, reason in (
            (x * 2, "not_scalar"),
            (x.sum().detach(), "no_requires_grad"),
            (leaf(1), "no_grad_fn"),
        ):
            with pytest.raises(GradError) as caught:
                await ctx.backward(root)
            assert caught.value.reason == reason


async def test_both_kinds_of_tensors_in_one_context(cluster):
    x, y = leaf(4), ag.tensor(np.arange(4.0), requires_grad=True)
    async with ag.context() as ctx:
        one, two = await call(there.both, x, y)
        await ctx.backward(one.sum(), (two * two).sum())
        assert_close(ctx.gradients[x], LEAVES["u"].detach())
        np.testing.assert_allclose(ctx.gradients[y].numpy(), 18 * y.numpy())
        found = await ag.grad(
            [(await call(there.times, x)).sum(), ag.sum(y * y)], [x, y], retain_graph=True
        )
        assert_close(found[0], LEAVES["u"].detach())
        np.testing.assert_allclose(found[1].numpy(), 2 * y.numpy())


async def test_boundary_hooks_see_torch_tensors_in_both_directions(cluster):
    x, seen = leaf(4), []
    async with ag.context() as ctx:
        ctx.on_crossing(lambda crossing, t: seen.append((crossing.way, crossing.peer, type(t))))
        ctx.on_crossing(boundary.as_dtype("bfloat16"))
        ctx.on_crossing(boundary.clipped(0.5, "forward"))
        y = await call(there.times, x)
        assert y.dtype is DTYPE
        await ctx.backward(y.sum())
        assert ("forward", "worker1", torch.Tensor) in seen
        assert ctx.gradients[x].dtype is DTYPE
        assert float(y.detach().norm()) <= 0.51 * float(LEAVES["u"].detach().abs().max())


async def test_a_boundary_hook_must_not_write(cluster):
    def write(crossing: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    async with ag.context() as ctx:
        ctx.on_crossing(write)
        with pytest.raises(GradError, match="written"):
            await call(there.times, leaf(4))


async def test_the_picture_shows_torch_nodes(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        y = await call(there.sine, x * 2)
        root = (y * y).sum()
        await ctx.backward(root, retain_graph=True)
        picture = (await ctx.graph()).dot
        for name in ("MulBackward0", "SinBackward0", "SumBackward0", "leaf", "Send", "Recv"):
            assert name in picture


async def test_recomputing_instead_of_saving(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        before = there.RUNS["sine"]
        y = await call(ag.checkpoint(there.sine), x)
        assert there.RUNS["sine"] == before + 1
        await ctx.backward(y.sum())
        assert there.RUNS["sine"] == before + 2
        (expected,) = torch.autograd.grad((x * LEAVES["u"]).sin().sum(), [x])
        assert_close(ctx.gradients[x], expected)


async def test_passes_in_many_contexts_at_once(cluster):
    x = leaf(4)

    async def one(number: int) -> None:
        async with ag.context() as ctx:
            h = x * number
            y = await call(there.times, h)
            await ctx.backward((h * y).sum())
            (expected,) = torch.autograd.grad(((x * number) ** 2 * LEAVES["u"]).sum(), [x])
            assert_close(ctx.gradients[x], expected)

    await asyncio.gather(*[asyncio.create_task(one(number)) for number in range(1, 20)])


async def test_anomaly_mode_finds_the_node_that_made_a_nan(cluster):
    x = torch.zeros(4, requires_grad=True)
    async with ag.context() as ctx:
        with torch.autograd.set_detect_anomaly(True):
            h = x * 2
            root = ((await call(there.identity, h)).sqrt() * 0 * h).sum()
            with pytest.warns(UserWarning, match="Sqrt"), pytest.raises(BackwardFailed) as caught:
                await ctx.backward(root)
        assert "nan" in str(caught.value)
        assert caught.value.op == "SqrtBackward0"


class Counting:
    """Counts the messages that a worker sends, by kind."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def on_send(self, kind: str, to: str) -> FaultAction:
        self.sent[kind] += 1
        return FaultAction()


@pytest.mark.parametrize("observed", [False, True], ids=["unobserved", "observed"])
async def test_a_chain_of_calls_to_one_worker_is_played_back_in_one_round_trip(cluster, observed):
    x, seen = leaf(4), []
    count = current_agent().fault_injector = Counting()
    async with ag.context() as ctx:
        y = x * 2
        for _ in range(5):
            y = await call(there.sine, y)
            if observed:
                y.register_hook(lambda g: seen.append(g))
        before = count.sent["gradients"]
        await ctx.backward(y.sum())
        assert len(seen) == (5 if observed else 0)
        assert (count.sent["gradients"] - before == 1) != observed
        y = x * 2
        for _ in range(5):
            y = (y * LEAVES["u"]).sin()
        (expected,) = torch.autograd.grad(y.sum(), [x])
        assert_close(ctx.gradients[x], expected)


async def test_a_hook_on_a_tensor_that_is_passed_on_runs_from_the_next_pass_on(cluster):
    x, seen, kept = leaf(4), [], there.KEPT
    async with ag.context() as ctx:
        root = (await call(there.passed_on, x, "worker0", to="worker1")).sum()
        await ctx.backward(root, retain_graph=True)
        once = ctx.gradients[x].clone()
        kept.pop().register_hook(lambda g: seen.append(g) or 2 * g)
        await ctx.backward(root, retain_graph=True)
        assert len(seen) == 1
        assert_close(ctx.gradients[x], 3 * once)
        assert_close(once, LEAVES["u"].detach())


async def test_a_repeated_pass_uses_the_stages_of_the_last_one(cluster):
    x, seen = leaf(4), []
    async with ag.context() as ctx:
        root = ((await call(there.sine, x)) * x).sum()
        await ctx.backward(root, retain_graph=True)
        first = ctx.topology
        await ctx.backward(root, retain_graph=True)
        assert ctx.topology is first
        x.register_hook(lambda g: seen.append(g))
        await ctx.backward(root, retain_graph=True)
        assert ctx.topology is not first
        assert len(seen) == 1


async def test_a_small_pass_runs_on_the_loop_and_a_large_one_in_a_thread(cluster):
    threads = []

    def note(gradient: torch.Tensor) -> None:
        threads.append(threading.current_thread())

    small, large = leaf(4), leaf(300, 300)
    async with ag.context() as ctx:
        h = small * 2
        h.register_hook(note)
        await ctx.backward((h * await call(there.identity, leaf(4))).sum())
        g = large * 2
        g.register_hook(note)
        product = (g @ g @ g @ g).sum() * (await call(there.identity, leaf(1))).sum()
        await ctx.backward(product)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_a_missing_gradient_says_why(cluster):
    x, unused = leaf(4, seed=3), leaf(4, seed=4)
    async with ag.context() as ctx:
        y = await call(there.times, x)
        with pytest.raises(MissingGradient, match="no backward pass has ended here"):
            ctx.gradients[x]
        await ctx.backward(y.sum())
        for tensor, why in (
            (unused, r"shape \(4,\) .* no root of a backward pass depends on it"),
            (x.detach(), "does not require grad"),
            (x * 2, "it is no leaf, but a result of MulBackward0"),
        ):
            with pytest.raises(MissingGradient, match=why):
                ctx.gradients[tensor]
