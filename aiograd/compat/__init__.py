"""Ways in for programs that were written for other libraries.

    torch_rpc/   the blocking surface of torch.distributed.rpc and torch.distributed.autograd

Nothing of aiograd imports this package: a program that does not use it does not pay for it.
"""
