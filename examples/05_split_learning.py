"""Three parties train one model: two own columns of a table, one owns the labels. Columns, weights
and labels stay at home; noisy embeddings go out, and gradients come back over the same edge.

In the mode "restricted" a partner can call the functions that were agreed on (split_contract.py)
and nothing else, and only plain data crosses: no pickle, in either direction.
"""

import asyncio
import math
import os
import pathlib
import sys
import tempfile

import numpy as np
from split_contract import Party, embed, learn, loss_of, make_head
from split_reference import TRAIN, table, train_pooled

import aiograd as ag

STEPS = 150


async def train_split(label):
    """Runs at the label owner: it sees embeddings, never columns."""
    head = make_head()
    optimizer = ag.optim.Adam(head.parameters(), lr=0.02)
    rows = np.arange(len(label))
    for step in range(STEPS):
        async with ag.context() as ctx:
            calls = [ag.rpc_async(p, embed, args=(rows[:TRAIN],)) for p in ("clinic", "lab")]
            loss, _ = loss_of(head, await asyncio.gather(*calls), label[:TRAIN])
            await ctx.backward(loss)
            optimizer.step(ctx.gradients)
            await asyncio.gather(*[ag.rpc_async(p, learn, (ctx.id,)) for p in ("clinic", "lab")])
        if step % 50 == 0:
            print(f"  step {step:3d}   loss {float(loss):.4f}")
    calls = [ag.rpc_async(p, embed, args=(rows[TRAIN:],)) for p in ("clinic", "lab")]
    _, score = loss_of(head, await asyncio.gather(*calls), label[TRAIN:])
    return np.mean((score.numpy() > 0) == (label[TRAIN:] > 0.5))


async def party(name, rank, folder):
    """A feature owner's whole program: join, offer what was agreed on, leave with the others."""
    Party.here = Party(table()[rank - 1], rank)
    async with ag.Worker(name, rank=rank, world_size=3, **meeting(folder)):
        await ag.barrier(timeout=math.inf)


def meeting(folder, secret="secret"):
    options = ag.Options(mode="restricted", secret_file=f"{folder}/{secret}", timeout=10)
    return {"rendezvous": f"unix:{folder}/meet", "options": options}


def write_secret(path):
    path.touch(mode=0o600)
    path.write_bytes(os.urandom(16).hex().encode())


async def main(folder):
    others = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, name, str(rank), folder)
        for rank, name in ((1, "clinic"), (2, "lab"))
    ]
    first, second, label = table()
    async with ag.Worker("registry", rank=0, world_size=3, **meeting(folder)):
        print("three parties have met:", [worker.name for worker in ag.workers()])
        split = await train_split(label)
        print(
            f"accuracy on unseen rows: split {split:.1%}, all columns in one place "
            f"{train_pooled(first, second, label, STEPS):.1%}"
        )
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
            for file in ("secret", "guess"):  # partners would hand over the secret in person
                write_secret(pathlib.Path(place, file))
            asyncio.run(main(place))
