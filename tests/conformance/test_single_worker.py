"""Send nodes alone, and whole programs on one worker that calls itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.op import parent_of
from aiograd.dist.backward.credit import ALL
from aiograd.dist.backward.plan import Topology
from aiograd.dist.backward.state import Pass, Terms
from aiograd.dist.nodes import SendNode
from aiograd.errors import GradError, WorkerClosed
from aiograd.rpc.directory import PeerInfo
from tests.conformance.forms import leaf, plus

PEER = b"1" * 16
WORKER1 = PeerInfo("worker1", 1, PEER)
OPENED = threading.Event()  # what `wait_for_opening` waits for


def joined(*tensors: ag.Tensor) -> Pass:
    """A pass of worker1 that worker0 joined; an edge carried the tensors from 0 to 1."""
    send = SendNode(1, "worker1", PEER, tuple(parent_of(t) for t in tensors))
    here = PeerInfo("worker0", 0, b"worker0")
    return Pass((1, 1), WORKER1, here, Terms(), Topology({1: send}, {}))


def test_cpp_send_fn_invalid_inputs_as_many_gradients_as_tensors_are_needed():
    ones = np.ones((3, 3))
    for wrong in ([ones], [ones, ones, ones]):
        with pytest.raises(GradError, match="worker1 answered edge 1"):
            joined(leaf(seed=1), leaf(seed=2)).feed(WORKER1, [(1, wrong, None)], None, ALL, 0)


def test_cpp_send_fn_invalid_inputs_each_gradient_has_the_shape_of_its_tensor():
    this = joined(leaf(seed=1), leaf(seed=2))
    this.feed(WORKER1, [(1, [np.ones((3, 3)), np.ones((2, 3))], None)], None, ALL, 0)
    with pytest.raises(GradError, match="shape") as caught:
        this.collect(this.drain())
    assert caught.value.reason == "shape"


def test_cpp_send_fn_invalid_inputs_gradients_come_once_and_only_from_the_receiver():
    t1, t2 = leaf(seed=1), leaf(seed=2)
    this, ones = joined(t1, t2), np.ones((3, 3))
    stranger = PeerInfo("stranger", 2, b"stranger")
    with pytest.raises(GradError, match="stranger sent a gradient for edge 1"):
        this.feed(stranger, [(1, [7 * ones, 7 * ones], None)], None, ALL, 0)
    assert not this.complete
    this.feed(WORKER1, [(1, [ones, 2 * ones], None)], None, ALL, 0)
    with pytest.raises(GradError, match="it was answered before"):
        this.feed(WORKER1, [(1, [5 * ones, 5 * ones], None)], None, ALL, 0)
    this.collect(this.drain())
    assert this.complete
    assert {t: g.tolist() for t, g in this.gradients.items()} == {
        t1: ones.tolist(),
        t2: (2 * ones).tolist(),
    }


async def test_cpp_send_fn_invalid_inputs_the_known_workers_are_those_sent_to(workers):
    async with workers(2), ag.context() as ctx:
        await ag.rpc_async("worker1", ag.add, args=(leaf(seed=1), leaf(seed=2)))
        assert ctx.known_workers == {"worker1"}
        (send,) = ctx.send_nodes.values()
        assert len(send.next_nodes) == 2


async def test_cpp_backward_cleanup_local(workers):
    x, y = ag.rand(2, 2, requires_grad=True), ag.rand(2, 2, requires_grad=True)
    async with workers(1), ag.context() as ctx:
        z = (x * x + y * y).sum()
        assert ag.debug_info()["backward_passes"] == 0
        await ctx.backward(z)
        assert ag.debug_info()["backward_passes"] == 0
        np.testing.assert_allclose(ctx.gradients[x].numpy(), 2 * x.numpy())


async def test_cpp_backward_cleanup_from_send(workers):
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", own_leaf)
        await ctx.backward(y.sum())
        # worker1 joined because gradients came in for what it had sent.
        assert (await ag.rpc_async("worker1", ag.debug_info))["backward_passes"] == 0
        assert await ag.rpc_async("worker1", own_gradients, args=(ctx.id,)) == [[1.0]]


def own_leaf() -> ag.Tensor:
    return ag.ones(1, requires_grad=True)


def own_gradients(context_id: int) -> list[object]:
    return [g.tolist() for g in ag.get_gradients(context_id).values()]


async def test_e2e_setup_teardown():
    await ag.init_rpc("worker", rank=0, world_size=1)
    assert ag.current_worker().name == "worker"
    assert ag.get_worker_info() == ag.WorkerInfo("worker", 0)
    assert ag.workers() == [ag.WorkerInfo("worker", 0)]
    await ag.shutdown()
    with pytest.raises(WorkerClosed):
        ag.current_worker()


async def test_e2e_remote_add():
    t1, t2 = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)
    async with ag.Worker("worker", rank=0, world_size=1):
        async with ag.context() as ctx:
            r = await ag.rpc_async("worker", ag.add, args=(t1, t2))
            assert r.requires_grad
            assert r.grad_fn.name == "Recv"
            assert ctx.known_workers == {"worker"}
        without = await ag.rpc_async("worker", ag.add, args=(t1.detach(), t2.detach()))
        assert not without.requires_grad


async def test_e2e_self_rref_creation_future():
    t1, t2 = ag.tensor([1.0]), ag.tensor([2.0])
    OPENED.clear()
    async with ag.Worker("worker", rank=0, world_size=1, options=ag.Options(strict_leaks=True)):
        rref = ag.remote("worker", wait_for_opening, args=(t1, t2))
        creation, value = rref.future(), rref.to_here()
        assert rref.is_owner()
        assert not creation.done()
        OPENED.set()
        assert (await value).tolist() == [3.0]
        assert await creation is None
        assert rref.local_value().tolist() == [3.0]
        assert await rref.to_here() is rref.local_value()
        del rref, value


def wait_for_opening(x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    assert OPENED.wait(20)
    return x + y


async def test_e2e_training_loop():
    t1, t2 = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)
    async with ag.Worker("worker", rank=0, world_size=1, options=ag.Options(strict_leaks=True)):
        for _ in range(100):
            async with ag.context() as ctx:
                r = await ag.rpc_async("worker", ag.add, args=(t1, t2))
                for _ in range(5):
                    r = await ag.rpc_async("worker", ag.add, args=(t1, r))
                rref = ag.remote("worker", plus, args=(t1, r))
                result = await rref.to_here()
                assert result.tolist() == [8.0]
                await ctx.backward(result.sum())
                assert ctx.gradients[t1].tolist() == [7.0]
                assert ctx.gradients[t2].tolist() == [1.0]
        del rref
        await ag.rpc_async(
            "worker", plus, args=(0, 0)
        )  # a tick in which the last one is given back
        counters = ag.debug_info()
        assert counters.pop("workers") == 1
        assert counters == dict.fromkeys(counters, 0)
