"""Rank 0 ends without `shutdown` while a thread of its worker runs a backward pass for rank 1."""

import sys
import threading
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

begun = threading.Event()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.01)  # without the interpreter, and inside of torch's engine
        return grad


def busy():
    y = x = torch.ones(2, requires_grad=True)
    for _ in range(50):
        y = Slow.apply(y)
    begun.set()
    y.sum().backward()
    return x.grad.sum().item()


def run(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        rpc.rpc_async("worker0", busy)
        time.sleep(3600)
    begun.wait()


if __name__ == "__main__":
    other = mp.get_context("fork").Process(target=run, args=(1, sys.argv[1]), daemon=True)
    other.start()
    run(0, sys.argv[1])
    print("met 0", flush=True)
