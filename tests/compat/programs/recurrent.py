"""A language model whose embedding and decoder live on a parameter server, and its LSTM here."""

import sys
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

WORDS, WIDTH, HIDDEN = 12, 8, 16


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, words):
        return self.table(words)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(HIDDEN, WORDS)

    def forward(self, hidden):
        return self.linear(hidden)


def call(method, rref, *args):
    return method(rref.local_value(), *args)


def parameter_rrefs(module):
    return [rpc.RRef(parameter) for parameter in module.parameters()]


class Model(nn.Module):
    def __init__(self, server: str) -> None:
        super().__init__()
        self.table = rpc.remote(server, Table)
        self.lstm = nn.LSTM(WIDTH, HIDDEN)
        self.decoder = rpc.remote(server, Decoder)

    def forward(self, words):
        owner = self.table.owner()
        vectors = rpc.rpc_sync(owner, call, args=(Table.forward, self.table, words))
        hidden, _ = self.lstm(vectors)
        return self.decoder.rpc_sync().forward(hidden)

    def rrefs(self):
        remote = [
            rref
            for module in (self.table, self.decoder)
            for rref in rpc.rpc_sync(module.owner(), call, args=(parameter_rrefs, module))
        ]
        return remote + parameter_rrefs(self.lstm)


def train() -> None:
    torch.manual_seed(0)
    model = Model("server")
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs(), lr=0.5)
    words = torch.randint(WORDS, (6, 4))
    following = (words + 1) % WORDS
    losses = []
    for _ in range(40):
        with dist_autograd.context() as context:
            scores = model(words)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    print("trained", flush=True)


def run(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    name = "trainer" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        train()
    rpc.shutdown()
    # A thread in C++ code would abort the process when the interpreter ends.
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
