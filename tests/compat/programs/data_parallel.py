"""Two trainers: an embedding on a parameter server, and a dense part in DistributedDataParallel."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH, CLASSES, STEPS = 20, 6, 4, 15


class Hybrid(nn.Module):
    def __init__(self, table) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(1)
        self.dense = DistributedDataParallel(nn.Linear(WIDTH, CLASSES))

    def forward(self, words, offsets):
        return self.dense(self.table.forward(words, offsets))


def batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        words = torch.randint(ROWS, (24,), generator=generator)
        yield words, torch.arange(24), words % CLASSES


def train(table, rank: int):
    model = Hybrid(table)
    rrefs = model.table.remote_parameters()
    rrefs += [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.5)
    losses = []
    for words, offsets, target in batches(rank):
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(words, offsets), target)
            dist_autograd.backward(context, [loss])
            gradient = dist_autograd.get_gradients(context)[model.dense.module.weight]
            every = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(every, gradient)
            assert torch.equal(every[0], every[1])  # averaged, so that replicas stay equal
            optimizer.step(context)
        losses.append(loss.item())
    assert all(parameter.grad is None for parameter in model.dense.parameters())
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), losses
    return [parameter.detach() for parameter in model.dense.parameters()]


def run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    name = {2: "master", 3: "server"}.get(rank, f"trainer{rank}")
    if rank < 2:  # first, as the official example does it: RPC then waits for the others
        dist.init_process_group("gloo", f"file://{store}_group", rank=rank, world_size=2)
    rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
    if rank == 2:
        arguments = {"mode": "sum", "sparse": True}
        table = RemoteModule("server", nn.EmbeddingBag, args=(ROWS, WIDTH), kwargs=arguments)
        calls = [rpc.rpc_async(f"trainer{each}", train, args=(table, each)) for each in range(2)]
        one, two = [call.wait() for call in calls]
        for mine, theirs in zip(one, two, strict=True):
            assert torch.equal(mine, theirs)
        print("trained", flush=True)
    rpc.shutdown()
    if rank < 2:
        sys.stdout.flush()
        os._exit(0)  # a process group of gloo may hang when it is freed


if __name__ == "__main__":
    mp.start_processes(run, args=(sys.argv[1],), nprocs=4, start_method="fork")
