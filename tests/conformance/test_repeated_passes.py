"""Several passes over a context: accumulation, hooks, memory of gradients, load, counters."""

from __future__ import annotations

import asyncio
import re
import time

import numpy as np
import pytest

import aiograd as ag
from aiograd.testing.fault_injection import CONTROL, Faults
from tests.conformance.forms import LAYOUTS, full, leaf, plus, total
from tests.support.waiting import until_not

# ── several passes ──────────────────────────────────────────────────────────────────────────────


async def test_acc_twice(workers):
    rng = np.random.default_rng(0)
    t1 = ag.tensor(rng.standard_normal((3, 4)), requires_grad=True)
    t2 = ag.tensor(rng.standard_normal((4, 2)), requires_grad=True)
    async with workers(2), ag.context() as ctx:
        loss = (await ag.rpc_async("worker1", ag.matmul, args=(t1, t2))).sum()
        await ctx.backward(loss, retain_graph=True)
        await ctx.backward(loss)
        here = ag.matmul(t1, t2).sum()
        here.backward(retain_graph=True)
        here.backward()
        assert set(ctx.gradients) == {t1, t2}
        np.testing.assert_allclose(ctx.gradients[t1].numpy(), t1.grad.numpy(), rtol=1e-14)
        np.testing.assert_allclose(ctx.gradients[t2].numpy(), t2.grad.numpy(), rtol=1e-14)


async def product_elsewhere(to: str, t1: ag.Tensor, t2: ag.Tensor) -> ag.Tensor:
    return await ag.rpc_async(to, ag.mul, args=(t1, t2))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_acc_nested(workers, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 1)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker0", product_elsewhere, args=("worker1", t1, t2))
        await ctx.backward(total(y), retain_graph=True)
        once = full(ctx.gradients[t1]).copy()
        np.testing.assert_allclose(once, full(t2.detach()))
        await ctx.backward(total(y))
        np.testing.assert_allclose(full(ctx.gradients[t1]), 2 * once)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_acc_1000(workers, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 2)
    async with workers(1), ag.context() as ctx:
        loss = total(await ag.rpc_async("worker0", ag.add, args=(t1, t2)))
        await ctx.backward(loss, retain_graph=True)
        once = full(ctx.gradients[t1]).copy()
        for _ in range(999):
            await ctx.backward(loss, retain_graph=True)
        np.testing.assert_allclose(full(ctx.gradients[t1]), 1000 * once)


class Bag:
    """An embedding bag on its owner."""

    def __init__(self, weight: ag.Tensor) -> None:
        self.module = ag.nn.EmbeddingBag(*weight.shape, mode="sum", sparse=True)
        self.module.load_state_dict({"weight": weight})

    def forward(self, numbers: ag.Tensor, offsets: ag.Tensor) -> ag.Tensor:
        assert not numbers.requires_grad
        return self.module(numbers, offsets)

    def gradient(self, context_id: int) -> ag.Tensor:
        (gradient,) = ag.get_gradients(context_id).values()
        return gradient


async def test_acc_embedding_sparse(workers):
    weight = ag.tensor(np.random.default_rng(3).standard_normal((16, 16)))
    numbers, offsets = ag.tensor([1, 2, 4, 5, 4, 3, 2, 9]), ag.tensor([0, 4])
    local = Bag(weight)
    here = local.forward(numbers, offsets).sum()
    here.backward(retain_graph=True)
    here.backward()
    expected = local.module.weight.grad
    async with workers(2):
        rref = ag.remote("worker1", Bag, args=(weight,))
        async with ag.context() as ctx:
            loss = (await rref.rpc_async().forward(numbers, offsets)).sum()
            await ctx.backward(loss, retain_graph=True)
            await ctx.backward(loss)
            found = await rref.rpc_async().gradient(ctx.id)
            assert found.is_sparse
            assert expected.is_sparse
            np.testing.assert_allclose(full(found), full(expected), rtol=1e-14)
            assert full(found)[4].tolist() == [4.0] * 16  # twice in the bags, two passes
            assert not full(found)[0].any()


# ── hooks ───────────────────────────────────────────────────────────────────────────────────────


