"""One parameter server and N trainers, each with its own optimiser: torch itself fails with two."""

import os
import sys
import traceback
from threading import Lock

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

STEPS = 25
server, server_lock = None, Lock()


class Server(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs):
        return self.model(inputs)

    def rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def gradients(self, context):
        found = dist_autograd.get_gradients(context)
        return {name: found[p].norm().item() for name, p in self.model.named_parameters()}


def get_server():
    """Make the one server of this process: the global is shared by all callers."""
    global server
    with server_lock:
        if server is None:
            server = Server()
        return server


def train(rank: int) -> None:
    # What others have trained before this one began counts, too.
    untrained = Server()
    torch.manual_seed(rank)
    there = rpc.remote("server", get_server)
    rrefs = there.rpc_sync().rrefs()
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.1)
    teacher = torch.arange(18.0).reshape(6, 3) / 18
    losses, before = [], []
    for _ in range(STEPS):
        inputs = torch.randn(16, 6)
        before.append(nn.functional.mse_loss(untrained(inputs), inputs @ teacher).item())
        with dist_autograd.context() as context:
            outputs = there.rpc_sync().forward(inputs)
            loss = nn.functional.mse_loss(outputs, inputs @ teacher)
            dist_autograd.backward(context, [loss])
            norms = there.rpc_sync().gradients(context)
            assert all(norm == norm and norm < 1e3 for norm in norms.values()), norms
            optimizer.step(context)
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(before[-5:]), (losses, before)
    print(f"trained {rank}", flush=True)


def run(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    name = f"trainer{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank:
        train(rank)
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 1 + int(sys.argv[2])
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(rank, world_size, sys.argv[1])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(max(statuses))
