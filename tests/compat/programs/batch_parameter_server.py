"""A parameter server that waits for the gradients of all trainers and then makes one step."""

import sys
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

TRAINERS, STEPS = 3, 12


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class BatchServer:
    def __init__(self) -> None:
        self.model = new_model()
        self.lock = threading.Lock()
        self.future = torch.futures.Future()
        self.arrived, self.steps = 0, 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.2)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(rref, gradients):
        self = rref.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / TRAINERS
            future = self.future
            self.arrived += 1
            if self.arrived == TRAINERS:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.arrived, self.future, self.steps = 0, torch.futures.Future(), self.steps + 1
                future.set_result(self.model)
        return future


class Trainer:
    def __init__(self, server) -> None:
        self.server, self.loss = server, nn.MSELoss()

    def train(self, rank: int):
        generator = torch.Generator().manual_seed(rank)
        model, teacher = self.server.rpc_sync().get_model(), torch.arange(8.0).reshape(4, 2) / 8
        losses = []
        for _ in range(STEPS):
            inputs = torch.randn(32, 4, generator=generator)
            loss = self.loss(model(inputs), inputs @ teacher)
            model.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            model = rpc.rpc_sync(
                self.server.owner(), BatchServer.update_and_fetch, args=(self.server, gradients)
            )
            losses.append(loss.item())
        return losses, [parameter.detach() for parameter in model.parameters()]


def train_on(server, rank: int):
    return Trainer(server).train(rank)


def run(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", num_worker_threads=16, rpc_timeout=0
    )
    name = f"trainer{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    if not rank:
        server = rpc.RRef(BatchServer())
        calls = [
            rpc.rpc_async(f"trainer{each}", train_on, args=(server, each))
            for each in range(1, TRAINERS + 1)
        ]
        found = torch.futures.wait_all(calls)
        assert server.local_value().steps == STEPS
        for losses, parameters in found:
            assert losses[-1] < 0.8 * losses[0], losses
            for mine, theirs in zip(parameters, found[0][1], strict=True):
                assert torch.equal(mine, theirs)  # all have the model of the last step
        print("trained", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run, args=(sys.argv[1],), nprocs=TRAINERS + 1, start_method="fork")