async def test_hooks_tensor(workers):
    t1, t2 = ag.ones(3, 3, requires_grad=True), ag.ones(3, 3, requires_grad=True)
    seen = []

    def doubled(gradient: ag.Tensor) -> ag.Tensor:
        seen.append(gradient.tolist())
        return gradient * 2.0

    handle = t1.register_hook(doubled)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", ag.add, args=(t1, t2))
        loss = (y + t1).sum()  # two edges to the same leaf: one gradient, one call
        await ctx.backward(loss, retain_graph=True)
        assert seen == [[[2.0] * 3] * 3]
        assert ctx.gradients[t1].tolist() == [[4.0] * 3] * 3
        assert ctx.gradients[t2].tolist() == [[1.0] * 3] * 3
        await ctx.backward(loss, retain_graph=True)
        assert len(seen) == 2
        handle.remove()
        await ctx.backward(loss)
        assert len(seen) == 2
        assert ctx.gradients[t1].tolist() == [[10.0] * 3] * 3


async def test_hooks_post_of_one_leaf_run_in_order_once_per_pass(workers):
    t = ag.ones(3, 3, requires_grad=True)
    calls = []
    t.register_hook(lambda g: calls.append(1))
    t.register_hook(lambda g: calls.append(2))
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", ag.add, args=(t, t))
        y.register_hook(lambda g: calls.append(0))
        await ctx.backward((y + y).sum())
        assert calls == [0, 1, 2]
        assert set(ctx.gradients) == {t}
        assert ctx.gradients[t].tolist() == [[4.0] * 3] * 3


# ── whose memory a gradient is ──────────────────────────────────────────────────────────────────


class Given(ag.Function):
    """Gives prepared arrays back as the gradients of its two inputs."""

    @staticmethod
    def forward(ctx, a, b, gradients):
        ctx.gradients = gradients
        return a + b

    @staticmethod
    def backward(ctx, g):
        return (*(ag.from_numpy(each) for each in ctx.gradients), None)


async def gradients_of(prepared: list[np.ndarray]) -> list[np.ndarray]:
    a, b = ag.ones(4, 5, requires_grad=True), ag.ones(4, 5, requires_grad=True)
    async with ag.context() as ctx:
        await ctx.backward(Given.apply(a, b, prepared).sum())
        return [ctx.gradients[a].numpy(), ctx.gradients[b].numpy()]


class Fresh(ag.Function):
    """Makes its gradient itself, and notes where it lies."""

    places: list[int] = []  # noqa: RUF012 - emptied by the test that looks at it

    @staticmethod
    def forward(ctx, a):
        return a * 1.0

    @staticmethod
    def backward(ctx, g):
        made = g * 3.0
        Fresh.places.append(made.numpy().ctypes.data)
        return made


async def test_buf_no_copy_of_a_gradient_that_nobody_else_holds(workers):
    Fresh.places.clear()
    a = ag.ones(4, 5, requires_grad=True)
    async with workers(1), ag.context() as ctx:
        await ctx.backward(Fresh.apply(a).sum())
        assert ctx.gradients[a].numpy().ctypes.data == Fresh.places[0]
        assert ctx.gradients[a].tolist() == [[3.0] * 5] * 4


async def test_buf_no_copy_but_one_gradient_for_two_leaves_is_kept_apart(workers):
    shared = np.full((4, 5), 2.0)
    async with workers(1):
        first, second = await gradients_of([shared, shared])
        assert first.tolist() == second.tolist() == shared.tolist()
        assert not np.shares_memory(first, second)
        assert not np.shares_memory(first, shared)


async def test_buf_no_copy_but_an_expanded_gradient_becomes_a_real_array(workers):
    expanded = np.broadcast_to(np.array(2.0), (4, 5))
    async with workers(1):
        first, second = await gradients_of([expanded, expanded])
        assert first.tolist() == [[2.0] * 5] * 4
        for found in (first, second):
            assert found.flags.c_contiguous
            assert found.flags.writeable
        assert not np.shares_memory(first, second)


@pytest.mark.parametrize("sparse", [False, True])
async def test_buf_no_copy_sparse_accumulates_right_while_the_user_holds_views(workers, sparse):
    bag = ag.nn.EmbeddingBag(10, 3, mode="sum", sparse=sparse)
    async with workers(1), ag.context() as ctx:
        loss = bag(ag.tensor([1, 2, 4, 5, 4, 3, 2, 9]), ag.tensor([0, 4])).sum()
        await ctx.backward(loss, retain_graph=True)
        first = ctx.gradients[bag.weight]
        assert first.is_sparse == sparse
        before = full(first).copy()
        assert before[4].tolist() == [2.0] * 3
        held = [ag.sparse.values(first), ag.sparse.indices(first)] if sparse else [first]
        held_before = [each.numpy().copy() for each in held]
        for _ in range(10):
            await ctx.backward(loss, retain_graph=True)
        np.testing.assert_allclose(full(ctx.gradients[bag.weight]), 11 * before)
        for each, value in zip(held, held_before, strict=True):
            np.testing.assert_array_equal(each.numpy(), value)


