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
# # Torch tensors in pictures
#
# A torch model on two workers: calls keep the graph, a backward pass runs on all workers, and a
# picture shows what is where. `pip install 'aiograd[torch]'`.

# %%
import asyncio

import torch

import aiograd as ag
import aiograd.torch

cluster = await ag.LocalCluster(2)

# %% [markdown]
# An ordinary torch function, called on another worker. The result belongs to a graph that goes on
# there; the gradient of `w` comes back to this worker, and no `.grad` is touched.


# %%
def layer(x, w):
    return torch.tanh(x @ w)


x = torch.randn(8, 4)
w = torch.randn(4, 4, requires_grad=True)
async with ag.context() as ctx:
    y = await ag.rpc_async("worker0", layer, args=(x, w))
    h = y + 0.5 * await ag.rpc_async("worker1", layer, args=(y, w))  # a residual around a call
    await ctx.backward(h.square().mean())
    gradient = ctx.gradients[w]
    picture = await ctx.graph()
picture

# %% [markdown]
# Plain torch agrees.

# %%
y = layer(x, w)
(expected,) = torch.autograd.grad((y + 0.5 * layer(y, w)).square().mean(), w)
print(
    "the same gradient as in one process:", torch.allclose(gradient, expected), "| .grad:", w.grad
)

# %% [markdown]
# A module that lives on a worker, and an optimiser of torch that steps where the parameters are.
# Two trainers share the model; each gets the gradient of the values it saw.

# %%
model = await ag.torch.RemoteModule("worker1", torch.nn.Linear, args=(4, 1))
params = await model.remote_parameters()


async def train(seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer = await ag.torch.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    for _ in range(40):
        data = torch.randn(16, 4, generator=generator)
        async with ag.context() as ctx:
            loss = (await model(data) - data.sum(dim=1, keepdim=True)).square().mean()
            await ctx.backward(loss)
            await optimizer.step(ctx)
    return loss.item()


losses = await asyncio.gather(train(1), train(2))
weight = (await params[0]).detach()
print("weights close to one:", torch.allclose(weight, torch.ones(1, 4), atol=0.05), losses)

# %% [markdown]
# A local `backward()` would end at the border. It says so, and what to do instead.

# %%
async with ag.context():
    received = await ag.rpc_async("worker0", layer, args=(x, w))
    try:
        received.sum().backward()
    except ag.errors.GradError as error:
        print(error)

# %%
await cluster.close()
