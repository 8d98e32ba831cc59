"""A model in two shards on two workers, with micro-batches, equals the model in one process."""

import sys
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

STEPS, SPLIT, WIDTH = 6, 4, 8


class Shard(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lock = threading.Lock()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, given):
        inputs = given.to_here() if isinstance(given, rpc.PyRRef) else given
        with self.lock:
            return self.layers(inputs)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def state(self):
        return [parameter.detach() for parameter in self.parameters()]


class Pipeline(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = rpc.remote(first, Shard, args=(1,))
        self.second = rpc.remote(second, Shard, args=(2,))

    def forward(self, inputs):
        outputs = []
        for part in iter(inputs.split(len(inputs) // SPLIT)):
            middle = self.first.remote().forward(part)  # stays at the first worker
            outputs.append(self.second.rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self):
        return [
            rref
            for shard in (self.first, self.second)
            for rref in shard.remote().parameter_rrefs().to_here()
        ]


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, WIDTH, generator=generator) for _ in range(STEPS)]


def train() -> None:
    model = Pipeline("worker1", "worker2")
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.1, momentum=0.9)
    losses = []
    for inputs in batches():
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    found = [*model.first.rpc_sync().state(), *model.second.rpc_sync().state()]
    plain = nn.Sequential(Shard(1), Shard(2))
    optimizer = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for inputs, theirs in zip(batches(), losses, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(inputs), inputs.flip(1))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.item(), theirs)
    for mine, theirs in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())
    print("equal", flush=True)


def run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", num_worker_threads=16)
    name = f"worker{rank}" if rank else "master"
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)
    if not rank:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run, args=(sys.argv[1],), nprocs=3, start_method="fork")
