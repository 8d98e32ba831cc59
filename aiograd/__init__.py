"""aiograd: call functions on other workers with `await`, and let gradients flow back.

import aiograd as ag

async with ag.LocalCluster(2):
    async with ag.context() as ctx:
        y = await ag.rpc_async("worker1", dense, args=(x, w))
        await ctx.backward((y * y).mean())
        print(ctx.gradients[w])

The public names, and nothing else. What is inside:

    errors       every exception, as one tree
    autograd/    arrays that remember: the tape and the reverse pass, no I/O
    wire/        bytes and messages, no I/O
    rpc/         workers that call each other
    rref/        values that stay with their owner
    dist/        gradients across workers
    torch/       torch tensors: how they travel, and gradients through their graphs
    nn/          models
    optim/       optimisers
    cluster/     starting and stopping workers
    testing/     gradient checks, fault injection, the simulator
    viz/         pictures
    _frames      the line of user code that led here
    _html        what objects look like in a notebook
    _progress    what long work looks like in a terminal

Imports go downwards only: errors ← autograd, wire ← rpc ← rref ← dist ← nn, optim ← cluster,
testing. Nothing imports `torch` by itself: it is loaded with the first torch tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiograd import autograd, errors
from aiograd.autograd import (
    DTYPES,
    MAKERS,
    NAMES,
    Tensor,
    enable_grad,
    fft,
    is_grad_enabled,
    linalg,
    manual_seed,
    no_grad,
    op,
    sparse,
)
from aiograd.autograd.checkpoint import checkpoint
from aiograd.autograd.function import Function, once_differentiable
from aiograd.cluster.api import (
    all_gather,
    barrier,
    current_worker,
    debug_info,
    get_worker_info,
    init_rpc,
    shutdown,
    workers,
)
from aiograd.cluster.local import Handle, LocalCluster
from aiograd.cluster.worker import Worker
from aiograd.dist import boundary
from aiograd.dist.api import backward, grad
from aiograd.dist.context import Context
from aiograd.dist.registry import context, current_context, get_context, get_gradients
from aiograd.errors import GraphCutWarning
from aiograd.rpc.api import (
    Group,
    expose,
    idempotent,
    inline,
    rpc_async,
    rpc_stream,
    rpc_sync,
    run_sync,
)
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.future import Future
from aiograd.rpc.observe.metrics import measure_lag, metrics
from aiograd.rpc.observe.profile import Profile, profile, span, start_profile, stop_profile
from aiograd.rpc.options import Options
from aiograd.rpc.progress import as_completed, progress
from aiograd.rpc.retry import RetryPolicy
from aiograd.rpc.transport.tls import TLS
from aiograd.rref import RRef, remote, serial

__version__ = "0.1.0"

# The operations and makers, by numpy's names.
globals().update({name: getattr(autograd, name) for name in (*MAKERS, *NAMES, *DTYPES)})

# Imported when asked for: a worker that only serves calls starts faster without models, optimisers
# and pictures.
_LATER = ("nn", "optim", "testing", "viz", "cluster", "save", "load")


def __getattr__(name: str) -> Any:
    if name in ("save", "load"):
        from aiograd.nn import files

        return getattr(files, name)
    if name in _LATER:
        import importlib

        return importlib.import_module(f"aiograd.{name}")
    raise AttributeError(f"module 'aiograd' has no attribute {name!r}")


# What completion shows: the public names, those that are imported later too, and no helpers.
def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if TYPE_CHECKING:
    from aiograd import cluster, nn, optim, testing, viz
    from aiograd.nn.files import load, save

__all__ = [
    "Context",
    "Function",
    "Future",
    "GraphCutWarning",
    "Group",
    "Handle",
    "LocalCluster",
    "Options",
    "Profile",
    "RRef",
    "RetryPolicy",
    "Stream",
    "TLS",
    "Tensor",
    "Worker",
    "WorkerInfo",
    "all_gather",
    "as_completed",
    "autograd",
    "backward",
    "barrier",
    "boundary",
    "checkpoint",
    "cluster",
    "context",
    "current_context",
    "current_worker",
    "debug_info",
    "enable_grad",
    "errors",
    "expose",
    "fft",
    "get_context",
    "get_gradients",
    "get_worker_info",
    "grad",
    "idempotent",
    "init_rpc",
    "inline",
    "is_grad_enabled",
    "linalg",
    "load",
    "manual_seed",
    "measure_lag",
    "metrics",
    "nn",
    "no_grad",
    "once_differentiable",
    "op",
    "optim",
    "profile",
    "progress",
    "remote",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "run_sync",
    "save",
    "serial",
    "shutdown",
    "span",
    "sparse",
    "start_profile",
    "stop_profile",
    "testing",
    "viz",
    "workers",
    *MAKERS,
    *NAMES,
    *DTYPES,
]
