"""A torch model on one worker, trained by three others at once, each at its own pace.

torch's own parameter server takes one trainer only: its steps change parameters in place, and the
graphs of the other trainers are lost. Here a step replaces the memory of a parameter, so that every
trainer gets the gradient of the values it saw.
"""

import asyncio

import torch

import aiograd as ag
import aiograd.torch

TRAINERS, STEPS = ["trainer0", "trainer1", "trainer2"], 60


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh()
        )
        self.out = torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.layers(x)).squeeze(-1)


def batch(generator, size=64):
    """Points of a plane, inside and outside of a ring."""
    x = torch.randn(size, 2, generator=generator)
    return x, ((x.norm(dim=1) - 1.2).abs() < 0.4).float()


async def train(model, seed):
    """Runs on a trainer: data, loss and contexts are here, the parameters are not."""
    generator = torch.Generator().manual_seed(seed)
    params = await model.remote_parameters()
    optimizer = await ag.torch.DistributedOptimizer(torch.optim.Adam, params, lr=0.01)
    for _ in range(STEPS):
        x, label = batch(generator)
        async with ag.context() as ctx:
            score = await model(x)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label)
            await ctx.backward(loss)
            await optimizer.step(ctx)
    return loss.item()


async def evaluate(model):
    x, label = batch(torch.Generator().manual_seed(99), 2000)
    return ((await model(x) > 0) == (label > 0.5)).float().mean().item()


async def main():
    async with ag.LocalCluster(4, names=["server", *TRAINERS]) as cluster:
        model = await ag.torch.RemoteModule("server", Model)
        print(f"before    {await evaluate(model):.1%} right")
        for number in range(3):
            jobs = [cluster[t].call(train, model, 3 * number + i) for i, t in enumerate(TRAINERS)]
            losses = await asyncio.gather(*jobs)
            told = ", ".join(f"{t} {loss:.3f}" for t, loss in zip(TRAINERS, losses, strict=True))
            print(f"round {number + 1}   {await evaluate(model):.1%} right   loss: {told}")


if __name__ == "__main__":
    asyncio.run(main())
