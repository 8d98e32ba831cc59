"""A table of embeddings, sharded and trained row by row; it outlives a trainer and a restart.
`--full` makes it a table of 4 million rows, a gigabyte."""

import asyncio
import sys
import tempfile

import numpy as np
from bags_of_ids import batch, bytes_of_gradient

import aiograd as ag

FULL = "--full" in sys.argv
SHARDS, ROWS, WIDTH, STEPS = (4, 4_000_000, 64, 150) if FULL else (2, 1_000_000, 16, 60)
NAMES = [f"shard{i}" for i in range(SHARDS)] + ["trainer0", "trainer1"]


async def loss_of(table, rng):
    """Every shard adds up its rows of each bag: sums are sent, the table stays."""
    ids, label = batch(rng, ROWS)
    score = (await table(ids)).sum(axis=1)
    return ag.nn.functional.binary_cross_entropy_with_logits(score, label)


async def train(table, seed):
    """Runs on a trainer: its own contexts and steps, on a table that it shares with others."""
    rng = np.random.default_rng(seed)
    params = await table.remote_parameters()
    optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=4.0)
    for _ in range(STEPS):
        async with ag.context() as ctx:
            await ctx.backward(await loss_of(table, rng))
            await optimizer.step(ctx)


async def evaluate(table):
    rng = np.random.default_rng(99)
    return np.mean([float(await loss_of(table, rng)) for _ in range(10)])


def make_table():
    return ag.nn.ShardedEmbeddingBag(NAMES[:SHARDS], ROWS, WIDTH, dtype=np.float32)


async def main(folder):
    async with ag.LocalCluster(len(NAMES), names=NAMES) as cluster:
        table = await make_table()
        async with ag.context() as ctx:
            await ctx.backward(await loss_of(table, np.random.default_rng(1)))
            sparse, dense = await bytes_of_gradient(table, ctx), ROWS * WIDTH * 4
        print(f"the gradient of one step: {sparse / 1e3:.1f} kB of rows, not {dense / 1e6:.0f} MB")
        print(f"({dense / sparse:,.0f} times less)\n\nbefore    loss {await evaluate(table):.4f}")

        trainers = NAMES[SHARDS:]
        for number in (bar := ag.progress(range(4), "rounds")):
            jobs = [cluster[t].call(train, table, [number, i]) for i, t in enumerate(trainers)]
            if number == 1:
                await cluster.kill("trainer1")
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            for error in filter(None, ends):
                bar.say(f"          {type(error).__name__}: {error}")
            trainers = [t for t, end in zip(trainers, ends, strict=True) if end is None]
            loss = await evaluate(table)
            bar.say(f"round {number + 1}   loss {loss:.4f}   trainers: {', '.join(trainers)}")
        await table.save(folder)

    async with ag.LocalCluster(SHARDS, names=NAMES[:SHARDS]):
        table = await make_table()
        await table.load(folder)
        again = await evaluate(table)
    print(f"\nsaved, all restarted: loss {again:.4f}, to the last bit the same: {again == loss}")
    assert again == loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(main(place))
