"""The picture of a context: one lane per worker, joined from the parts of all."""

from __future__ import annotations

import aiograd as ag


def double(x: ag.Tensor) -> ag.Tensor:
    return x * 2.0


async def through(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    return await ag.rpc_async(path[0], through, args=(x, path[1:])) if path else double(x)


def lanes(graph) -> set[str]:
    return {node.worker for node in graph.nodes}


async def test_at_once_a_picture_shows_this_worker_and_the_other_ends_of_its_edges(workers):
    async with workers(2), ag.context() as ctx:
        await through(ag.tensor([1.0], requires_grad=True), ["worker0", "worker1"])
        graph = ctx.graph()
        assert lanes(graph) == {"driver", "worker0"}
        assert sum(edge.crossing for edge in graph.edges) == 2


async def test_awaited_a_picture_shows_every_worker_that_the_context_reached(workers):
    async with workers(2), ag.context() as ctx:
        await through(ag.tensor([1.0], requires_grad=True), ["worker0", "worker1"])
        graph = await ctx.graph()
        assert lanes(graph) == {"driver", "worker0", "worker1"}
        assert sum(edge.crossing for edge in graph.edges) == 4
        assert "multiply" in {node.label for node in graph.nodes if node.worker == "worker1"}


async def test_a_worker_that_does_not_answer_leaves_a_picture_of_the_rest(workers):
    async with workers(1) as cluster, ag.context() as ctx:
        await through(ag.tensor([1.0], requires_grad=True), ["worker0"])
        cluster.driver.faults = ag.testing.Faults(fail=["context.graph"])
        graph = await ctx.graph()
        assert lanes(graph) == {"driver", "worker0"}
        assert all(node.kind in ("send", "recv") for node in graph.nodes if node.worker == "worker0")
