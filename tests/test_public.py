"""The public face: these names and no others, each with something to say."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys

import pytest

import aiograd as ag

# API.md, section by section; operations and makers follow numpy's names and are checked below.
NAMES = """
    init_rpc join Invitation shutdown Worker LocalCluster current_worker get_worker_info WorkerInfo
    workers Options RetryPolicy
    barrier all_gather debug_info
    rpc_async remote rpc_sync run_sync rpc_stream Group inline expose idempotent serial Future
    as_completed progress Handle Stream TLS
    profile span start_profile stop_profile Profile metrics measure_lag inspect Snapshot Dashboard
    RRef boundary
    context Context backward get_gradients current_context get_context grad checkpoint
    GraphCutWarning
    Tensor no_grad enable_grad is_grad_enabled op Function once_differentiable manual_seed sparse
    testing
    autograd nn optim cluster viz errors linalg fft save load
""".split()
MAKERS = """
    tensor from_numpy zeros ones full empty eye arange linspace rand randn randint
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like
""".split()
ERRORS = """
    AiogradError GradError RpcError DeadlineExceeded WorkerLost OwnerLost WorkerUnresponsive
    UnknownWorker WorkerClosed Overloaded RemoteError SerializationError SecurityError AuthError
    NotAllowed InsecureTransport ProtocolError RRefError NotOwner RRefExpired RRefReleased RRefLeak
    ContextError UnknownContext NestedContext NoContext BackwardFailed PassUndecided GraphCutWarning
    DuplicateName ForkedProcessError MalformedName MissingGradient PassRefused PassTimedOut
    StaleGradients WrongLoopError WrongThread
