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
# # Learning to adapt, in pictures
#
# Four workers have a sine wave each, which never leaves them. We look for weights from which *one*
# step of learning fits any of them: the gradient that leads there goes through the gradient of that
# step, across workers (MAML, of second order).

# %%
import asyncio

import numpy as np

import aiograd as ag

cluster = await ag.LocalCluster(4)
RATE = 0.05  # of the one step


def wave(task, x):
    return (0.5 + task) * np.sin(x + 0.8 * task)


def forward(weights, x):
    w1, b1, w2, b2 = weights
    return ag.tanh(x @ w1 + b1) @ w2 + b2


def loss_of(weights, task, part):
    x = np.random.default_rng([int(10 * task), part]).uniform(-3, 3, (20, 1))
    return ((forward(weights, x) - wave(task, x)) ** 2).mean()


# %% [markdown]
# `ag.grad(…, create_graph=True)` gives a gradient that is itself part of the graph, although half
# of that graph is on another worker.


# %%
async def adapted(weights, task):
    before = await ag.rpc_async(f"worker{task}", loss_of, args=(weights, task, 0))
    slopes = await ag.grad(before, weights, create_graph=True)
    moved = [w - RATE * g for w, g in zip(weights, slopes)]
    return before, await ag.rpc_async(f"worker{task}", loss_of, args=(moved, task, 1))


rng = np.random.default_rng(0)
shapes = [(1, 32), (32,), (32, 1), (1,)]
weights = [ag.tensor(rng.standard_normal(s) * 0.5, requires_grad=True) for s in shapes]
start = [w.numpy().copy() for w in weights]
optimizer = ag.optim.Adam(weights, lr=0.01)

lines = {"before the step": [], "after the step": []}
for _ in range(60):
    async with ag.context() as ctx:
        pairs = await asyncio.gather(*[adapted(weights, task) for task in range(4)])
        await ctx.backward(sum(after for _, after in pairs) / 4)
        optimizer.step(ctx.gradients)
    for line, losses in zip(lines.values(), zip(*pairs)):
        line.append(np.mean([float(loss) for loss in losses]))

ag.viz.chart(lines, y="mean loss of the four waves")

# %% [markdown]
# The loss *before* the step stays high, and may: it is the loss after it that was asked for.
#
# ## A fifth wave
#
# One that no worker had. Twenty points, one step.

# %%
task = 2.5
x = np.linspace(-3, 3, 60)[:, None]
points = np.random.default_rng([25, 0]).uniform(-3, 3, (20, 1))


def one_step(values):
    here = [ag.tensor(v, requires_grad=True) for v in values]
    slopes = ag.autograd.grad(loss_of(here, task, 0), here)
    return forward([w - RATE * g for w, g in zip(here, slopes)], x).numpy()[:, 0]


ag.viz.chart(
    {
        "the wave": (x[:, 0], wave(task, x)[:, 0]),
        "learned weights": (x[:, 0], one_step([w.numpy() for w in weights])),
        "random weights": (x[:, 0], one_step(start)),
    },
    dots={"the wave": (points[:, 0], wave(task, points)[:, 0])},
    x="x",
    y="after one step",
)

# %%
await cluster.close()
