"""Three parties train one model: two own columns of a table, one owns the labels. Columns, weights
and labels stay with their party; noisy embeddings go out, and gradients return over the same edge.

Each feature owner shares a secret with the label owner only. In the mode "restricted" a partner can
call the agreed functions (split_contract.py) and nothing else, and only plain data is exchanged: no
pickle, in either direction.
"""

import asyncio
import math
import sys

import numpy as np
from split_contract import Party, embed, learn, loss_of, make_head
from split_meeting import WireLog, meeting, refused, run_parties, say, told
from split_reference import TRAIN, table, train_pooled

import aiograd as ag

STEPS, OWNERS = 150, ag.Group(["clinic", "lab"])


async def train_split(label):
    """Runs at the label owner: it sees embeddings, never columns."""
    head = make_head()
    optimizer = ag.optim.Adam(head.parameters(), lr=0.02)
    rows = np.arange(len(label))
    for step in (bar := ag.progress(range(STEPS), "training")):
        async with ag.context() as ctx:
            loss, _ = loss_of(head, await OWNERS.call(embed, rows[:TRAIN]), label[:TRAIN])
            await ctx.backward(loss)
            optimizer.step(ctx.gradients)
            await OWNERS.call(learn, ctx.id)
        if step % 50 == 0:
            bar.say(f"  step {step:3d}   loss {float(loss):.4f}")
    async with ag.context():
        _, score = loss_of(head, await OWNERS.call(embed, rows[TRAIN:]), label[TRAIN:])
    return np.mean((score.numpy() > 0) == (label[TRAIN:] > 0.5))


async def party(name, rank, folder):
    """A feature owner's whole program: join, serve the agreed functions, leave with the others."""
    Party.here = Party(table()[rank - 1], rank)
    other = {"clinic": "lab", "lab": "clinic"}[name]
    wire = WireLog(folder, name)
    where = meeting(folder, name, wire.path)
    async with wire, ag.Worker(name, rank=rank, world_size=3, **where):
        await ag.barrier(timeout=math.inf)  # they train
        await refused(ag.rpc_async(other, embed, args=([0],)), f"{name} asks {other}")
    say(f"{name}: {told(wire, Party.here)}")


async def main(folder):
    first, second, label = table()
    async with ag.Worker("registry", rank=0, world_size=3, **meeting(folder, "registry")):
        print("three parties have met:", [worker.name for worker in ag.workers()])
        split = await train_split(label)
        pooled = await asyncio.to_thread(train_pooled, first, second, label, STEPS)
        print(f"accuracy on unseen rows: split {split:.1%}, all columns in one place {pooled:.1%}")
        columns = ag.rpc_async("clinic", lambda: Party.here.columns)
        await refused(columns, "the registry asks for columns")
        for name, key in (("lab", "clinic.key"), ("clinic", "guess.key")):
            stranger = ag.Worker(name, rank=2, world_size=3, **meeting(folder, name, key=key))
            await refused(stranger.start(), f"joining as {name} with {key}")
        await ag.barrier()


if __name__ == "__main__":
    run_parties(main, party, sys.argv)
