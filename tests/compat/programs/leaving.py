"""Rank 0 leaves right after `init_rpc`, without `shutdown`; rank 1 is slow to hear of its join."""

import asyncio
import os
import sys
import time

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

from aiograd.cluster.membership.member import Member


def slow(join, store):
    async def joined(member, timeout):
        asked = asyncio.ensure_future(join(member, timeout))
        for _ in range(3):  # until the request has left
            await asyncio.sleep(0)
        block(store)
        await asked

    return joined


def block(store):
    time.sleep(0.5)  # the answer waits in the socket meanwhile
    with open(f"{store}.awake", "w"):
        pass


def run(rank: int, store: str) -> None:
    if rank:
        Member.join = slow(Member.join, store)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if not rank:
        assert os.path.exists(f"{store}.awake"), "it left before the other one was in"
    print(f"met {rank}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    mp.start_processes(run, args=(sys.argv[1],), nprocs=2, start_method="fork")