""".split()


def test_the_public_names_are_those_of_the_contract():
    assert set(ag.__all__) == {*NAMES, *MAKERS, *ag.autograd.NAMES, *ag.autograd.DTYPES}
    assert len(ag.__all__) == len(set(ag.__all__))
    for name in ag.__all__:
        assert getattr(ag, name) is not None


def test_the_errors_are_those_of_the_contract():
    assert set(ag.errors.__all__) == set(ERRORS)
    classes = {name for name, each in vars(ag.errors).items() if isinstance(each, type)}
    assert {name for name in classes if not name.startswith("_")} == set(ERRORS)
    assert issubclass(ag.errors.DeadlineExceeded, TimeoutError)
    assert issubclass(ag.errors.WorkerLost, ConnectionError)
    assert issubclass(ag.errors.OwnerLost, ag.errors.WorkerLost)
    assert issubclass(ag.errors.WorkerUnresponsive, ag.errors.WorkerLost)
    assert issubclass(ag.errors.UnknownWorker, LookupError)
    assert issubclass(ag.errors.SerializationError, TypeError)
    assert issubclass(ag.errors.SecurityError, PermissionError)
    for name in ("GradError", "RRefError", "ContextError"):
        assert issubclass(getattr(ag.errors, name), RuntimeError)


@pytest.mark.parametrize("name", NAMES)
def test_everything_public_has_a_docstring(name):
    thing = getattr(ag, name)
    assert inspect.getdoc(thing), f"{name} says nothing"


@pytest.mark.parametrize("module", [ag, ag.nn, ag.optim, ag.testing], ids=lambda m: m.__name__)
def test_completion_shows_the_public_names_and_no_others(module):
    shown = {name for name in dir(module) if not name.startswith("__")}
    assert shown == set(module.__all__)


# What Windows does not have, of what a module could use on import.
WITHOUT_POSIX = """
import os, signal, socket, sys
import asyncio, cloudpickle, multiprocessing, numpy, ssl, subprocess, tempfile
for module, names in (
    (signal, "SIGKILL SIGHUP SIGCHLD SIGUSR1 SIGSTOP SIGPIPE pidfd_send_signal pause"),
    (os, "getuid geteuid fork register_at_fork pidfd_open sysconf sched_getaffinity SCHED_BATCH"),
    (os, "sched_getscheduler setsid memfd_create uname statvfs O_NOFOLLOW O_CLOEXEC fchmod"),
    (socket, "AF_UNIX SO_PEERCRED SOCK_SEQPACKET SCM_RIGHTS send_fds recv_fds TCP_USER_TIMEOUT"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in "fcntl resource pwd grp termios uvloop".split():
    sys.modules[name] = None
import aiograd, aiograd.__main__
for name in aiograd.__all__:
    getattr(aiograd, name)
print(aiograd.LocalCluster(2))
"""


def test_the_library_can_be_imported_where_posix_names_are_missing():
    command = [sys.executable, "-c", WITHOUT_POSIX]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "<LocalCluster of 2" in done.stdout, done.stderr


# Each costs milliseconds, or is not a dependency: what needs one imports it when it is used.
LATER = """
    pytest hypothesis torch uvloop opentelemetry safetensors ml_dtypes IPython cryptography
    multiprocessing unittest doctest pdb xml http email.message urllib.request ensurepip sqlite3
    concurrent.futures.process numpy.typing numpy.testing numpy.f2py
    aiograd.nn aiograd.optim aiograd.testing aiograd.viz aiograd.torch aiograd.compat
    aiograd.cluster.launch
""".split()


def test_importing_aiograd_does_not_import_what_is_asked_for_later():
    code = f"import aiograd, sys; print([m for m in {LATER} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_aiograd_takes_few_modules():
    # A measure of its time that does not depend on how busy the machine is: 0.25 s on two slow
    # cores is what 300 modules beside numpy's take.
    code = "import sys, numpy; a = len(sys.modules); import aiograd; print(len(sys.modules) - a)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 340


# As the contract writes them, so that every argument may be given by its name, and by its place
# where no star stands before it. More arguments may follow those.
SIGNATURES = {
    "init_rpc": "name, *, rank, world_size, rendezvous, options",
    "shutdown": "graceful, timeout",
    "LocalCluster": "n_workers, *, processes, names, options",
    "LocalCluster.scale": "n",
    "LocalCluster.restart": "name",
    "LocalCluster.kill": "name",
    "LocalCluster.logs": "name",
    "get_worker_info": "name_or_rank",
    "WorkerInfo": "name, rank",
    "barrier": "names, timeout",
    "all_gather": "value, names, timeout",
    "rpc_async": "to, func, args, kwargs, *, timeout",
    "remote": "to, func, args, kwargs, *, timeout",
    "rpc_sync": "to, func, args, kwargs, *, timeout",
    "rpc_stream": "to, async_gen_func, args, kwargs, *, timeout",
    "run_sync": "awaitable",
    "Group": "names",
    "Group.map": "func, iterable",
    "as_completed": "futures, progress",
    "progress": "iterable, title, total",
    "RRef.rpc_stream": "timeout",
    "manual_seed": "seed",
    "TLS": "cert, key, ca, mutual",
    "RRef": "value",
    "RRef.to_here": "timeout",
    "RRef.rpc_async": "timeout",
    "RRef.remote": "timeout",
    "RRef.rpc_sync": "timeout",
    "RRef.backward": "ctx_or_id, retain_graph",
    "backward": "ctx_or_id, roots, *, retain_graph, create_graph, timeout",
    "get_gradients": "ctx_or_id",
    "get_context": "id",
    "grad": "outputs, inputs, grad_outputs, *, retain_graph, create_graph, allow_unused",
    "autograd.grad": "outputs, inputs, grad_outputs, retain_graph, create_graph, allow_unused",
    "tensor": "data, requires_grad, dtype",
    "Tensor.backward": "gradient, retain_graph, create_graph",
    "sparse.coo_tensor": "indices, values, shape, requires_grad, dtype",
    "testing.gradcheck": "func, inputs",
    "testing.gradgradcheck": "func, inputs",
    "nn.EmbeddingBag.forward": "input, offsets, per_sample_weights",
    "nn.RemoteModule": "to, cls, args, kwargs",
    "nn.Pipeline": "stages, schedule, microbatches",
    "optim.Optimizer": "params, defaults",
    "optim.DistributedOptimizer": "cls, param_rrefs",
    "optim.DistributedOptimizer.step": "ctx_or_id",
    "optim.DistributedOptimizer.clip_grad_norm": "ctx, max_norm",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_names_and_places_of_the_contract(name):
    thing = functools.reduce(getattr, name.split("."), ag)
    found = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    keywords = {p.name for p in found if p.kind is not p.POSITIONAL_ONLY}
    places = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional, _, named = SIGNATURES[name].partition("*, ")
    wanted = positional.strip(", ").split(", ")
    assert places[: len(wanted)] == wanted
    assert {*wanted, *filter(None, named.split(", "))} <= keywords
