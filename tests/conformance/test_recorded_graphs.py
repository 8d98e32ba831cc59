"""What a call adds to the graphs of caller and callee."""

from __future__ import annotations

import pytest

import aiograd as ag
from aiograd.errors import NoContext, UnknownContext
from tests.conformance.forms import (
    FORMS,
    LAYOUTS,
    call,
    full,
    has_context,
    leaf,
    outside,
    plus,
    same,
    total,
)


def looks_like_a_callee(context_id: int) -> bool:
    """One send node → add → the one recv node, twice; asked for elsewhere, so it says so."""
    context = ag.get_context(context_id)
    (send,) = context.send_nodes.values()
    (recv,) = context.recv_nodes.values()
    assert send.name == "Send"
    ((add, index),) = send.next_nodes
    assert (add.name, index) == ("add", 0)
    assert [node is recv for node, _ in add.next_nodes] == [True, True]
    assert [index for _, index in add.next_nodes] == [0, 1]
    assert recv.name == "Recv"
    assert recv.next_nodes == ()
    return True


def looks_like_a_caller(context: ag.Context, result: ag.Tensor, *leaves: ag.Tensor) -> None:
    """One send node → the leaves; one recv node, from which the result comes."""
    (send,) = context.send_nodes.values()
    assert [(node.name, node.variable, index) for node, index in send.next_nodes] == [
        ("AccumulateGrad", each, 0) for each in leaves
    ]
    (recv,) = context.recv_nodes.values()
    assert result.grad_fn is recv


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("func", [ag.add, plus], ids=["op", "function"])
@pytest.mark.parametrize("form", FORMS)
async def test_graph_first_call(workers, form, func, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 2)
    async with workers(2):
        async with ag.context() as ctx:
            result = await call(form, "worker1", func, t1, t2)
            same(result.detach(), (t1 + t2).detach())
            looks_like_a_caller(ctx, result, t1, t2)
            assert await ag.rpc_async("worker1", looks_like_a_callee, args=(ctx.id,))
        with pytest.raises(UnknownContext):
            ag.get_context(ctx.id)
        with pytest.raises(NoContext):
            ag.current_context()


async def nested_plus(form: str, x: ag.Tensor, y: ag.Tensor, path: list[str]) -> ag.Tensor:
    if not path:
        return x + y
    if len(path) == 1:
        return await call(form, path[0], ag.add, x, y)
    return await call(form, path[0], nested_plus, form, x, y, path[1:])


def looks_like_the_middle(context_id: int) -> bool:
    """Sends: the onward call, then the answer; in the order in which they were made."""
    context = ag.get_context(context_id)
    onward, answer = context.send_nodes.values()
    asked, answered = context.recv_nodes.values()
    assert [(node is asked, index) for node, index in onward.next_nodes] == [(True, 0), (True, 1)]
    assert [(node is answered, index) for node, index in answer.next_nodes] == [(True, 0)]
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["async", "remote"])
async def test_graph_nested_chain(workers, form, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 2)
    async with workers(3), ag.context() as ctx:
        result = await nested_plus(form, t1, t2, ["worker0", "worker1", "worker2"])
        same(result.detach(), (t1 + t2).detach())
        looks_like_a_caller(ctx, result, t1, t2)
        for name in ("worker0", "worker1"):
            assert await ag.rpc_async(name, looks_like_the_middle, args=(ctx.id,))
        assert await ag.rpc_async("worker2", looks_like_a_callee, args=(ctx.id,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["async", "remote"])
async def test_graph_nested_back_to_self(workers, form, layout):
    t1, t2 = leaf(layout, 1), leaf(layout, 2)
    async with workers(2), ag.context() as ctx:
        result = await nested_plus(form, t1, t2, ["worker1", "driver"])
        as_caller, as_callee = ctx.send_nodes.values()
        asked, answered = ctx.recv_nodes.values()
        assert [node.variable for node, _ in as_caller.next_nodes] == [t1, t2]
        ((add, _),) = as_callee.next_nodes
        assert [node is asked for node, _ in add.next_nodes] == [True, True]
        assert result.grad_fn is answered
        assert await ag.rpc_async("worker1", looks_like_the_middle, args=(ctx.id,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("form", "func"), [("async", plus), ("sync", plus), ("remote", ag.add)])
async def test_graph_none_without_grad_but_the_context_is_there(workers, form, func, layout):
    async with workers(2), ag.context() as ctx:
        result = await call(form, "worker1", func, leaf(layout, 1, False), leaf(layout, 2, False))
        assert not result.requires_grad
        assert ctx.send_nodes == ctx.recv_nodes == {}
        assert await outside(ag.rpc_async, "worker1", has_context, (ctx.id,))


def own_leaf() -> ag.Tensor:
    return ag.ones(3, 3, requires_grad=True)


def gradients_here(context_id: int) -> list[tuple[object, object]]:
    return [(t.numpy(), g.numpy()) for t, g in ag.get_gradients(context_id).items()]


@pytest.mark.parametrize("form", FORMS)
async def test_graph_grad_only_in_result(workers, form):
    async with workers(2), ag.context() as ctx:
        result = await call(form, "worker1", own_leaf)
        await ctx.backward((result * 3.0).sum())
        assert ctx.gradients == {}
        ((value, gradient),) = await ag.rpc_async("worker1", gradients_here, args=(ctx.id,))
        assert value.tolist() == [[1.0] * 3] * 3
        assert gradient.tolist() == [[3.0] * 3] * 3


def stacked(tensors: list[ag.Tensor]) -> ag.Tensor:
    return ag.stack(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
async def test_graph_mixed_list_arg(workers, form, layout):
    tensors = [leaf(layout, seed, seed % 2 == 0) for seed in range(10)]
    async with workers(2), ag.context() as ctx:
        result = await call(form, "worker1", stacked, tensors)
        same(result.detach(), ag.stack(tensors).detach())
        (send,) = ctx.send_nodes.values()
        assert {node.name for node, _ in send.next_nodes} == {"AccumulateGrad"}
        assert [node.variable for node, _ in send.next_nodes] == tensors[::2]
        assert ctx.known_workers == {"worker1"}
        await ctx.backward(total(result))
        assert set(ctx.gradients) == set(tensors[::2])


def times_if_plain(t1: ag.Tensor, t2: ag.Tensor) -> ag.Tensor:
    if not t1.requires_grad or t2.requires_grad:
        raise ValueError("a flag was lost on the way")
    return t1 * t2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
async def test_graph_mixed_requires_grad(workers, form, layout):
    t1 = leaf(layout, 1)
    t2 = t1.detach() * 2.0
    async with workers(2), ag.context() as ctx:
        result = await call(form, "worker1", times_if_plain, t1, t2)
        assert (full(result.detach()) == full(t1.detach()) * full(t2)).all()
        await ctx.backward(total(result))
        assert set(ctx.gradients) == {t1}
        same(ctx.gradients[t1], t2)
