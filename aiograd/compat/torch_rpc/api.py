"""Calls, references, gathering and shutdown: `torch.distributed.rpc.api`.

Names with an underscore are here because programs use them: PyTorch Geometric, GraphLearn and
torchrl gather with `_all_gather`, torch's own tests replace some of them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc.api import _thread_local_var
from torch.distributed.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import _internal_rpc_pickler

from aiograd.compat.torch_rpc import messages, process, rref
from aiograd.compat.torch_rpc.failures import NOT_INITIALIZED, translate
from aiograd.compat.torch_rpc.futures import follow, wait_all
from aiograd.compat.torch_rpc.process import LocalWorker
from aiograd.compat.torch_rpc.rref import RRef
from aiograd.errors import AiogradError
from aiograd.rpc.api import Latch
from aiograd.rpc.future import Future as AiogradFuture
from aiograd.rref import remote as aiograd_remote

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("aiograd.compat.torch_rpc")

PyRRef = RRef

# Seconds after which a worker that is gone does not come back: a broken connection may, for 3 s.
LOST_AFTER = 5.0
# Whether a graceful shutdown leaves references that are still in use alone. torch's tests set it.
_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler

_get_current_rpc_agent = process.current
_is_current_rpc_agent_set = process.is_set


def _set_and_start_rpc_agent(agent: Any) -> None:
    process.use(agent)


def _reset_current_rpc_agent() -> None:
    process.use(None)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle calls with another pickler, inside of the block."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: F) -> F:
    """Let a function raise a clear error before `init_rpc` and after `shutdown`."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not process.is_set():
            raise RuntimeError(NOT_INITIALIZED)
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


# ── workers ─────────────────────────────────────────────────────────────────────────────────────


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> Any:
    """Look a worker up by its name; without one, this worker."""
    return process.current().get_worker_info(worker_name)


def _to_worker_info(to: Any) -> Any:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def get_rpc_timeout() -> float:
    """Return the seconds that a call may take if it says nothing else; 0 is for ever."""
    return float(process.current().timeout)


def _set_rpc_timeout(seconds: float) -> None:
    process.current().timeout = float(seconds)


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


