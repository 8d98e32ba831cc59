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
# # Split learning in pictures
#
# A clinic and a lab know different columns about the same patients; a registry knows how each
# patient fared. They train one model together, and columns and labels stay where they are. How much
# noise can the parties put on what they send?

# %%
import asyncio

import numpy as np

import aiograd as ag

cluster = await ag.LocalCluster(2, names=["clinic", "lab"])
ROWS, TRAIN = 1200, 800


def table():
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((ROWS, 10))
    hidden = np.tanh(columns[:, :5] @ rng.standard_normal((5, 3)))
    score = (hidden * np.tanh(columns[:, 5:] @ rng.standard_normal((5, 3)))).sum(axis=1)
    return {"clinic": columns[:, :5], "lab": columns[:, 5:]}, (score > 0).astype(float)


# %% [markdown]
# A party lives on its own worker and keeps its columns, its part of the model and its optimiser.
# `cross` is called for every array that leaves it, and what it returns is sent.


# %%
class Party:
    def __init__(self, noise):
        self.columns = table()[0][ag.get_worker_info().name]
        self.rng, self.noise, self.sent = np.random.default_rng(7), noise, set()
        first = ag.nn.Linear(5, 8, generator=self.rng)
        second = ag.nn.Linear(8, 4, generator=self.rng)
        self.net = ag.nn.Sequential(first, ag.nn.Tanh(), second)
        self.optimizer = ag.optim.Adam(self.net.parameters(), lr=0.02)

    def embed(self, rows):
        ag.current_context().on_crossing(self.cross)
        return ag.tanh(
            self.net(self.columns[rows])
        )  # between −1 and 1; the noise is measured by that

    def cross(self, crossing, array):
        self.sent.add(array.shape)
        return array + self.noise * self.rng.standard_normal(array.shape)

    def learn(self, ctx_id):
        self.optimizer.step(ag.get_gradients(ctx_id))

    def what_left(self):
        return self.sent


class Registry:
    """The label owner, which is this notebook."""

    def __init__(self, noise):
        rng = np.random.default_rng(3)
        layers = ag.nn.Linear(8, 16, generator=rng), ag.nn.Linear(16, 1, generator=rng)
        self.net = ag.nn.Sequential(layers[0], ag.nn.Tanh(), layers[1])
        self.optimizer = ag.optim.Adam(self.net.parameters(), lr=0.02)
        self.label = table()[1]
        self.parties = [ag.remote(name, Party, args=(noise,)) for name in ("clinic", "lab")]

    async def score(self, rows):
        parts = await asyncio.gather(*[p.rpc_async().embed(rows) for p in self.parties])
        return self.net(ag.concatenate(parts, axis=1))[:, 0]

    async def loss(self, rows):
        score = await self.score(rows)
        return ag.nn.functional.binary_cross_entropy_with_logits(score, self.label[rows])


# %% [markdown]
# ## One step, drawn
#
# The registry asks both for embeddings of the same rows and puts its own layers on top. Gradients
# go back along the dashed arrows. No arrow carries a column or a label.

# %%
registry = Registry(noise=0.1)
async with ag.context() as ctx:
    await ctx.backward(await registry.loss(np.arange(TRAIN)), retain_graph=True)
    picture = await ctx.graph()
picture

# %% [markdown]
# ## Noise and what it costs


# %%
async def train(noise, steps=80):
    registry, losses = Registry(noise), []
    for _ in range(steps):
        async with ag.context() as ctx:
            loss = await registry.loss(np.arange(TRAIN))
            await ctx.backward(loss)
            registry.optimizer.step(ctx.gradients)
            await asyncio.gather(*[p.rpc_async().learn(ctx.id) for p in registry.parties])
        losses.append(float(loss))
    async with ag.context():
        score = await registry.score(np.arange(TRAIN, ROWS))
    return losses, np.mean((score.numpy() > 0) == (registry.label[TRAIN:] > 0.5))


levels = [0.0, 0.1, 0.3, 1.0]
runs = {noise: await train(noise) for noise in levels}
ag.viz.chart({f"noise {noise}": losses for noise, (losses, _) in runs.items()}, y="loss")

# %% [markdown]
# On rows that were not used for training:

# %%
for noise, (_, right) in runs.items():
    print(f"noise {noise}: {right:.0%} right")

# %% [markdown]
# What left the clinic in that one step: four numbers per row.

# %%
print(await registry.parties[0].rpc_async().what_left())

# %% [markdown]
# Here the parties trust each other with code: this notebook sent them theirs. Where they do not,
# the mode `"restricted"` limits partners to exposed functions and plain data, and each of them
# shares a secret with the registry that the other one does not know:
# `Options(secret_file={"registry": "clinic.key"})`. `examples/05_split_learning.py` is this
# model in three such processes, with a log of every byte that a party sends.

# %%
await cluster.close()
