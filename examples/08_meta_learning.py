"""Gradients through gradients: four workers each have a task that never leaves them, and the driver
learns weights that adapt to any of them in one step (MAML, second order)."""

import asyncio

import numpy as np

import aiograd as ag

TASKS, STEPS, INNER_RATE, RATE = 4, 60, 0.05, 0.01


def task_data(task, part):
    """A sine wave of its own for every task; one part to adapt to, one to be judged by."""
    rng = np.random.default_rng([task, part])
    amplitude, phase = 0.5 + task, 0.8 * task
    x = rng.uniform(-3, 3, (20, 1))
    return x, amplitude * np.sin(x + phase)


def task_loss(weights, task, part):
    """Runs where the task is: its data stays there, only weights and a number are sent."""
    x, y = task_data(task, part)
    w1, b1, w2, b2 = weights
    return ((ag.tanh(x @ w1 + b1) @ w2 + b2 - y) ** 2).mean()


async def adapted_loss(weights, task):
    """One step of learning on the worker's first part, then the loss on its second part."""
    worker = f"worker{task}"
    before = await ag.rpc_async(worker, task_loss, args=(weights, task, 0))
    slopes = await ag.grad(before, weights, create_graph=True)  # itself part of the graph
    moved = [w - INNER_RATE * g for w, g in zip(weights, slopes, strict=True)]
    return await ag.rpc_async(worker, task_loss, args=(moved, task, 1))


def adapted_loss_here(weights, task):
    """The same in one process, as a reference."""
    slopes = ag.autograd.grad(task_loss(weights, task, 0), weights, create_graph=True)
    moved = [w - INNER_RATE * g for w, g in zip(weights, slopes, strict=True)]
    return task_loss(moved, task, 1)


async def main():
    rng = np.random.default_rng(0)
    shapes = [(1, 32), (32,), (32, 1), (1,)]
    weights = [ag.tensor(rng.standard_normal(s) * 0.5, requires_grad=True) for s in shapes]
    optimizer = ag.optim.Adam(weights, lr=RATE)
    async with ag.LocalCluster(TASKS):
        for step in (bar := ag.progress(range(STEPS + 1), "learning")):
            async with ag.context() as ctx:
                losses = await asyncio.gather(*[adapted_loss(weights, t) for t in range(TASKS)])
                outer = sum(losses) / TASKS
                await ctx.backward(outer)
                gradients = ctx.gradients
            if step == 0:
                here = sum(adapted_loss_here(weights, t) for t in range(TASKS)) / TASKS
                reference = ag.autograd.grad(here, weights)
                pairs = [(gradients[w], r) for w, r in zip(weights, reference, strict=True)]
                error = max(np.abs(g.numpy() - r.numpy()).max() for g, r in pairs)
                bar.say(f"second-order gradient, {TASKS} workers against one process: {error:.0e}")
                assert error < 1e-10
            if step % 20 == 0:
                bar.say(f"step {step:3d}   loss after one step of adapting: {float(outer):.4f}")
            optimizer.step(gradients)


if __name__ == "__main__":
    asyncio.run(main())
