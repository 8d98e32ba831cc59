"""Processes that find each other in all ways that torch offers, with a process group beside RPC."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

SIZE = 2


def double(x):
    return 2 * x


def work(rank: int, init_method: str | None) -> None:
    options = rpc.TensorPipeRpcBackendOptions()
    if init_method is not None:
        options.init_method = init_method
    # On the same port or file as RPC, as the official examples do it.
    group = f"{init_method}_group" if init_method and init_method[:4] == "file" else init_method
    dist.init_process_group("gloo", group, rank=rank, world_size=SIZE)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=SIZE, rpc_backend_options=options)
    dist.barrier()
    with dist_autograd.context() as context:
        x = torch.full((2,), float(rank), requires_grad=True)
        y = rpc.rpc_sync(f"worker{1 - rank}", double, args=(x,))
        dist_autograd.backward(context, [y.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [2, 2]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == SIZE
    rpc.shutdown()
    print(f"met {rank}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # a process group of gloo may hang when it is freed


def run(rank: int, init_method: str, start: str) -> None:
    if init_method == "env":
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(SIZE)
        work(rank, None)
    else:
        work(rank, init_method)


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":  # it starts the processes
        work(int(os.environ["RANK"]), None)
    else:
        start = sys.argv[2]
        mp.start_processes(run, args=sys.argv[1:3], nprocs=SIZE, start_method=start)
