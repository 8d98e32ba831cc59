"""The state machine of a pass under arbitrary programs, delays, losses and reordering."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from aiograd.autograd.graph import Node, Part
from aiograd.autograd.op import parent_of
from aiograd.autograd.ops.elementwise import add, multiply
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.dist.backward.loops import closes_loop
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.dist.backward.credit import ALL, NONE, is_all, together
from aiograd.dist.backward.state import Pass, Terms
from aiograd.dist.backward.plan import Topology
from aiograd.errors import GradError, WorkerLost
from aiograd.rpc.directory import PeerInfo

PROGRAMS = int(os.environ.get("AIOGRAD_EXAMPLES", "600"))


def worker(name: str, start: bytes | None = None) -> PeerInfo:
    return PeerInfo(name, int(name[1:]), name.encode() if start is None else start)


class World:
    """Workers with a tape each, and a network that delivers in any order it likes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = [f"w{i}" for i in range(self.random.randint(1, 4))]
        self.pool: dict[str, list[tuple[Tensor, dict[Tensor, int]]]] = {n: [] for n in self.names}
        self.sends: dict[str, dict[int, SendNode]] = {n: {} for n in self.names}
        self.receives: dict[str, dict[int, RecvNode]] = {n: {} for n in self.names}
        self.passes: dict[tuple[str, int], Pass] = {}
        self.truth: dict[int, dict[Tensor, int]] = {}
        self.started_by: dict[int, str] = {}
        self.over: dict[int, dict[Tensor, float]] = {}
        self.network: list[tuple] = []
        self.edges = 0
        for name in self.names:
            for _ in range(2):
                self.leaf(name)

    def leaf(self, name: str) -> None:
        leaf = Tensor(float(self.random.randint(1, 9)), requires_grad=True)
        self.pool[name].append((leaf, {leaf: 1}))

    def local(self, name: str) -> None:
        total, truth = None, {}
        for _ in range(self.random.randint(1, 3)):
            tensor, its_truth = self.random.choice(self.pool[name])
            factor = self.random.randint(-3, 3)
            term = multiply(tensor, float(factor))
            total = term if total is None else add(total, term)
            for leaf, n in its_truth.items():
                truth[leaf] = truth.get(leaf, 0) + factor * n
        self.pool[name].append((total, truth))

    def send(self, name: str) -> None:
        to = self.random.choice(self.names)
        items = [self.random.choice(self.pool[name]) for _ in range(self.random.randint(1, 2))]
        items = list({id(tensor): (tensor, truth) for tensor, truth in items}.values())
        self.edges += 1
        nodes = [parent_of(tensor) for tensor, _ in items]
        loops = sum(closes_loop(node, 1, to.encode()) << i for i, node in enumerate(nodes))
        node = SendNode(self.edges, to, to.encode(), tuple(nodes), loops)
        self.sends[name][self.edges] = node
        if self.random.random() < 0.9:  # the rest is lost or refused on the way
            self.network.append(("forward", name, to, self.edges, (items, loops)))

    def backward(self, name: str) -> None:
        number = len(self.truth)
        tensor, truth = self.random.choice(self.pool[name])
        self.truth[number], self.started_by[number] = truth, name
        root = parent_of(tensor)
        assert root is not None
        this = self.join(name, number, [root])
        this.start([(root, np.ones(()))])
        self.run(name, number)

    def join(self, name: str, number: int, roots: list[Node]) -> Pass:
        this = self.passes[name, number] = Pass(
            (1, number),
            worker(self.started_by[number]),
            worker(name),
            Terms(retain_graph=True),
            Topology(self.sends[name], self.receives[name], roots),
        )
        return this

    def run(self, name: str, number: int) -> None:
        this = self.passes[name, number]
        for message in this.collect(this.drain()):
            assert message.credit[0] > 0
            self.network.append(("gradients", name, message.name, number, (message, this.reached)))
        if this.over and name == self.started_by[number]:
            assert number not in self.over
            there = {n for n, joined in self.passes if joined == number}
            assert this.reached == sum(1 << int(n[1:]) for n in there)
            self.over[number] = {
                leaf: float(g)
                for (_, n), part in self.passes.items()
                if n == number
                for leaf, g in part.gradients.items()
            }

    def deliver(self) -> None:
        kind, sender, to, what, load = self.network.pop(self.random.randrange(len(self.network)))
        if kind == "forward":
            items, loops = load
            node = RecvNode(1, what, sender, sender.encode(), len(items), loops)
            self.receives[to][what] = node
            for index, (tensor, truth) in enumerate(items):
                part = Part(node, index, tensor.shape, tensor.dtype)
                self.pool[to].append((wrap(tensor.data.copy(), part), truth))
        else:
            if (to, what) not in self.passes:
                self.join(to, what, [])
            load, reached = load
            answers, expected, credit = load.answers, load.expected, load.credit
            self.passes[to, what].feed(worker(sender), answers, expected, credit, reached)
            self.run(to, what)

    def play(self) -> None:
        steps = self.random.randint(5, 120)
        starts = {self.random.randrange(steps) for _ in range(self.random.randint(1, 3))}
        for step in range(steps):
            if step in starts:
                self.backward(self.random.choice(self.names))
            dice = self.random.random()
            name = self.random.choice(self.names)
            if dice < 0.35:
                self.local(name)
            elif dice < 0.65:
                self.send(name)
            elif dice < 0.7:
                self.leaf(name)
            elif self.network:
                self.deliver()
        while self.network:
            self.deliver()


