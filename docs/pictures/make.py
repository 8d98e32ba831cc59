"""Draw the pictures of the documentation again: real graphs of real calls, on workers in this loop.

python docs/pictures/make.py
"""

import asyncio
from pathlib import Path

import numpy as np

import aiograd as ag
from aiograd.viz import Graph, GraphEdge, GraphNode

HERE = Path(__file__).parent


def one_layer(x, w):
    return ag.tanh(x @ w)


async def two_layers(x, w1, w2):
    return await ag.rpc_async("worker1", one_layer, args=(one_layer(x, w1), w2))


def data():
    rng = np.random.default_rng(0)
    sizes = [(32, 8), (8, 16), (16, 4)]
    x, w1, w2 = (ag.tensor(rng.standard_normal(size)) for size in sizes)
    return x, w1.requires_grad_(), w2.requires_grad_()


def write(name, graph):
    (HERE / name).write_text(Graph(graph.nodes, graph.edges).svg + "\n")


async def one_call():
    x, w1, _ = data()
    async with ag.context() as ctx:
        y = await ag.rpc_async("worker0", one_layer, args=(x, w1))
        await ctx.backward((y * y).mean())
        write("one_call.svg", await ctx.graph())


async def two_hops():
    x, w1, w2 = data()
    async with ag.context() as ctx:
        y = await ag.rpc_async("worker0", two_layers, args=(x, w1, w2))
        await ctx.backward((y * y).mean())
        write("two_hops.svg", await ctx.graph())


async def fan_out():
    x, w1, _ = data()
    async with ag.context() as ctx:
        halves = [
            ag.rpc_async(f"worker{n}", one_layer, args=(x[16 * n : 16 * n + 16], w1))
            for n in range(2)
        ]
        y = ag.concatenate(await asyncio.gather(*halves))
        await ctx.backward((y * y).mean())
        write("fan_out.svg", await ctx.graph())


def reference():
    """Who holds what, when a reference went from the driver to a third worker."""
    nodes = [
        GraphNode("d", "RRef", "made by remote()", "op", "driver"),
        GraphNode("v", "value", "40 MB", "root", "worker0 (owner)"),
        GraphNode("u", "RRef", "an argument", "op", "worker1"),
    ]
    edges = [
        GraphEdge("d", "v", "holds", crossing=True),
        GraphEdge("u", "v", "holds", crossing=True),
    ]
    write("reference.svg", Graph(nodes, edges))


async def main():
    async with ag.LocalCluster(2, processes=False):
        await one_call()
        await two_hops()
        await fan_out()
    reference()


if __name__ == "__main__":
    asyncio.run(main())
