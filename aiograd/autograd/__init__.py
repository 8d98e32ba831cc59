"""Arrays that remember how they were made, and the derivatives that follow from it.

    array             Array, Values, Gradient: what annotations call arrays
    random            where random numbers come from: manual_seed
    grad_mode         whether operations are recorded: a switch per task
    graph             the tape: nodes, edges, hooks
    names/            methods of Tensor and operations by their public names, with their stubs
    tensor            Tensor: data, flags, versions of its memory
    op/               operations: forward functions, gradient rules, nodes of the tape
    coo               the sparse array
    sparse            ag.sparse: sparse Tensors and their operations
    handed_out        memory of tensors that users hold as arrays, and write to
    sweep             one reverse pass, as a state machine without I/O
    backward          the local pass; the checker of roots
    ops/              the tables of operations
    numpy_protocol    Tensors in numpy's own functions
    creation          tensors from data, filled or random
    function          ag.Function: gradients written by hand
    checkpoint        functions that are recomputed in backward
    display           a tensor in a notebook

A module imports those above it; only `graph` names the Tensor of its hooks, by a type-only import.
Nothing here knows of asyncio, sockets, threads or other workers; `dist` builds on `graph`, `sweep`
and `backward`.

`NAMES` holds every operation by its public name; they are attributes of this package too.
"""

from __future__ import annotations

from aiograd.autograd import display as display  # gives Tensor its card
from aiograd.autograd.backward import backward as backward
from aiograd.autograd.backward import grad as grad
from aiograd.autograd.creation import arange as arange
from aiograd.autograd.creation import empty as empty
from aiograd.autograd.creation import empty_like as empty_like
from aiograd.autograd.creation import eye as eye
from aiograd.autograd.creation import from_numpy as from_numpy
from aiograd.autograd.creation import full as full
from aiograd.autograd.creation import full_like as full_like
from aiograd.autograd.creation import linspace as linspace
from aiograd.autograd.creation import ones as ones
from aiograd.autograd.creation import ones_like as ones_like
from aiograd.autograd.creation import rand as rand
from aiograd.autograd.creation import rand_like as rand_like
from aiograd.autograd.creation import randint as randint
from aiograd.autograd.creation import randint_like as randint_like
from aiograd.autograd.creation import randn as randn
from aiograd.autograd.creation import randn_like as randn_like
from aiograd.autograd.creation import tensor as tensor
from aiograd.autograd.creation import zeros as zeros
from aiograd.autograd.creation import zeros_like as zeros_like
from aiograd.autograd.grad_mode import enable_grad as enable_grad
from aiograd.autograd.grad_mode import is_grad_enabled as is_grad_enabled
from aiograd.autograd.grad_mode import no_grad as no_grad
from aiograd.autograd.names import fft as fft
from aiograd.autograd.names import linalg as linalg
from aiograd.autograd.names.operations import *  # noqa: F403  the names are in its stub
from aiograd.autograd.op import OPS as OPS
from aiograd.autograd.op import op as op
from aiograd.autograd.ops import NAMES as NAMES
from aiograd.autograd.ops.torch_names import DTYPES as DTYPES
from aiograd.autograd.random import manual_seed as manual_seed
from aiograd.autograd.tensor import Tensor as Tensor

MAKERS = (
    "tensor", "from_numpy", "zeros", "ones", "full", "empty", "eye", "arange", "linspace",
    "rand", "randn", "randint", "zeros_like", "ones_like", "full_like", "empty_like",
    "rand_like", "randn_like", "randint_like",
)  # fmt: skip
