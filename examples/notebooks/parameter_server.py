# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A parameter server in pictures
#
# A table of embeddings on two workers, trained by two others. One of them is killed on the way.
# Then: what it costs when trainers do not wait for each other, and how to bound it.

# %%
import asyncio

import numpy as np

import aiograd as ag

names = ["shard0", "shard1", "trainer0", "trainer1", "trainer2"]
cluster = await ag.LocalCluster(5, names=names)
table = await ag.nn.ShardedEmbeddingBag(["shard0", "shard1"], 200_000, 16)
table

# %% [markdown]
# A trainer draws bags of ids, few of them frequent and most of them rare, and learns which bags are
# good ones. It runs on its own worker and streams its losses to this notebook.


# %%
def batch(rng):
    rank = rng.zipf(1.3, (64, 8)) % 200_000
    return rank * 7919 % 200_000, ((rank % 2 == 0).mean(axis=1) > 0.5).astype(float)


async def train(table, seed, steps):
    rng = np.random.default_rng(seed)
    params = await table.remote_parameters()
    optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=4.0)
    for _ in range(steps):
        async with ag.context() as ctx:
            ids, label = batch(rng)
            score = (await table(ids)).sum(axis=1)
            loss = ag.nn.functional.binary_cross_entropy_with_logits(score, label)
            await ctx.backward(loss)
            await optimizer.step(ctx)
        yield float(loss)


async def follow(name, seed, steps, losses, victim=None):
    try:
        async for loss in ag.rpc_stream(name, train, args=(table, seed, steps)):
            losses.append(loss)
            if len(losses) == victim:
                await cluster.kill(name)
    except ag.errors.WorkerLost as error:
        print(f"after {len(losses)} steps: {type(error).__name__}: {error}")


# %% [markdown]
# Both train at once, on the same rows. `trainer1` is killed after 40 steps; `trainer0` goes on, and
# nothing of what they have learned is lost, because the table is elsewhere.

# %%
first, second = [], []
await asyncio.gather(
    follow("trainer0", 0, 120, first), follow("trainer1", 1, 120, second, victim=40)
)


def smooth(losses, window=10):
    return np.convolve(losses, np.ones(window) / window, mode="valid")


ag.viz.chart({"trainer0": smooth(first), "trainer1": smooth(second)}, y="loss")

# %% [markdown]
# Only rows that were used have a gradient. This is the size of one, and of the table.


# %%
def size_of_gradient(shard, ctx_id):
    gradient = ag.get_gradients(ctx_id)[shard.local_value().weight]
    return gradient.indices().data.nbytes + gradient.values().data.nbytes


async with ag.context() as ctx:
    await ctx.backward((await table(batch(np.random.default_rng(5))[0])).sum())
    shards = [(shard.on, shard.module_rref) for shard in table.shards]
    sizes = [await ag.rpc_async(on, size_of_gradient, (ref, ctx.id)) for on, ref in shards]
print(f"{sum(sizes) / 1e3:.0f} kB of {200_000 * 16 * 8 / 1e6:.0f} MB")

# %% [markdown]
# ## Stale gradients
#
# Trainers that do not wait apply gradients of values that others have changed meanwhile. Here is
# the smallest model in which that shows: one parameter, whose loss is half its square. A step of
# SGD with rate 0.6 takes it to 0.4 of what it was. Three trainers that all saw the same value take
# it three such steps at once, to −0.8 of it, and it swings.
#
# To make it so in every round, barriers keep the three together here.

# %%
await cluster.restart("trainer1")
TRAINERS = ["trainer0", "trainer1", "trainer2"]


def parameter():
    return ag.nn.Parameter(np.array([4.0]))


def half_square(param):
    return (param.local_value() ** 2).sum() / 2


async def pull(param, staleness, rounds):
    optimizer = await ag.optim.DistributedOptimizer(
        ag.optim.SGD, [param], lr=0.6, staleness=staleness
    )
    for _ in range(rounds):
        async with ag.context() as ctx:
            await ctx.backward(await ag.rpc_async(param.owner(), half_square, args=(param,)))
            await ag.barrier(TRAINERS)  # all of them have seen the same value
            try:
                await optimizer.step(ctx)
                refused = 0
            except ag.errors.StaleGradients:
                refused = 1
        await ag.barrier(TRAINERS)  # all of them have stepped, or been refused
        yield (await param).item(), refused


async def race(staleness, rounds=8):
    param = ag.remote("shard0", parameter)
    streams = [ag.rpc_stream(name, pull, args=(param, staleness, rounds)) for name in TRAINERS]
    values, refused = [4.0], 0
    for _ in range(rounds):
        ends = await asyncio.gather(*[anext(stream) for stream in streams])
        values.append(ends[0][0])
        refused += sum(no for _, no in ends)
    print(f"staleness={staleness}: {3 * rounds - refused} steps taken, {refused} refused")
    return values


free, bounded = await race(None), await race(0)
ag.viz.chart({"staleness=None": free, "staleness=0": bounded}, x="round", y="parameter")

# %% [markdown]
# With `staleness=0` a step whose values are not the newest is refused with `StaleGradients`, on all
# owners, and the trainer computes it again. Every step that is taken is then one that a single
# trainer could have taken. With 1, 2, … some age is allowed, and fewer steps are refused.

# %%
await cluster.close()
