"""`torch.distributed.rpc` on aiograd: one changed import, or none.

    import aiograd.compat.torch_rpc as rpc                   # was: torch.distributed.rpc
    from aiograd.compat.torch_rpc import autograd            # was: torch.distributed.autograd
    from aiograd.compat.torch_rpc.optim import DistributedOptimizer

    python -m aiograd.compat.torch_rpc program.py ARGS       # an unmodified program

The same names, blocking, with `torch.futures.Future`s. Behind them are an aiograd worker on a loop
in a thread of its own, calls, references and gradients of aiograd.

    api          calls, references, gathering, shutdown: torch.distributed.rpc.api
    rref         torch's RRef around aiograd's
    messages     a pickle, its tensors, its references; what runs at the callee
    futures      torch futures that aiograd completes
    process      the worker of this process and its loop
    meeting      finding each other through torch's store
    failures     torch's errors in place of ours
    autograd     torch.distributed.autograd: context, backward, get_gradients
    graphs       the graph of a context as torch shows it
    optim        DistributedOptimizer over torch.optim
    nn           RemoteModule
    install      the drop-in in the place of torch's modules
    program      an unmodified program as the main module
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_rpc import RpcAgent, RpcBackendOptions, WorkerInfo
from torch.distributed.rpc import (
    TensorPipeRpcBackendOptions,
    backend_registry,
    constants,
    functions,
    internal,
    options,
)

import aiograd.torch  # noqa: F401 - torch tensors travel with their graphs
from aiograd.compat.torch_rpc import api, process
from aiograd.compat.torch_rpc.api import (
    AllGatherStates,
    PyRRef,
    RRef,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    _wait_all,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from aiograd.compat.torch_rpc.meeting import meet
from aiograd.compat.torch_rpc.process import LocalWorker
from aiograd.torch.stages import always_in_threads

__all__ = [
    "AllGatherStates",
    "BackendType",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_set_rpc_timeout",
    "_wait_all",
    "api",
    "backend_registry",
    "constants",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger("aiograd.compat.torch_rpc")

BackendType = backend_registry.BackendType
_get_current_rpc_agent = process.current
_is_current_rpc_agent_set = process.is_set

TensorPipeAgent = LocalWorker  # what programs ask the current agent to be

# How often this process has called `init_rpc`: keys of one start must not meet those of the next.
_init_counter = 0
_init_counter_lock = threading.Lock()
_rendezvous: Any = None  # torch's store lives as long as this generator


def is_available() -> bool:
    """Tell whether RPC can be used: always, where torch has its distributed package."""
    return bool(dist.is_available())


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start the worker of this process and join the others; returns when all are there.

    They meet through torch's store, as `rpc_backend_options.init_method` says: `env://` (also set
    by torchrun), `tcp://`, `file://`. Without `world_size` others may join later.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None and rpc_backend_options is not None:
        backend = _backend_of(rpc_backend_options)
    if backend is None:
        backend = backend_registry.BackendType.TENSORPIPE
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    store = _open_store(rank, world_size, rpc_backend_options)
    from aiograd.compat.torch_rpc import autograd

    autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_of(given: Any) -> Any:
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(backend_registry.construct_rpc_backend_options(candidate))):
            if candidate.name != "TENSORPIPE":
                logger.warning(
                    "RPC was initialized with no explicit backend but with options corresponding "
                    "to %s, hence that backend will be used instead of the default.",
                    candidate,
                )
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _open_store(rank: int, world_size: int | None, given: Any) -> Any:
    global _init_counter, _rendezvous
    if not world_size:
        store = dist._create_store_from_options(given, rank)
    else:
        _rendezvous = dist.rendezvous(given.init_method, rank=rank, world_size=world_size)
        store, _, _ = next(_rendezvous)
    store.set_timeout(timedelta(seconds=given.rpc_timeout or constants.DEFAULT_RPC_TIMEOUT_SEC))
    with _init_counter_lock:
        store = dist.PrefixStore(f"rpc_prefix_{_init_counter}", store)
        _init_counter += 1
    return store


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    if process.is_set():
        raise RuntimeError("RPC is already initialized")
    if backend.name == "TENSORPIPE":
        agent: Any = _start(store, name, rank, world_size, rpc_backend_options)
    else:  # the program's own: torch's registry knows how it starts
        agent = backend_registry.init_backend(
            backend,
            store=store,
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=rpc_backend_options,
        )
    api._init_rpc_states(agent)


def _start(store: Any, name: str, rank: int, world_size: int | None, given: Any) -> LocalWorker:
    if not isinstance(given, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, got {given}"
        )
    _refuse_devices(given)
    always_in_threads()
    WorkerInfo(name, rank)  # raises what torch does for a malformed name
    meeting = meet(store, name, rank, world_size, _own_host(given, world_size is None))
    worker = LocalWorker(name, rank, world_size, given)
    process.use(worker)  # calls may arrive before `start` returns
    try:
        worker.start(meeting)
    except BaseException:
        process.use(None)
        raise
    return worker


def _refuse_devices(given: Any) -> None:
    if given.device_maps or any(device.type != "cpu" for device in given.devices or ()):
        raise ValueError(
            "device_maps and devices other than the CPU are not supported by aiograd's drop-in: "
            "move tensors to the CPU before they are sent"
        )


def _own_host(given: Any, is_open: bool) -> str:
    """Say how other hosts reach this one, if it is rank 0: as they reach torch's store.

    In an open group who will come is not known; a file says that all share this host's disk.
    """
    import os
    import socket
    from urllib.parse import urlparse

    url = urlparse(given.init_method)
    if url.scheme == "tcp" and url.hostname:
        return str(url.hostname)
    if url.scheme == "file" and is_open:
        return "localhost"
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _server_process_global_profile(*args: Any, **kwargs: Any) -> Any:
    """Refuse: the profiler of calls from all workers is a part of the legacy one."""
    raise RuntimeError(
        "the legacy profiler is not supported by aiograd's drop-in: use aiograd.profile() to see "
        "the calls"
    )


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    from aiograd.compat.torch_rpc import autograd

    info = _rref_context_get_debug_info()
    info.update(process.current().get_debug_info())
    info.update(autograd._get_debug_info())
    return info
