"""What the drop-in does where torch hangs, loses a gradient, or goes on without a word."""

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn


def double(x):
    return 2 * x


def use() -> None:
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        used = rpc.rpc_sync("other", double, args=(x,))
        rpc.rpc_sync("other", double, args=(x,))  # never used: torch's backward never ends
        dist_autograd.backward(context, [used.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [2, 2, 2]
    print("ended", flush=True)
    weight = nn.Parameter(torch.ones(2))
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("other", double, args=(weight,)).sum()
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[weight].tolist() == [2, 2]
    print("parameter", flush=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("other", double, args=(x,)) * 2
        y.register_hook(lambda gradient: rpc.rpc_sync("other", double, args=(gradient,)))
        dist_autograd.backward(context, [y.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [8, 8, 8]
    print("called in a hook", flush=True)
    try:
        rpc.RRef(x)._get_profiling_future()
    except RuntimeError as error:
        assert "not supported" in str(error)
        print("refused", flush=True)


def run(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    name = "user" if rank else "other"
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        use()
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
