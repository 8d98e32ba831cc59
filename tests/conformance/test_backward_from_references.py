"""Backward passes that start from a reference."""

from __future__ import annotations

import pytest

import aiograd as ag
from aiograd.errors import GradError, RRefError, UnknownContext
from tests.conformance.forms import leaf, plus


async def test_rref_backward_owner(workers):
    t1, t2 = leaf(seed=1), leaf(seed=2)
    ones = [[1.0] * 3] * 3
    async with workers(1):
        rref = ag.RRef((t1 + t2).sum())
        await rref.backward()
        assert t1.grad.tolist() == t2.grad.tolist() == ones
        async with ag.context() as ctx:
            rref = ag.RRef((t1 + t2).sum())
            await rref.backward(ctx.id, retain_graph=True)
            assert ctx.gradients[t1].tolist() == ctx.gradients[t2].tolist() == ones
            await rref.backward(ctx)
            assert ctx.gradients[t1].tolist() == [[2.0] * 3] * 3
        assert t1.grad.tolist() == ones


async def test_rref_backward_owner_errors(workers):
    t = leaf()
    async with workers(1), ag.context() as ctx:
        for value, reason in [
            (ag.ones(1), "no_requires_grad"),
            (t * t, "not_scalar"),
        ]:
            for given in (None, ctx.id):
                with pytest.raises(GradError) as caught:
                    await ag.RRef(value).backward(given)
                assert caught.value.reason == reason
        with pytest.raises(UnknownContext, match="100"):
            await ag.RRef((t * t).sum()).backward(100)
        for given in (None, ctx):
            with pytest.raises(GradError, match="str"):
                await ag.RRef("foo").backward(given)


def total_of(t1: ag.Tensor, t2: ag.Tensor) -> ag.Tensor:
    return (t1 + t2).sum()


async def test_rref_backward_user(workers):
    t = leaf()
    async with workers(2), ag.context() as ctx:
        rref = ag.remote("worker1", total_of, args=(t, t))
        await rref.backward(ctx.id, retain_graph=True)
        assert ctx.gradients[t].tolist() == [[2.0] * 3] * 3
        await rref.backward(ctx)
        assert ctx.gradients[t].tolist() == [[4.0] * 3] * 3
        assert t.grad is None


async def test_rref_backward_user_errors(workers):
    async with workers(2), ag.context() as ctx:
        with pytest.raises(GradError, match="str"):
            await ag.remote("worker1", plus, args=("foo", "bar")).backward(ctx.id)
        rref = ag.remote("worker1", total_of, args=(leaf(), leaf()))
        with pytest.raises(RRefError, match="must be given"):
            await rref.backward()
        with pytest.raises(UnknownContext):
            await rref.backward(100)
