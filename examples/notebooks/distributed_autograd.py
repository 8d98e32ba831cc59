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
# # Distributed autograd in ten minutes
#
# A model whose layers run on different workers, a picture of the graph that was recorded, its
# gradient, a check of every number, and what happens when a worker dies in the middle.
# Everything here is local: the workers are processes of this machine.

# %%
import time

import numpy as np

import aiograd as ag

# %% [markdown]
# ## A cluster
#
# Three worker processes; this kernel takes part as `driver`. A notebook has a running loop, so
# `await` works at the top of a cell.

# %%
cluster = await ag.LocalCluster(3)
cluster

# %% [markdown]
# A call runs a function there. Functions of a notebook are sent by value; after a cell is changed
# and run again, the new version is sent.


# %%
def where():
    return ag.get_worker_info()


[await worker.call(where) for worker in cluster]

# %% [markdown]
# ## Two hops
#
# `first_layer` runs on worker0 and hands its result on to worker1, which calls `second_layer`. The
# weights are here, in the driver; they are sent along as arguments.


# %%
def second_layer(h, w2):
    return ((h @ w2) ** 2).mean()


async def first_layer(x, w1, w2):
    h = ag.tanh(x @ w1)
    return await ag.rpc_async("worker1", second_layer, args=(h, w2))


rng = np.random.default_rng(0)
x = ag.tensor(rng.standard_normal((32, 8)))
w1 = ag.tensor(rng.standard_normal((8, 16)) / 4, requires_grad=True)
w2 = ag.tensor(rng.standard_normal((16, 4)) / 4, requires_grad=True)

# %% [markdown]
# Calls made inside a *context* carry it, nested ones too, and each worker records its own part of
# the graph. A block (`async with ag.context() as ctx:`) is the usual form. Across
# cells, keep the context in a variable and switch it on where it is needed.

# %%
ctx = ag.context()
with ctx.active():
    loss = await ag.rpc_async("worker0", first_layer, args=(x, w1, w2))
loss

# %% [markdown]
# ## The picture
#
# Data flows downwards. Each worker has a lane. Where tensors went from one worker to another, there
# is a dashed arrow from a `Send`, labelled with what it sent, to a `Recv`.

# %%
await ctx.graph()

# %% [markdown]
# ## Backwards
#
# One `await` computes the gradients: they go from worker to worker against the dashed arrows,
# without a coordinator. They are stored in the context, and `.grad` is not changed: so several
# passes, of several trainers of the same weights, can run at once.

# %%
start = time.perf_counter()
await ctx.backward(loss, retain_graph=True)
print(f"{(time.perf_counter() - start) * 1e3:.1f} ms")
ctx.gradients[w1]

# %% [markdown]
# The same model in one process must give the same numbers.

# %%
local = ag.autograd.grad(second_layer(ag.tanh(x @ w1), w2), [w1, w2])
pairs = [(ctx.gradients[w], g) for w, g in zip([w1, w2], local)]
errors = [np.abs(a.numpy() - b.numpy()).max() for a, b in pairs]
print(f"largest difference: {max(errors):.1e}")
assert max(errors) <= 1e-12

# %% [markdown]
# A second independent check needs no reference at all: move a weight a little, and compare slopes.

# %%
step = np.zeros_like(w1.data)
step[3, 5] = 1e-6
up = await ag.rpc_async("worker0", first_layer, args=(x, w1.data + step, w2))
down = await ag.rpc_async("worker0", first_layer, args=(x, w1.data - step, w2))
print("slope measured", (float(up) - float(down)) / 2e-6)
print("slope computed", float(ctx.gradients[w1][3, 5]))

# %% [markdown]
# The context on this worker: the workers it reached, and how many edges end here.

# %%
ctx

# %% [markdown]
# Leaving a context releases it on every worker.

# %%
await ctx.release()
counters = await cluster["worker0"].call(ag.debug_info)
print("contexts that worker0 still knows of:", counters["contexts"])

# %% [markdown]
# ## Remote values
#
# A value can stay where it was made. `remote` creates it there and returns a reference, which can
# itself be sent to others.


# %%
class Counter:
    def __init__(self):
        self.count = 0

    def add(self, n):
        self.count += n
        return self.count


counter = ag.remote("worker2", Counter)
print([await counter.rpc_async().add(n) for n in (1, 2, 3)])
counter

# %%
await counter.release()

# %% [markdown]
# ## A worker dies
#
# worker1 is killed between the forward and the backward pass. The pass ends on every worker, at
# once, with an error that names the lost one; and no partial gradient can be read afterwards.

# %%
ctx = ag.context()
with ctx.active():
    loss = await ag.rpc_async("worker0", first_layer, args=(x, w1, w2))
await cluster.kill("worker1")
start = time.perf_counter()
try:
    await ctx.backward(loss)
except ag.errors.BackwardFailed as error:
    seconds = time.perf_counter() - start
    print(f"after {seconds * 1e3:.0f} ms: BackwardFailed on {error.worker}")
    print("because of", repr(error.__cause__))
assert seconds < 2

# %%
try:
    ctx.gradients[w1]
except ag.errors.BackwardFailed as error:
    print("still BackwardFailed on", error.worker)
await ctx.release()
cluster

# %% [markdown]
# It can be started again, under the same name, and everything works as before.

# %%
await cluster.restart("worker1")
async with ag.context() as ctx:
    await ctx.backward(await ag.rpc_async("worker0", first_layer, args=(x, w1, w2)))
    print("the same gradient:", np.array_equal(ctx.gradients[w1].numpy(), local[0].numpy()))

# %%
await cluster.close()
cluster