@pytest.mark.parametrize("block", range(10))
def test_random_programs_end_with_exact_gradients_and_all_credit_home(block: int) -> None:
    for seed in range(block * PROGRAMS // 10, (block + 1) * PROGRAMS // 10):
        world = World(seed)
        world.play()
        for number, truth in world.truth.items():
            assert number in world.over, f"seed {seed}: pass {number} did not end"
            assert world.over[number] == truth, f"seed {seed}"
        for (name, number), part in world.passes.items():
            assert part.complete, f"seed {seed}: {part.waits_for()} in pass {number} on {name}"


# ── by hand ─────────────────────────────────────────────────────────────────────────────────────


def part_of(
    sends: dict[int, SendNode], receives: dict[int, RecvNode], gone: tuple[bytes, ...] = ()
) -> Pass:
    """The part of w0 in a pass that w1 has begun."""
    topology = Topology(sends, receives, gone=gone)
    terms = Terms(retain_graph=True)
    return Pass((1, 0), worker("w1"), worker("w0"), terms, topology)


def sent(edge: int, peer: str, *tensors: Tensor) -> SendNode:
    return SendNode(edge, peer, peer.encode(), tuple(parent_of(tensor) for tensor in tensors))


def leaf() -> Tensor:
    return Tensor(1.0, requires_grad=True)


def test_an_answer_for_another_number_of_tensors_is_refused() -> None:
    this = part_of({7: sent(7, "w1", leaf(), leaf())}, {})
    with pytest.raises(GradError, match="w1 answered edge 7 with 1 gradients for 2 tensors"):
        this.feed(worker("w1"), [(7, [np.ones(())], None)], None, NONE, 0)
    assert not this.complete


@pytest.mark.parametrize(
    ("peer", "slot", "place"),
    [("w2", 0, 0), ("w1", 1, 0), ("w1", 0, 1)],
    ids=["received from another worker", "beyond the answer", "not of a loop"],
)
def test_an_answer_that_names_a_tensor_that_is_no_loop_is_refused(
    peer: str, slot: int, place: int
) -> None:
    receives = {
        8: RecvNode(1, 8, "w1", b"w1", 2, 0b01),
        9: RecvNode(1, 9, "w2", b"w2", 2, 0b01),
    }
    edge = 8 if peer == "w1" else 9
    this = part_of({7: sent(7, "w1", leaf())}, receives)
    with pytest.raises(GradError, match="w1 answered edge 7 with no loop"):
        this.feed(worker("w1"), [(7, [None], [(slot, edge, place)])], None, NONE, 0)


def test_an_answer_that_names_a_loop_is_taken() -> None:
    receives = {8: RecvNode(1, 8, "w1", b"w1", 2, 0b01)}
    this = part_of({7: sent(7, "w1", leaf())}, receives)
    this.feed(worker("w1"), [(7, [None], [(0, 8, 0)])], None, ALL, 0)
    this.collect(this.drain())
    assert this.complete


def test_a_peer_that_has_sent_a_message_is_not_invited() -> None:
    sends = {7: sent(7, "w1", leaf()), 8: sent(8, "w2", leaf())}
    this = part_of(sends, {})
    this.feed(worker("w1"), [], None, ALL, 0)
    invited = {message.to: message.invites for message in this.collect(this.drain())}
    assert invited == {b"w1": False, b"w2": True}


def test_edges_to_a_dead_worker_do_not_hold_up_gradients_for_others() -> None:
    x = leaf()
    y = multiply(x, 3.0)
    this = part_of({7: sent(7, "w1", y), 8: sent(8, "w2", y)}, {}, gone=(b"w2",))
    this.feed(worker("w1"), [(7, [np.ones(())], None)], None, ALL, 0)
    this.collect(this.drain())
    assert this.gradients == {x: 3.0}
    assert this.complete


def received(edge: int, peer: str, context: int = 1) -> RecvNode:
    return RecvNode(context, edge, peer, peer.encode(), 1)


def test_a_gradient_for_a_tensor_of_another_context_fails_the_pass_and_none_does_not() -> None:
    node = received(8, "w2", context=5)
    this = part_of({}, {})
    assert [message.to for message in this.collect([(node, None)])] == [b"w1"]  # nothing to w2
    with pytest.raises(GradError, match="received in context 5; a graph must not cross contexts"):
        this.collect([(node, [np.ones(())])])


def test_a_gradient_for_the_dead_fails_the_pass_and_none_does_not() -> None:
    node = received(8, "w2")
    this = part_of({}, {8: node}, gone=(b"w2",))
    assert [message.to for message in this.collect([])] == [b"w1"]  # nothing to w2
    with pytest.raises(WorkerLost, match="it died before the backward pass"):
        this.collect([(node, [np.ones(())])])


def test_a_pass_describes_which_peers_owe_how_many_answers() -> None:
    this = part_of({edge: sent(edge, f"w{edge % 2 + 1}", leaf()) for edge in (2, 3, 4)}, {})
    assert this.waits_for() == "w0 waits for 2 edges of w1, 1 edges of w2"
    this.feed(worker("w1"), [(2, None, None), (4, None, None)], None, ALL, 0)
    this.feed(worker("w2"), [(3, None, None)], None, NONE, 0)
    assert this.waits_for() == "w0 waits for nobody"


def test_a_peer_is_invited_by_the_first_message_only() -> None:
    this = part_of({7: sent(7, "w2", leaf())}, {})
    this.feed(worker("w1"), [], None, ALL, 0)
    (first,) = this.collect(this.drain())
    assert (first.to, first.invites, first.expected) == (b"w2", True, [7])
    assert this.informed == {b"w2": "w2"}
    this.feed(worker("w1"), [], [9], NONE, 0)
    this.feed(worker("w2"), [], [10], NONE, 0)
    assert [message.invites for message in this.collect(this.drain())] == [False, False]


def test_a_gradient_for_an_edge_that_is_not_awaited_fails_the_pass_and_none_does_not() -> None:
    this = part_of({7: sent(7, "w1", leaf())}, {})
    this.feed(worker("w1"), [(99, None, None), (98, [None], None)], None, ALL, 0)
    with pytest.raises(GradError, match="edge 99, which w0 does not await"):
        this.feed(worker("w1"), [(99, [np.ones(())], None)], None, NONE, 0)


def test_an_answer_of_another_incarnation_is_no_answer() -> None:
    """A worker that was restarted under its name knows nothing of its predecessor's edges."""
    this = part_of({7: sent(7, "w1", leaf())}, {8: received(8, "w1")})
    successor = worker("w1", b"another start")
    this.feed(successor, [(7, None, None)], [8], NONE, 0)
    assert 7 in this.awaited
    (first, second) = this.collect(this.drain())
    assert {first.to, second.to} == {b"w1", b"another start"}
    with pytest.raises(GradError, match="does not await"):
        this.feed(successor, [(7, [np.ones(())], None)], None, NONE, 0)


def test_a_pass_names_the_incarnations_it_has_edges_or_messages_with() -> None:
    this = part_of({7: sent(7, "w1", leaf())}, {8: received(8, "w2")}, gone=(b"w4",))
    assert this.names(b"w1")
    assert this.names(b"w2")
    assert not this.names(b"w3")
    assert not this.names(b"w4")
    this.feed(worker("w3"), [], None, NONE, 0)
    assert this.names(b"w3")
