"""Deferred work: gradients that stay here are computed after those that a peer waits for."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.graph import Part
from aiograd.autograd.op import parent_of
from aiograd.autograd.op.nodes import OpNode
from aiograd.autograd.sweep import contributions
from aiograd.autograd.tensor import wrap
from aiograd.dist.backward import plan
from aiograd.dist.nodes import LastStep, RecvNode, SendNode
from aiograd.dist.backward.credit import ALL, is_all, together
from aiograd.dist.backward.state import Pass, Terms
from aiograd.dist.backward.plan import Topology, halves
from aiograd.errors import BackwardFailed
from aiograd.nn import functional
from aiograd.rpc.directory import PeerInfo

SIZE = 256


def matrix(seed: int, requires_grad: bool = True) -> ag.Tensor:
    values = np.random.default_rng(seed).standard_normal((SIZE, SIZE)).astype(np.float32)
    return ag.tensor(values, requires_grad=requires_grad)


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() < 1e-4 * np.abs(expected).max())


# ── what can wait ───────────────────────────────────────────────────────────────────────────────


def received(size: int = SIZE) -> ag.Tensor:
    """A tensor that came from a peer named before."""
    array = np.ones((size, size), np.float32)
    return wrap(array, Part(RecvNode(1, 1, "before", b"before", 1), 0, array.shape, array.dtype))


def divided(result: ag.Tensor) -> list[list[bool]]:
    """Of each product that is divided: which parents can wait."""
    found = halves(contributions([parent_of(result)])) or {}
    return [[parent is not None for parent in later[1]] for _, later in found.values()]


def test_the_gradient_of_a_parameter_can_be_deferred_on_either_side():
    assert divided(received() @ matrix(0)) == [[False, True]]
    assert divided(matrix(0) @ received()) == [[True, False]]
    bias = ag.zeros(SIZE, dtype=np.float32, requires_grad=True)
    assert divided(functional.linear(received(), matrix(0), bias)) == [[False, True, True]]


def test_small_products_and_those_with_one_gradient_are_not_deferred():
    assert divided(received(16) @ ag.ones(16, 16, dtype=np.float32, requires_grad=True)) == []
    assert divided(received() @ matrix(0, requires_grad=False)) == []
    assert divided(matrix(0) @ matrix(1)) == []
    assert divided(received() * matrix(0)) == []


def test_deferred_work_holds_gradients_within_a_limit(monkeypatch):
    x = received()
    for seed in range(4):
        x = x @ matrix(seed)
    assert len(divided(x)) == 4
    monkeypatch.setattr(plan, "HELD", 2 * x.nbytes)
    assert len(divided(x)) == 2


# ── in a pass ───────────────────────────────────────────────────────────────────────────────────


def worker(name: str) -> PeerInfo:
    return PeerInfo(name, 1, name.encode())


def middle(originator: str) -> tuple[Pass, ag.Tensor, ag.Tensor]:
    """The part of a worker that got x from before, and gave x @ w to a peer named after."""
    x, w = received(), matrix(0)
    y = x @ w
    sends = {2: SendNode(2, "after", b"after", (parent_of(y),))}
    receives = {1: x._node.joint}
    home, here = worker(originator), worker("here")
    part = Pass((1, 7), home, here, Terms(), Topology(sends, receives))
    part.feed(worker("after"), [(2, [np.ones((SIZE, SIZE), np.float32)], None)], None, ALL, 0)
    return part, x, w


def test_a_gradient_for_a_peer_is_sent_first_and_credit_after_the_deferred_work():
    part, x, w = middle("somebody else")
    first = part.collect(part.drain())
    assert [message.name for message in first] == ["before"]
    assert near(first[0].answers[0][1][0], np.ones((SIZE, SIZE)) @ w.numpy().T)
    assert part.late
    assert not part.complete, "its gradients must not be shown"
    assert not part.gradients
    rest = part.collect(part.drain_late())
    assert [(message.name, message.answers) for message in rest] == [("somebody else", [])]
    assert part.complete
    assert not part.late
    assert near(part.gradients[w], x.numpy().T @ np.ones((SIZE, SIZE)))
    assert is_all(together(first[0].credit, rest[0].credit))


def test_a_pass_is_not_complete_before_its_results_are_collected():
    """While a thread computes, the loop may ask."""
    part, _, w = middle("somebody else")
    assert not part.complete
    sinks = part.drain()
    assert not part.complete
    part.collect(sinks)
    sinks = part.drain_late()
    assert not part.complete
    part.collect(sinks)
    assert part.complete
    assert w in part.gradients


def test_nothing_is_deferred_when_gradients_go_to_the_originator_only():
    part, _, w = middle("before")
    (message,) = part.collect(part.drain())
    assert not part.late
    assert part.complete
    assert w in part.gradients
    assert is_all(message.credit)


class Doubling(LastStep):
    """A last step over one leaf, which has to see that nothing else is left to do."""

    def __init__(self, leaf: ag.Tensor) -> None:
        self.leaves = [leaf.accumulator()]
        self.outputs = 1
        self.parents, self.shape, self.dtype, self.hooks = (), (), None, None

    def finish(self, grads, create_graph):
        return [grads[0] * 2]


@pytest.mark.parametrize("originator", ["before", "somebody else"])
def test_a_last_step_runs_when_everything_was_sent_and_nothing_is_awaited(originator):
    """It may block until a peer has gone on, so no peer may wait for this worker."""
    x, w = received(), ag.ones(2, requires_grad=True)
    part = Part(Doubling(w), 0, (2,), w.dtype)
    sends = {
        2: SendNode(2, "after", b"after", (part,)),
        3: SendNode(3, "after", b"after", (parent_of(x * 2),)),
    }
    home, here = worker(originator), worker("here")
    play = Pass((1, 7), home, here, Terms(), Topology(sends, {1: x._node.joint}))
    play.feed(worker("after"), [(2, [np.ones(2)], None)], None, ALL, 0)
    assert not [m for m in play.collect(play.drain()) if m.answers]
    assert not play.late, "an answer is missing"
    assert not play.complete
    play.feed(worker("after"), [(3, [np.ones((SIZE, SIZE), np.float32)], None)], None, ALL, 0)
    assert [m.name for m in play.collect(play.drain()) if m.answers] == ["before"]
    assert play.late
    assert not play.complete
    play.collect(play.drain_late())
    assert play.complete
    assert play.gradients[w].tolist() == [2, 2]


# ── across workers ──────────────────────────────────────────────────────────────────────────────

WEIGHTS = {f"worker{i}": matrix(i) for i in range(3)}


async def through(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    y = x @ WEIGHTS[ag.current_worker().name]
    return await ag.rpc_async(path[0], through, args=(y, path[1:])) if path else y


async def weight_gradient(context_id: int) -> np.ndarray:
    leaf = WEIGHTS[ag.current_worker().name]
    return ag.get_gradients(context_id)[leaf].numpy()


async def errors_here(context_id: int) -> str:
    try:
        return f"shown: {len(ag.get_gradients(context_id))}"
    except BackwardFailed as error:
        return type(error).__name__


@pytest.mark.parametrize("heavy", [False, True])
async def test_gradients_of_a_chain_with_deferred_work_are_exact(workers, monkeypatch, heavy):
    if heavy:
        monkeypatch.setattr("aiograd.dist.backward.plan.LONG", 0.0)
    deferring, drain_late = [], Pass.drain_late

    def noted(part):
        deferring.append(part.here.name)
        return drain_late(part)

    monkeypatch.setattr(Pass, "drain_late", noted)
    x = matrix(9)
    async with workers(3), ag.context() as ctx:
        y = await ag.rpc_async("worker0", through, args=(x, ["worker1", "worker2"]))
        await ctx.backward(y.sum())
        w = [each.numpy() for each in WEIGHTS.values()]
        one = np.ones((SIZE, SIZE), np.float32)
        assert near(ctx.gradients[x].numpy(), one @ w[2].T @ w[1].T @ w[0].T)
        inputs = [x.numpy(), x.numpy() @ w[0], x.numpy() @ w[0] @ w[1]]
        outputs = [one @ w[2].T @ w[1].T, one @ w[2].T, one]
        for i, (given, back) in enumerate(zip(inputs, outputs, strict=True)):
            found = await ag.rpc_async(f"worker{i}", weight_gradient, args=(ctx.id,))
            assert near(found, given.T @ back)
    assert sorted(deferring) == ["worker1", "worker2"], (
        "worker0 has a gradient for the originator only"
    )


@pytest.mark.parametrize("heavy", [False, True])
async def test_a_failure_in_deferred_work_fails_the_pass_everywhere(workers, monkeypatch, heavy):
    if heavy:
        monkeypatch.setattr("aiograd.dist.backward.plan.LONG", 0.0)
    run, weight = OpNode.run, WEIGHTS["worker1"].accumulator()

    def broken(self, grad, create_graph, retain, rules=None):
        if rules is not None and rules[0] is None and self.parents[1] is weight:
            raise ValueError("no memory for this one")
        return run(self, grad, create_graph, retain, rules)

    monkeypatch.setattr(OpNode, "run", broken)
    async with workers(3), ag.context() as ctx:
        y = await ag.rpc_async("worker0", through, args=(matrix(9), ["worker1", "worker2"]))
        with pytest.raises(BackwardFailed, match="no memory for this one") as caught:
            await ctx.backward(y.sum())
        assert caught.value.worker == "worker1"
        for i in range(3):
            found = await ag.rpc_async(f"worker{i}", errors_here, args=(ctx.id,))
            assert found == "BackwardFailed"
