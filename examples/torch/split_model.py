"""A torch model split over three workers, with a residual around the remote part.

The same tensor goes to the other worker and around it. So its gradient has two parts, one of which
comes back over the network; everything before it must wait for both, and run once.
"""

import asyncio

import torch

import aiograd as ag
import aiograd.torch

WIDTH, STEPS = 16, 40


class Block(torch.nn.Module):
    """What lives elsewhere."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Ends(torch.nn.Module):
    """What lives here: the first and the last layer, and a gate for each block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.gates = torch.nn.ParameterList([torch.ones(WIDTH) for _ in range(2)])

    async def forward(self, x, blocks):
        h = torch.tanh(self.first(x))
        for gate, block in zip(self.gates, blocks, strict=True):
            m = h * gate
            h = h + m * await block(m)  # around the call, and through it
        return self.last(h).squeeze(-1)


async def in_one_process(x, label):
    """The gradients of plain torch."""
    ends, blocks = Ends(), [Block(0), Block(1)]

    async def here(block, m):
        return block(m)

    y = await ends(x, [lambda m, b=block: here(b, m) for block in blocks])
    return torch.autograd.grad(torch.nn.functional.mse_loss(y, label), list(ends.parameters()))


async def main():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    label = (x[:, 0] * x[:, 1] - x[:, 2]).sin()
    async with ag.LocalCluster(2):
        ends = Ends()
        blocks = [ag.torch.RemoteModule(f"worker{i}", Block, args=(i,)) for i in range(2)]
        params = [ag.RRef(p) for p in ends.parameters()]
        params += [p for block in blocks for p in await block.remote_parameters()]
        optimizer = await ag.torch.DistributedOptimizer(torch.optim.Adam, params, lr=0.01)
        for step in range(STEPS):
            async with ag.context() as ctx:
                loss = torch.nn.functional.mse_loss(await ends(x, blocks), label)
                await ctx.backward(loss)
                if step == 0:
                    mine = [ctx.gradients[p] for p in ends.parameters()]
                    theirs = await in_one_process(x, label)
                    error = max((a - b).abs().max() for a, b in zip(mine, theirs, strict=True))
                    print(f"largest difference from the same model in one process: {error:.1e}")
                await optimizer.step(ctx)
            if step % 13 == 0:
                print(f"step {step:2d}   loss {loss.item():.4f}")


if __name__ == "__main__":
    asyncio.run(main())
