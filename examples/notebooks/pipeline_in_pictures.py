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
# # A pipeline in pictures
#
# A model in four stages, one per worker. The same training step in three ways, and when each was
# busy. A short pause stands for the work of a larger model, so that the picture does not depend on
# how many cores this machine has.

# %%
import asyncio
import threading
import time

import numpy as np

import aiograd as ag
from aiograd.viz import Span, timeline

cluster = await ag.LocalCluster(4)
cluster

# %% [markdown]
# A stage does one thing at a time, and writes down when. With `recompute=True` it runs again in
# the backward pass instead of keeping its graph, so each micro-batch appears twice in each stage.


# %%
class Stage(ag.nn.Module):
    def __init__(self, seed, pace):
        super().__init__()
        self.layer = ag.nn.Linear(16, 16, generator=np.random.default_rng(seed))
        self.pace, self.machine, self.busy = pace, threading.Lock(), []

    def forward(self, x):
        with self.machine:
            start = time.time()
            time.sleep(self.pace)
            self.busy.append((start, time.time()))
        return ag.tanh(self.layer(x))


def take_notes(stage):
    module = stage.local_value()
    busy, module.busy = module.busy, []
    return busy


paces = [0.01, 0.01, 0.02, 0.01]
stages = [
    await ag.nn.RemoteModule(f"worker{i}", Stage, args=(i, pace)) for i, pace in enumerate(paces)
]
x, target = np.random.default_rng(0).standard_normal((2, 64, 16))


def loss(y, t):
    return ((y - t) ** 2).mean()


async def train(batches, **how):
    pipe = ag.nn.Pipeline(stages, recompute=True, **how)
    start = time.perf_counter()
    async with ag.context():
        for part, wanted in batches:
            await pipe.train_step(part, wanted, loss)
    seconds = time.perf_counter() - start
    notes = await asyncio.gather(
        *[ag.rpc_async(s.on, take_notes, (s.module_rref,)) for s in stages]
    )
    spans = [Span(s.on, "", *span) for s, busy in zip(stages, notes) for span in busy]
    print(f"{seconds:.2f} s")
    return timeline(spans)


parts = list(zip(np.split(x, 8), np.split(target, 8)))
_ = await train(parts[:1], microbatches=1)  # the first call of everything is slower

# %% [markdown]
# ## One after another
#
# Eight micro-batches; each goes through all stages and back before the next one starts. At any time
# one worker works and three wait.

# %%
await train(parts, microbatches=1)

# %% [markdown]
# ## All forward, then all back
#
# The schedule `"gpipe"`: micro-batches follow each other closely. The way back is one pass for all
# of them, and every stage must remember all eight until it begins.

# %%
await train([(x, target)], schedule="gpipe", microbatches=8)

# %% [markdown]
# ## One forward, one back
#
# The schedule `"1f1b"`: a micro-batch turns back as soon as its loss is known, and at most as many
# are under way as there are stages. The slow stage is busy nearly all the time, which is the best
# that any schedule can do, and no stage ever remembers more than four micro-batches.

# %%
await train([(x, target)], schedule="1f1b", microbatches=8)

# %%
await cluster.close()
