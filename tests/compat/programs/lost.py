"""A rank is killed: every other process of the program ends by itself, with an error."""

import multiprocessing as mp
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.nn.parallel import DistributedDataParallel

SIZE = 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def add(x):
    return x + 1


def run(rank: int, store: str, victim: int, scenario: str) -> None:
    if scenario == "start" and rank == victim:
        die()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=15)
    try:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=SIZE, rpc_backend_options=options)
        globals()[scenario](rank, victim, store)
        rpc.shutdown()
    except RuntimeError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(3)


def shutdown(rank: int, victim: int, store: str) -> None:
    """The others wait for the victim in `shutdown`, and do nothing else."""
    rpc.rpc_sync(f"w{(rank + 1) % SIZE}", add, (torch.ones(2),))
    if rank == victim:
        die()


def call(rank: int, victim: int, store: str) -> None:
    """The victim dies in a call."""
    if rank != victim:
        rpc.rpc_sync(f"w{victim}", die)


def backward(rank: int, victim: int, store: str) -> None:
    """The victim has a part of the graph, and dies before the pass."""
    with dist_autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync(f"w{(rank + 1) % SIZE}", add, (x,))
        if rank == victim:
            die()
        dist_autograd.backward(context, [y.sum()])
        time.sleep(1)  # the victim is dead by now, and the second pass cannot end well
        dist_autograd.backward(context, [rpc.rpc_sync(f"w{victim}", add, (y,)).sum()])


def averaged(rank: int, victim: int, store: str) -> None:
    """The victim dies where the others wait for its part of an average."""
    dist.init_process_group(
        "gloo", f"file://{store}_group", timedelta(seconds=15), rank=rank, world_size=SIZE
    )
    module = DistributedDataParallel(torch.nn.Linear(2, 2))
    with dist_autograd.context() as context:
        loss = module(rpc.rpc_sync(f"w{(rank + 1) % SIZE}", add, (torch.ones(2),))).sum()
        if rank == victim:
            die()
        dist_autograd.backward(context, [loss])


if __name__ == "__main__":
    store, scenario, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
    fork = mp.get_context("fork")
    ranks = [fork.Process(target=run, args=(r, store, victim, scenario)) for r in range(SIZE)]
    for each in ranks:
        each.start()
    for each in ranks:  # nobody ends them: they have to end by themselves
        each.join()
    print(*[each.exitcode for each in ranks])