@_require_initialized
def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call `func(*args, **kwargs)` on worker `to` and wait for its result."""
    worker, name, message = _prepare(to, func, args, kwargs)
    agent = worker.agent
    source: AiogradFuture[Any] = AiogradFuture(loop=agent.loop)
    ended = Latch(source)
    serve = messages.serve_async if messages.is_async(func) else messages.serve
    try:
        agent.call(
            name,
            serve,
            message,
            timeout=worker.seconds(timeout),
            frame=sys._getframe(1),
            future=source,
        )
        with contextlib.suppress(Exception):  # `outcome` raises it, as torch does
            ended.wait(agent)
    except AiogradError as error:
        raise translate(error) from error
    return messages.outcome(source, _internal_rpc_pickler)


@_require_initialized
def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call `func(*args, **kwargs)` on worker `to`; return a `torch.futures.Future`."""
    worker, name, message = _prepare(to, func, args, kwargs)
    agent = worker.agent
    source: AiogradFuture[Any] = AiogradFuture(loop=agent.loop)
    future = follow(agent, source, lambda ended: messages.outcome(ended, _internal_rpc_pickler))
    serve = messages.serve_async if messages.is_async(func) else messages.serve
    try:
        agent.call(
            name,
            serve,
            message,
            timeout=worker.seconds(timeout),
            frame=sys._getframe(1),
            future=source,
        )
    except AiogradError as error:
        raise translate(error) from error
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@_require_initialized
def remote(
    to: Any,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call `func(*args, **kwargs)` on worker `to` and leave the result there: a reference to it."""
    worker, name, message = _prepare(to, func, args, kwargs)
    create = messages.create_async if messages.is_async(func) else messages.create
    seconds = worker.seconds(timeout)
    try:
        made = aiograd_remote(name, create, message, timeout=seconds)
    except AiogradError as error:
        raise translate(error) from error
    return rref.made_by_remote(made, seconds)


def _prepare(
    to: Any, func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[LocalWorker, str, messages.Message]:
    if not callable(func):
        raise TypeError("function should be callable.")
    worker = process.current()
    if not isinstance(worker, LocalWorker):
        raise RuntimeError(
            f"calls through {type(worker).__name__}, a backend that this program registered, are "
            "not supported: leave backend= out"
        )
    if _get_should_profile():
        warnings.warn(
            "the legacy profiler is not supported and sees no calls: use aiograd.profile()",
            stacklevel=4,
        )
    name = _to_worker_info(to).name
    message = messages.pack_call(func, args or (), kwargs or {}, _default_pickler)
    return worker, name, message


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for every `rpc_async` made in it by this thread."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# ── gathering ───────────────────────────────────────────────────────────────────────────────────


class AllGatherStates:
    """One gathering: what has arrived, and whether all of it has."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
# Gatherings among the same workers pair up in the order of their calls.
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = (
    collections.defaultdict(AllGatherStates)
)


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not process.is_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    with _all_gather_dict_lock:
        expected = worker_names or _ALL_WORKER_NAMES
        if worker_name not in expected:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if expected == states.gathered_objects.keys():
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange a value with all workers, or those named; returns the values by name.

    The one whose name comes first leads: it collects the values and sends them to the others.
    """
    names = set(worker_names) if worker_names else _ALL_WORKER_NAMES
    leader, me = min(names), process.current().get_worker_info().name
    with _all_gather_dict_lock:
        together = "".join(sorted(names))
        number = _all_gather_sequence_id.get(together, 0)
        _all_gather_sequence_id[together] = number + 1
        sequence_id = together + str(number)
    # How long a call may take, and how long the others may take to arrive (None: for ever).
    patience: float | None = None
    if timeout == UNSET_RPC_TIMEOUT:
        timeout = get_rpc_timeout()
    elif timeout != DEFAULT_SHUTDOWN_TIMEOUT:
        patience = timeout
    if me == leader:
        _gather_to_leader(sequence_id, me, obj, names)
    else:
        rpc_sync(leader, _gather_to_leader, (sequence_id, me, obj, names), timeout=timeout)
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    _wait_event(states.proceed_signal, patience, names, leader)
    if me == leader:
        _send_gathered(names - {leader}, sequence_id, states.gathered_objects, timeout)
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states.pop(sequence_id)
    return states.gathered_objects


def _wait_event(
    event: threading.Event, seconds: float | None, names: set[str], leader: str
) -> None:
    """Wait until all values are there; RuntimeError if one of the workers is lost for good."""
    worker = process.current()
    agent, me = worker.agent, worker.name
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    # No call to them is under way, so nobody else would notice that one of them is silent.
    agent.from_thread(agent.links.expect, names - {me})
    try:
        _wait_while_present(event, deadline, names, leader)
    finally:
        agent.from_thread(agent.links.expect, names - {me}, -1)


def _wait_while_present(
    event: threading.Event, deadline: float, names: set[str], leader: str
) -> None:
    worker = process.current()
    agent, me = worker.agent, worker.name
    gone: dict[str, float] = {}  # workers that are lost or silent, and since when
    with agent.pool.blocked():  # it may be a thread that others need meanwhile
        while not event.wait(timeout=min(0.2, max(0.0, deadline - time.monotonic()))):
            now = time.monotonic()
            if now >= deadline:
                return
            # No members any more are those that were lost, and those that left without waiting.
            present = {info.name for info in worker.worker.workers() if not info.suspect}
            gone = {name: gone.get(name, now) for name in names - present - {me}}
            # Who has the values may leave before they arrive here; the leader leaves after that.
            patience = LOST_AFTER if leader in gone or me == leader else 3 * LOST_AFTER
            lost = [name for name, since in gone.items() if now - since > patience]
            if lost:
                raise RuntimeError(f"lost {', '.join(sorted(lost))} while waiting for all workers")


def _send_gathered(
    followers: set[str], sequence_id: str, gathered: dict[str, Any], timeout: float
) -> None:
    calls = {
        name: rpc_async(name, _broadcast_to_followers, (sequence_id, gathered), timeout=timeout)
        for name in followers
    }
    errors = []
    for name, call in calls.items():
        try:
            call.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather "
            f"after {timeout:.2f} seconds. The first exception is {errors[0][1]}"
        )


@_require_initialized
def _barrier(worker_names: Any) -> None:
    """Wait until every worker named has reached this barrier; a failure is logged."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# ── the end ─────────────────────────────────────────────────────────────────────────────────────


def _delete_all_user_and_unforked_owner_rrefs(*_: Any) -> None:
    """Release the references of this process to values elsewhere."""
    rref.release_users()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave; graceful: when all workers want to and no call is under way. 0 is no time limit."""
    worker = process.current()
    leak: RuntimeError | None = None
    try:
        if graceful and isinstance(worker, LocalWorker):
            if worker.is_static_group:
                _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            leak = _find_leak()
            worker.close(graceful=True, timeout=timeout or math.inf)
    finally:
        _finalize_shutdown()
    if leak is not None:
        raise leak


def _find_leak() -> RuntimeError | None:
    """Return what is wrong with references that are still in use; None if it does not matter."""
    users = [] if _ignore_rref_leak else rref.live_users()
    if not users:
        return None
    shown = ", ".join(map(str, users[:3]))
    return RuntimeError(f"Leaking RRef: {len(users)} still in use at shutdown: {shown}")


def _finalize_shutdown() -> None:
    worker = process.current()
    try:
        if isinstance(worker, LocalWorker):
            worker.close(graceful=False, timeout=0)
            worker.end()
    finally:
        process.use(None)
        # Not at the next start: a faster worker's value may arrive before `init_rpc` returns here.
        _all_gather_sequence_id.clear()
        _all_gather_sequence_id_to_states.clear()


def _rref_context_get_debug_info() -> dict[str, str]:
    """Give the counters of references under torch's names."""
    return rref.debug_info()


def _get_should_profile() -> bool:
    """Tell whether the legacy profiler runs; it sees nothing of calls."""
    legacy = torch._C._profiler.ActiveProfilerType.LEGACY
    return bool(
        torch.autograd._profiler_enabled() and torch._C._autograd._profiler_type() == legacy
    )


def enable_gil_profiling(flag: bool) -> None:
    """Accept torch's switch; the time spent waiting for the GIL is not measured and shows as 0."""
    process.current().profiles_gil = bool(flag)