# ── load ────────────────────────────────────────────────────────────────────────────────────────


async def train_against(server: str) -> int:
    t1, t2 = leaf(seed=1), leaf(seed=2)
    async with ag.context() as ctx:
        y = await ag.rpc_async(server, ag.add, args=(t1, t2))
        y = await ag.rpc_async(server, ag.mul, args=(t1, y))
        y = await ag.rpc_async(server, plus, args=(y, t2))
        y = await ag.rpc_async(server, plus, args=(y, y))
        await ctx.backward(y.sum())
        np.testing.assert_allclose(
            ctx.gradients[t1].numpy(), 4 * t1.numpy() + 2 * t2.numpy(), rtol=1e-12
        )
        np.testing.assert_allclose(ctx.gradients[t2].numpy(), 2 * t1.numpy() + 2.0, rtol=1e-12)
        return ctx.id


async def train_many(server: str, times: int) -> list[int]:
    """Train in many contexts at once; which ones."""
    return await asyncio.gather(*[train_against(server) for _ in range(times)])


async def test_load_many_ctx(workers):
    async with workers(3) as cluster:
        trainers = [
            cluster[name].call(train_many, "worker0", 20) for name in ("worker1", "worker2")
        ]
        done = await asyncio.gather(*trainers, train_many("worker0", 20))
        assert len({each for ids in done for each in ids}) == 3 * 20


# ── what can be observed ────────────────────────────────────────────────────────────────────────


class Observed(ag.Function):
    """Notes the counters of its worker while a pass runs through it."""

    counters: list[dict[str, int]] = []  # noqa: RUF012 - emptied by the test that looks at it

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        Observed.counters.append(ag.debug_info())
        return g * 1.0


def observed(x: ag.Tensor) -> ag.Tensor:
    return Observed.apply(x)


async def test_obs_debug_info(workers):
    Observed.counters.clear()
    async with workers(2) as cluster:
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", observed, args=(leaf(),))
            assert ag.debug_info()["contexts"] == 1
            await ctx.backward(Observed.apply(y).sum())
            assert len(Observed.counters) == 2
            for counters in Observed.counters:
                assert 1 <= counters["backward_passes"] <= 4
                assert counters["contexts"] == 1
            for worker in cluster:
                assert (await worker.call(ag.debug_info))["backward_passes"] == 0

        async def contexts() -> int:
            return (await cluster["worker1"].call(ag.debug_info))["contexts"]

        await until_not(contexts, 8.0)
        assert ag.debug_info()["contexts"] == 0


def own_leaf() -> ag.Tensor:
    return ag.ones(3, 3, requires_grad=True)


async def test_obs_profile_bwd_each_worker_tells_its_share_of_a_pass(workers):
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", own_leaf)
        began = time.perf_counter()
        await ctx.backward(y.sum())
        whole = time.perf_counter() - began
        picture = await ctx.graph()
        labels = [node.label for node in picture.nodes]
        assert labels.count("Send") == labels.count("Recv") == 1
        shares = dict(re.findall(r"(driver|worker1) ([0-9.]+) ms", picture.title))
        assert shares.keys() == {"driver", "worker1"}
        assert 0 < ctx.seconds < whole
        assert float(shares["worker1"]) / 1e3 < whole + 1e-4  # shown to a tenth of a millisecond


def test_faulty_options_bwd():
    faults = Faults()
    assert set(CONTROL) == {"rref.fork", "rref.accept", "rref.release", "context.release"}
    for kind in CONTROL:
        actions = [faults.on_send(kind, "worker1").action for _ in range(4)]
        assert actions == ["fail", "fail", "fail", "send"]
    assert faults.on_send("gradients", "worker1").action == "send"


async def test_faulty_options_bwd_control_messages_fail_and_gradients_do_not(workers):
    async with workers(2):
        faults = ag.current_worker().agent.fault_injector = Faults()
        t = leaf()
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", plus, args=(t, t))
            await ctx.backward(y.sum())
            assert ctx.gradients[t].tolist() == [[2.0] * 3] * 3
            assert not faults.hit
