"""The distributed graph as a picture: one lane per worker, and edges between them.

The tensors that crossed an edge are written in its Send box, where no line passes.

Each worker describes its own part; `await ctx.graph()` asks every worker the context reached
and joins the parts. Without `await` the picture shows this worker's part, and of its peers only
the other ends of its edges.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from typing import Any, Protocol

from aiograd.autograd.graph import Accumulate, Joint, Node, Part
from aiograd.dist.channel import Channel
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.viz import Graph, GraphEdge, GraphNode

SERVICE = "context.graph"
ASK_WAIT = 5.0  # seconds a worker gets to describe its part


class ContextPart(Protocol):
    """What a picture shows of one worker's part of a context."""

    id: int
    roots: list[Node]
    sends: dict[int, SendNode]
    receives: dict[int, RecvNode]
    seconds: float

    @property
    def channel(self) -> Channel:
        """The way to the workers that hold the other parts."""

    @property
    def peers(self) -> set[str]:
        """The names of workers that hold other parts."""


class ContextGraph(Graph):
    """The picture of a context; `await` it to see the parts of all workers."""

    context: ContextPart

    def __await__(self) -> Generator[Any, None, Graph]:
        return collect(self.context).__await__()


def picture(context: ContextPart) -> ContextGraph:
    """Draw this worker's part, at once."""
    made = ContextGraph(*_joined([describe(context)]), title=f"context {context.id}")
    # A Graph is a frozen dataclass: what it shows does not change after it was made.
    object.__setattr__(made, "context", context)
    return made


async def collect(context: ContextPart) -> Graph:
    """Ask every worker that the context reached for its part, and join them.

    A worker that does not answer in time gets an empty lane: a picture of the rest is worth more than
    an error.
    """
    channel = context.channel
    parts = {channel.name: describe(context)}
    waiting = set(parts[channel.name]["peers"]) - parts.keys()
    # Each part names further workers: nobody knows all that the context reached.
    while waiting:
        names = sorted(waiting)
        answers = await asyncio.gather(
            *[channel.ask(name, SERVICE, context.id, timeout=ASK_WAIT) for name in names],
            return_exceptions=True,
        )
        for name, answer in zip(names, answers, strict=True):
            parts[name] = answer if isinstance(answer, dict) else nothing(name)
        waiting = {peer for part in parts.values() for peer in part["peers"]} - parts.keys()
    times = [f"{name} {part['seconds'] * 1e3:.1f} ms" for name, part in parts.items()]
    spent = " · backward: " + ", ".join(times) if any(p["seconds"] for p in parts.values()) else ""
    return Graph(*_joined(list(parts.values())), title=f"context {context.id}{spent}")


def nothing(name: str) -> dict[str, Any]:
    """Return the part of a worker that has none, or did not answer."""
    return {"worker": name, "nodes": [], "edges": [], "crossings": [], "peers": [], "seconds": 0.0}


def describe(context: ContextPart) -> dict[str, Any]:
    """Return this worker's part of a context as plain data, for any peer to draw."""
    worker = context.channel.name
    nodes: list[tuple[str, str, str, str]] = []
    edges: list[tuple[str, str]] = []
    crossings: list[tuple[int, str, str]] = []
    seen: set[Node] = set()
    # From all ends of edges: parts of the graph that no root depends on are shown, too.
    stack: list[Node] = [*context.roots, *context.sends.values(), *context.receives.values()]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        label = _label(node)
        nodes.append((_key(worker, node), label, _detail(node), _kind(node, context)))
        for parent, _ in node.next_nodes:
            edges.append((_key(worker, parent), _key(worker, node)))
            stack.append(parent)
        # Both workers describe an edge. The picture needs one of them, if the other is gone.
        if isinstance(node, SendNode):
            crossings.append((node.edge, worker, node.peer))
        elif isinstance(node, RecvNode):
            crossings.append((node.edge, node.peer, worker))
    peers = context.peers | {c[1] for c in crossings}
    return {
        "worker": worker,
        "nodes": nodes,
        "edges": edges,
        "crossings": crossings,
        "peers": sorted(peers | {c[2] for c in crossings}),
        "seconds": context.seconds,
    }


def _joined(parts: list[dict[str, Any]]) -> tuple[list[GraphNode], list[GraphEdge]]:
    nodes: dict[str, GraphNode] = {}
    edges: dict[tuple[str, str], GraphEdge] = {}
    ends: dict[int, tuple[str, str]] = {}  # edge → sender and receiver
    for part in parts:
        for key, label, detail, kind in part["nodes"]:
            nodes[key] = GraphNode(key, label, detail, kind, part["worker"])
        for source, target in part["edges"]:
            edges[source, target] = GraphEdge(source, target)
        for edge, sender, receiver in part["crossings"]:
            ends[edge] = (sender, receiver)
    # Both ends of an edge have keys made of its id, so that two parts agree on them. An end whose
    # worker did not answer is drawn from what the other end says.
    for edge, (sender, receiver) in ends.items():
        send, recv = f"send {edge}", f"recv {edge}"
        nodes.setdefault(send, GraphNode(send, "Send", "", "send", sender))
        nodes.setdefault(recv, GraphNode(recv, "Recv", "", "recv", receiver))
        edges[send, recv] = GraphEdge(send, recv, crossing=sender != receiver)
    return list(nodes.values()), list(edges.values())


def _key(worker: str, node: Node) -> str:
    if isinstance(node, SendNode):
        return f"send {node.edge}"
    if isinstance(node, RecvNode):
        return f"recv {node.edge}"
    # Unlike the ends of edges, other nodes are named by their own worker only, so any id will do.
    return f"{worker} {hash(node):x}"


def _label(node: Node) -> str:
    if isinstance(node, Part):
        return "result"  # of a call, and nothing was done with it here
    return "leaf" if isinstance(node, Accumulate) else node.name


def _kind(node: Node, context: ContextPart) -> str:
    if isinstance(node, Accumulate):
        return "leaf"
    if isinstance(node, SendNode):
        return "send"
    if isinstance(node, RecvNode):
        return "recv"
    return "root" if node in context.roots else "op"


def _detail(node: Node) -> str:
    if isinstance(node, SendNode):
        return _load(node)
    if isinstance(node, Joint):
        return ""
    return " × ".join(map(str, node.shape)) if node.shape else "scalar"


def _load(node: SendNode) -> str:
    """The shapes an edge carried, and their size in bytes."""
    parents = [parent for parent in node.parents if parent is not None]
    shapes = ", ".join("×".join(map(str, p.shape)) if p.shape else "scalar" for p in parents)
    size = sum(math.prod(p.shape) * p.dtype.itemsize for p in parents)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{shapes} · {size:.4g} {unit}"
        size /= 1024
    return f"{shapes} · {size:.4g} GiB"
