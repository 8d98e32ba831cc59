"""Three parties train one model: two own columns of a table, one owns the labels. Columns, weights
and labels stay at home; noisy embeddings go out, and gradients come back over the same edge.

In the mode "restricted" a partner can call the functions that were agreed on (split_contract.py)
and nothing else, and only plain data crosses: no pickle, in either direction.
"""

import asyncio
import math
import pathlib
import sys
import tempfile

import numpy as np
from split_contract import Party, embed, learn, loss_of, make_head, meeting, write_secret
from split_reference import TRAIN, table, train_pooled

import aiograd as ag

STEPS, OWNERS = 150, ag.Group(["clinic", "lab"])


async def train_split(label):
    """Runs at the label owner: it sees embeddings, never columns."""
    head = make_head()
    optimizer = ag.optim.Adam(head.parameters(), lr=0.02)
    rows = np.arange(len(label))
    for step in range(STEPS):
        async with ag.context() as ctx:
            loss, _ = loss_of(head, await OWNERS.call(embed, rows[:TRAIN]), label[:TRAIN])
            await ctx.backward(loss)
            optimizer.step(ctx.gradients)
            await OWNERS.call(learn, ctx.id)
        if step % 50 == 0:
            print(f"  step {step:3d}   loss {float(loss):.4f}")
    async with ag.context():
        _, score = loss_of(head, await OWNERS.call(embed, rows[TRAIN:]), label[TRAIN:])
    return np.mean((score.numpy() > 0) == (label[TRAIN:] > 0.5))


async def party(name, rank, folder):
    """A feature owner's whole program: join, offer what was agreed on, leave with the others."""
    Party.here = Party(table()[rank - 1], rank)
    async with ag.Worker(name, rank=rank, world_size=3, **meeting(folder)):
        await ag.barrier(timeout=math.inf)
        log = Party.here.log
        what = {f"{shape[1]} numbers per row to {peer}" for peer, shape in log}
        print(f"{name} sent {len(log)} arrays, each of {', '.join(what)}; its 5 columns stayed")


async def main(folder):
    others = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, name, str(rank), folder)
        for rank, name in ((1, "clinic"), (2, "lab"))
    ]
    first, second, label = table()
    async with ag.Worker("registry", rank=0, world_size=3, **meeting(folder)):
        print("three parties have met:", [worker.name for worker in ag.workers()])
        split = await train_split(label)
        pooled = await asyncio.to_thread(train_pooled, first, second, label, STEPS)
        print(f"accuracy on unseen rows: split {split:.1%}, all columns in one place {pooled:.1%}")
        try:
            await ag.rpc_async("clinic", lambda: Party.here.columns)
        except ag.errors.NotAllowed as error:
            print("asking for the columns:", error)
        try:
            await ag.Worker("stranger", rank=1, world_size=3, **meeting(folder, "guess")).start()
        except Exception as error:
            print(f"joining without the secret: {type(error).__name__}: {error}")
        await ag.barrier()
    await asyncio.gather(*[other.wait() for other in others])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(party(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as place:
            for file in ("secret", "guess"):
                write_secret(pathlib.Path(place, file))
            asyncio.run(main(place))
