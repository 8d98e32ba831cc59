"""One worker of the test across network namespaces: python netns_member.py RANK PLACE FOLDER."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

import aiograd as ag
from aiograd.cluster import TLS
from tests.security import partner_functions as offer


async def main(rank: int, place: str, folder: Path, by: str) -> None:
    name = f"worker{rank}"
    papers = TLS(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")
    secret = folder / "secret"
    options = ag.Options(
        secret_file=secret,
        tls=papers if by == "certificates" else None,
        mode="restricted",
        timeout=20,
    )
    async with ag.Worker(name, rank=rank, world_size=2, rendezvous=place, options=options):
        if rank == 0:
            transport = ag.current_worker().agent.link("worker1").connection.transport
            print(transport.get_extra_info("ssl_object").version(), flush=True)  # noqa: T201
            x = ag.tensor(np.ones((200, 3)), requires_grad=True)
            async with ag.context() as ctx:
                y = await ag.rpc_async("worker1", offer.project, (x,))
                await ctx.backward(y.sum())
                print("gradient:", float(ctx.gradients[x].numpy().sum()), flush=True)  # noqa: T201
        await ag.barrier()


asyncio.run(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
