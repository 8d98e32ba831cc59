"""A table of embeddings, sharded and trained row by row; it outlives a trainer and a restart."""

import asyncio
import pathlib
import tempfile

import numpy as np

import aiograd as ag

ROWS, WIDTH, BAG, BATCH = 1_000_000, 16, 8, 64  # rows of the whole table, half of them per shard
ROUNDS, STEPS = 4, 60
NAMES = ["shard0", "shard1", "trainer0", "trainer1"]


def batch(rng):
    """Bags of ids, few of them frequent and most of them rare. Every other id is a good one."""
    rank = rng.zipf(1.3, (BATCH, BAG)) % ROWS
    return rank * 7919 % ROWS, ((rank % 2 == 0).mean(axis=1) > 0.5).astype(float)


async def loss_of(shards, ids, label):
    """Every shard adds up the rows it has of each bag: sums travel, and the table stays."""
    sums = []
    for number, shard in enumerate(shards):
        mine = ids % len(shards) == number
        ends = mine.sum(axis=1).cumsum()
        sums.append(shard(ids[mine] // len(shards), np.concatenate([[0], ends[:-1]])))
    score = sum(await asyncio.gather(*sums)).sum(axis=1) / BAG
    return ag.nn.functional.binary_cross_entropy_with_logits(score, label)


async def train(shards, seed):
    """Runs on a trainer: its own contexts and steps, on shards that it shares with others."""
    rng = np.random.default_rng(seed)
    params = [p for shard in shards for p in await shard.remote_parameters()]
    optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=4.0)
    for _ in range(STEPS):
        async with ag.context() as ctx:
            await ctx.backward(await loss_of(shards, *batch(rng)))
            await optimizer.step(ctx)


async def evaluate(shards):
    rng = np.random.default_rng(99)
    return np.mean([float(await loss_of(shards, *batch(rng))) for _ in range(10)])


def bytes_of_gradient(shard, ctx_id):
    weight = shard.local_value().weight
    gradient = ag.get_gradients(ctx_id)[weight]
    return gradient.indices().data.nbytes + gradient.values().data.nbytes, weight.data.nbytes


def save(shard, path):
    ag.save(path, shard.local_value().state_dict())


def load(shard, path):
    shard.local_value().load_state_dict(ag.load(path))


def make_shards():
    size, kwargs = (ROWS // 2, WIDTH), {"mode": "sum", "sparse": True}
    return [ag.nn.RemoteModule(name, ag.nn.EmbeddingBag, size, kwargs) for name in NAMES[:2]]


async def on_shards(shards, func, *args):
    calls = [
        ag.rpc_async(s.on, func, (s.module_rref, *a)) for s, *a in zip(shards, *args, strict=True)
    ]
    return await asyncio.gather(*calls)


async def main(folder):
    files = [folder / f"{name}.npz" for name in NAMES[:2]]
    async with ag.LocalCluster(4, names=NAMES) as cluster:
        shards = make_shards()
        async with ag.context() as ctx:
            await ctx.backward(await loss_of(shards, *batch(np.random.default_rng(1))))
            sparse, dense = np.sum(await on_shards(shards, bytes_of_gradient, [ctx.id] * 2), axis=0)
        print(f"the gradient of one step: {sparse / 1e3:.1f} kB of rows, not {dense / 1e6:.0f} MB")
        print(f"({dense / sparse:,.0f} times less)\n\nbefore    loss {await evaluate(shards):.4f}")

        trainers = NAMES[2:]
        for number in range(ROUNDS):
            jobs = [cluster[t].call(train, shards, [number, i]) for i, t in enumerate(trainers)]
            if number == 1:
                await cluster.kill("trainer1")
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            for error in filter(None, ends):
                print(f"          {type(error).__name__}: {error}")
            trainers = [t for t, end in zip(trainers, ends, strict=True) if end is None]
            loss = await evaluate(shards)
            print(f"round {number + 1}   loss {loss:.4f}   trainers: {', '.join(trainers)}")
        await on_shards(shards, save, files)

    async with ag.LocalCluster(4, names=NAMES):
        shards = make_shards()
        await on_shards(shards, load, files)
        again = await evaluate(shards)
        print(
            f"\nsaved, all restarted: loss {again:.4f}, to the last bit the same: {again == loss}"
        )
        assert again == loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(main(pathlib.Path(place)))
