"""A table of embeddings, sharded and trained row by row; it outlives a trainer and a restart.

`--full` makes it a table of 4 million rows, a gigabyte.
"""

import asyncio
import sys
import tempfile

import numpy as np

import aiograd as ag

FULL = "--full" in sys.argv
SHARDS, ROWS, WIDTH, STEPS = (4, 4_000_000, 64, 150) if FULL else (2, 1_000_000, 16, 60)
BATCH, BAG, ROUNDS = 64, 8, 4
NAMES = [f"shard{i}" for i in range(SHARDS)] + ["trainer0", "trainer1"]


def batch(rng):
    """Bags of ids, few of them frequent and most of them rare. Every other id is a good one."""
    rank = rng.zipf(1.3, (BATCH, BAG)) % ROWS
    return rank * 7919 % ROWS, ((rank % 2 == 0).mean(axis=1) > 0.5).astype(np.float32)


async def loss_of(table, ids, label):
    """Every shard adds up the rows it has of each bag: sums travel, and the table stays."""
    score = (await table(ids)).sum(axis=1)
    return ag.nn.functional.binary_cross_entropy_with_logits(score, label)


async def train(table, seed):
    """Runs on a trainer: its own contexts and steps, on a table that it shares with others."""
    rng = np.random.default_rng(seed)
    params = await table.remote_parameters()
    optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=4.0)
    for _ in range(STEPS):
        async with ag.context() as ctx:
            await ctx.backward(await loss_of(table, *batch(rng)))
            await optimizer.step(ctx)


async def evaluate(table):
    rng = np.random.default_rng(99)
    return np.mean([float(await loss_of(table, *batch(rng))) for _ in range(10)])


def bytes_of_gradient(shard, ctx_id):
    gradient = ag.get_gradients(ctx_id)[shard.local_value().weight]
    return gradient.indices().data.nbytes + gradient.values().data.nbytes


def make_table():
    return ag.nn.ShardedEmbeddingBag(NAMES[:SHARDS], ROWS, WIDTH, dtype=np.float32)


async def main(folder):
    async with ag.LocalCluster(len(NAMES), names=NAMES) as cluster:
        table = await make_table()
        async with ag.context() as ctx:
            await ctx.backward(await loss_of(table, *batch(np.random.default_rng(1))))
            shards = [(shard.on, shard.module_rref) for shard in table.shards]
            sizes = [await ag.rpc_async(on, bytes_of_gradient, (s, ctx.id)) for on, s in shards]
            sparse, dense = sum(sizes), ROWS * WIDTH * 4
        print(f"the gradient of one step: {sparse / 1e3:.1f} kB of rows, not {dense / 1e6:.0f} MB")
        print(f"({dense / sparse:,.0f} times less)\n\nbefore    loss {await evaluate(table):.4f}")

        trainers = NAMES[SHARDS:]
        for number in range(ROUNDS):
            jobs = [cluster[t].call(train, table, [number, i]) for i, t in enumerate(trainers)]
            if number == 1:
                await cluster.kill("trainer1")
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            for error in filter(None, ends):
                print(f"          {type(error).__name__}: {error}")
            trainers = [t for t, end in zip(trainers, ends, strict=True) if end is None]
            loss = await evaluate(table)
            print(f"round {number + 1}   loss {loss:.4f}   trainers: {', '.join(trainers)}")
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
