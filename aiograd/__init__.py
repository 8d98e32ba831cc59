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
    compat/      ways in for programs that were written for other libraries
    nn/          models
    optim/       optimisers
    cluster/     starting and stopping workers
    observe/     what a cluster is doing, as data
    views/       that data for terminals, pages, notebooks and monitoring
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
from aiograd.autograd.creation import (
    arange,
    empty,
    empty_like,
    eye,
    from_numpy,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    tensor,
    zeros,
    zeros_like,
)
from aiograd.autograd.function import Function, once_differentiable
from aiograd.autograd.names.operations import *  # noqa: F403  listed below
from aiograd.cluster.api import (
    all_gather,
    barrier,
    current_worker,
    debug_info,
    get_worker_info,
    init_rpc,
    join,
    shutdown,
    workers,
)
from aiograd.cluster.handle import Handle
from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.local import LocalCluster
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
from aiograd.rpc.future import Future, name_forgotten_await
from aiograd.rpc.observe.metrics import measure_lag, metrics
from aiograd.rpc.observe.profile import Profile, profile, span, start_profile, stop_profile
from aiograd.rpc.options import Options
from aiograd.rpc.progress import as_completed, progress
from aiograd.rpc.retry import RetryPolicy
from aiograd.rpc.transport.tls import TLS
from aiograd.rref import RRef, remote, serial

__version__ = "0.1.0"

# Imported when asked for: a worker that only serves calls starts faster without models, optimisers
# and pictures.
_LATER = (
    "nn",
    "optim",
    "testing",
    "viz",
    "cluster",
    "torch",
    "save",
    "load",
    "inspect",
    "Snapshot",
    "Dashboard",
)


name_forgotten_await(Tensor)


def _import_later(name: str) -> Any:
    if name in ("save", "load"):
        from aiograd.nn import files

        return getattr(files, name)
    if name == "Dashboard":
        from aiograd.views import page

        return page.load_dashboard()
    if name in ("inspect", "Snapshot"):
        from aiograd.observe import inspector

        return getattr(inspector, name)
    if name in _LATER:
        import importlib

        try:
            return importlib.import_module(f"aiograd.{name}")
        except ModuleNotFoundError as error:
            if error.name != name:  # only `torch` has the name of what it needs
                raise
            raise ImportError(f"ag.{name} needs {name}: pip install 'aiograd[{name}]'") from error
    raise AttributeError(f"module 'aiograd' has no attribute {name!r}")


if not TYPE_CHECKING:  # a checker would take every name for a public one
    __getattr__ = _import_later


# What completion shows: the public names, those that are imported later too, and no helpers.
def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if TYPE_CHECKING:
    from aiograd import cluster, nn, optim, testing, torch, viz
    from aiograd.nn.files import load, save
    from aiograd.observe.inspector import Snapshot, inspect
    from aiograd.views.page.dashboard import Dashboard

__all__ = [
    "Context",
    "Dashboard",
    "Function",
    "Future",
    "GraphCutWarning",
    "Group",
    "Handle",
    "Invitation",
    "LocalCluster",
    "Options",
    "Profile",
    "RRef",
    "RetryPolicy",
    "Snapshot",
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
    "inspect",
    "is_grad_enabled",
    "join",
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
]

# The makers and operations, written by `make stubs`.
# fmt: off
__all__ += [
    "abs", "absolute", "acos", "acosh", "add", "all", "amax", "amin", "angle", "any", "append",
    "arange", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "argmax",
    "argmin", "argsort", "array_split", "asin", "asinh", "astype", "atan", "atan2", "atanh",
    "atleast_1d", "atleast_2d", "atleast_3d", "average", "avg_pool2d", "batch_norm",
    "binary_cross_entropy_with_logits", "bitwise_and", "bitwise_invert", "bitwise_left_shift",
    "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bmm", "bool_",
    "broadcast_arrays", "broadcast_to", "cat", "cbrt", "ceil", "cholesky", "clip", "clone",
    "column_stack", "complex128", "complex64", "compress", "concat", "concatenate", "conj",
    "conjugate", "conv1d", "conv2d", "copy", "copysign", "corrcoef", "cos", "cosh",
    "count_nonzero", "cov", "cross", "cross_entropy", "cumprod", "cumsum", "deg2rad", "degrees",
    "delete", "det", "diag", "diagflat", "diagonal", "diff", "div", "divide", "dot", "dropout",
    "dsplit", "dstack", "ediff1d", "eigh", "eigvalsh", "einsum", "elu", "embedding",
    "embedding_bag", "empty", "empty_like", "eq", "equal", "erf", "exp", "exp2", "expand_dims",
    "expm1", "eye", "fabs", "flip", "fliplr", "flipud", "float16", "float32", "float64",
    "float_power", "floor", "floor_divide", "fmax", "fmin", "fmod", "from_numpy", "full",
    "full_like", "gelu", "getitem", "gradient", "greater", "greater_equal", "heaviside", "hsplit",
    "hstack", "hypot", "imag", "inner", "int16", "int32", "int64", "int8", "inv", "invert",
    "isclose", "iscomplex", "isfinite", "isinf", "isnan", "isreal", "kron", "l1_loss",
    "layer_norm", "leaky_relu", "left_shift", "less", "less_equal", "linspace", "log", "log10",
    "log1p", "log2", "log_softmax", "logaddexp", "logaddexp2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logsumexp", "matmul", "matrix_norm", "matrix_power",
    "matrix_transpose", "max", "max_pool2d", "maximum", "mean", "median", "meshgrid", "min",
    "minimum", "mm", "mod", "moveaxis", "mse_loss", "mul", "multi_dot", "multiply", "nan_to_num",
    "nanargmax", "nanargmin", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum",
    "nanvar", "ne", "neg", "negative", "nll_loss", "norm", "not_equal", "ones", "ones_like",
    "outer", "pad", "partition", "percentile", "permute", "permute_dims", "pinv", "positive",
    "pow", "power", "prod", "ptp", "qr", "quantile", "rad2deg", "radians", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "ravel", "real", "reciprocal", "relu",
    "remainder", "repeat", "reshape", "right_shift", "rint", "roll", "rollaxis", "rot90", "round",
    "searchsorted", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh",
    "sliding_window_view", "slogdet", "softmax", "softplus", "solve", "sort", "split", "sqrt",
    "square", "squeeze", "stack", "std", "sub", "subtract", "sum", "svd", "swapaxes", "take",
    "take_along_axis", "tan", "tanh", "tensor", "tensordot", "tile", "trace", "transpose",
    "trapezoid", "tril", "triu", "true_divide", "trunc", "uint16", "uint32", "uint64", "uint8",
    "unsqueeze", "unstack", "var", "vdot", "vecdot", "vector_norm", "vsplit", "vstack", "where",
    "zeros", "zeros_like"
]
# fmt: on
