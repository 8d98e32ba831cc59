"""`RRef`: torch's references, around those of aiograd.

aiograd counts references and keeps values; what is torch's own is here: ids as torch numbers
them, blocking methods, proxies that ask for the type of the value first, and torch's errors.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from aiograd.compat.torch_rpc import messages, process
from aiograd.compat.torch_rpc.failures import CreationFailed, raise_remote, translate
from aiograd.compat.torch_rpc.futures import follow
from aiograd.errors import AiogradError, DeadlineExceeded, WorkerClosed
from aiograd.rpc.api import Latch
from aiograd.rpc.future import CallInfo
from aiograd.rpc.future import Future as AiogradFuture
from aiograd.rref import RRef as AiogradRRef

T = TypeVar("T")

# The user references of this process, to be released at a shutdown, as torch does it.
_users: weakref.WeakSet[RRef[Any]] = weakref.WeakSet()


class RRef(Generic[T]):
    """A reference to a value that stays with its owner: `torch.distributed.rpc.RRef`."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        worker = process.current()
        if isinstance(value, RRef):
            raise TypeError("Cannot create an RRef of an RRef: use the one there is")
        self._set(AiogradRRef(value), (worker.rank, worker.new_id()), None)

    def _set(
        self, rref: AiogradRRef[Any], rref_id: tuple[int, int], fork_id: tuple[int, int] | None
    ) -> None:
        self._rref, self._id, self._fork = rref, rref_id, fork_id
        self._created: Any = None  # a torch future, if `remote` made this reference
        self._late: RuntimeError | None = None  # why it may not exist: its creation timed out
        self._type: Any = None  # a torch future of the value's type, once asked for
        self._deleted = False
        if not rref.is_owner():
            _users.add(self)

    # ── ownership ───────────────────────────────────────────────────────────────────────────────

    def owner(self) -> Any:
        """Return the WorkerInfo of the worker that has the value."""
        info = self._rref.owner()
        return WorkerInfo(info.name, info.rank)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self._rref.owner_name()

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return self._rref.is_owner()

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner knows of this reference."""
        return self._rref.confirmed_by_owner()

    # ── value ───────────────────────────────────────────────────────────────────────────────────

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Copy the value here, blocking; at the owner, return the value itself."""
        self._check("to_here()")
        if self.is_owner():
            return self._wait_local(process.current().seconds(timeout))
        message = _call(self.owner_name(), _fetch, self._rref, timeout=timeout)
        return _value(message)  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """Return the value itself; only at its owner."""
        if not self.is_owner():
            me = process.current().get_worker_info()
            assert self._fork is not None
            raise RuntimeError(
                f"For UserRRef(rref_id={_shown(self._id)}, fork_id={_shown(self._fork)}), "
                f"can't call localValue() on user {me}. Call it on owner {self.owner()}"
            )
        if self._deleted:
            self._check("local_value()")
        return self._wait_local(math.inf)

    def _wait_local(self, seconds: float) -> T:
        try:
            future = self._rref.to_here(timeout=seconds)
            return _block(future)  # type: ignore[no-any-return]
        except CreationFailed as error:
            raise_remote(error.remote, exact=True)
        except AiogradError as error:
            raise translate(error) from error

    def _check(self, what: str) -> None:
        """Raise if the reference was deleted by a shutdown, or its creation timed out."""
        if self._deleted or not process.is_set():
            raise RuntimeError(f"{self} has been deleted. Cannot call {what} on it after deletion.")
        if self._late is not None:
            raise RuntimeError(
                f"Cannot call {what} on {self}: RRef creation via rpc.remote() timed out, and it "
                "is possible that the RRef on the owner node does not exist."
            ) from self._late

    def _get_future(self) -> Any:
        """Return the future of the creation, if `remote` made this reference."""
        if self._created is None:
            raise RuntimeError(f"{self} was not made by rpc.remote(): it has no creation future")
        return self._created

    def _get_profiling_future(self) -> NoReturn:
        raise RuntimeError(
            "the legacy profiler is not supported: use aiograd.profile() to see the calls"
        )

    _set_profiling_future = _get_profiling_future

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, asked for once; a future of it if not `blocking`."""
        found = self._type
        if found is None:
            if self.is_owner():
                found = self._type = Future()
                found.set_result(type(self.local_value()))
            else:
                found = _call_async(self.owner_name(), _fetch_type, self._rref, timeout=timeout)
                self._type = found
                # A failure is not remembered, perhaps from right now on: the next use asks again.
                found.add_done_callback(self._forget_failed_type)
        return found.wait() if blocking else found

    def _forget_failed_type(self, found: Any) -> None:
        try:
            found.value()
        except Exception:
            if self._type is found:
                self._type = None

    # ── calling its methods ─────────────────────────────────────────────────────────────────────

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Call a method of the value at its owner, and wait."""
        from aiograd.compat.torch_rpc import api

        return RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Call a method of the value at its owner; the call returns a future."""
        from aiograd.compat.torch_rpc import api

        return RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Call a method of the value at its owner, and leave the result there."""
        from aiograd.compat.torch_rpc import api

        return RRefProxy(self, api.remote, timeout)

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value; at the owner the context may be left out."""
        from aiograd.compat.torch_rpc import autograd

        if self.is_owner():
            autograd.backward_from(self.local_value(), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RuntimeError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the owner has to know "
                "in which context the value was computed"
            )
        what = (self._rref, dist_autograd_ctx_id, retain_graph)
        _value(_call(self.owner_name(), _backward, *what, timeout=UNSET_RPC_TIMEOUT))

    # ── travel ──────────────────────────────────────────────────────────────────────────────────

    def _serialize(self) -> int:
        """Add this reference to the message that is being packed; return its place there."""
        if self._deleted or not process.is_set():
            raise RuntimeError(
                f"{self} has been deleted. Cannot call fork an UserRRef after deletion."
            )
        self._check("fork")
        worker = process.current()
        place = messages.depart((self._rref, self._id, (worker.rank, worker.new_id())))
        if place is None:
            raise RuntimeError(
                "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
            )
        return place

    @classmethod
    def _deserialize(cls, place: int) -> RRef[Any]:
        """Return the reference at a place of the message that is being unpacked."""
        found, rref_id, fork_id = messages.arrived(place)
        rref: RRef[Any] = cls.__new__(cls)
        rref._set(found, rref_id, None if found.is_owner() else fork_id)
        return rref

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RRef._deserialize, (self._serialize(),)

    # ── display ─────────────────────────────────────────────────────────────────────────────────

    def __str__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({_shown(self._id)})"
        return f"UserRRef(RRefId = {_shown(self._id)}, ForkId = {_shown(self._fork)})"

    __repr__ = __str__


def _shown(number: tuple[int, int]) -> str:
    return f"GloballyUniqueId(created_on={number[0]}, local_id={number[1]})"


def made_by_remote(rref: AiogradRRef[Any], seconds: float) -> RRef[Any]:
    """Wrap the reference that a `remote` call gives."""
    worker = process.current()
    number, fork = worker.new_id(), worker.new_id()
    made: RRef[Any] = RRef.__new__(RRef)
    made._set(rref, (worker.rank, number), None if rref.is_owner() else (worker.rank, fork))
    # Weakly: the creation must not keep the reference alive.
    made._created = _follow_creation(rref, weakref.ref(made))
    return made


def _follow_creation(rref: AiogradRRef[Any], made: weakref.ref[RRef[Any]]) -> Any:
    agent = process.current().agent
    source: AiogradFuture[None] = AiogradFuture(loop=agent.loop)
    source.info = CallInfo("RRef creation")

    def finish(ended: Any) -> None:
        try:
            ended.result()
        except CreationFailed:
            return  # the owner has it, and its error: the creation itself went well
        except (AiogradError, asyncio.CancelledError) as error:
            late = translate(error)
            found = made()
            if found is not None and isinstance(error, DeadlineExceeded):
                found._late = RuntimeError(str(late))
            raise late from None

    future = follow(agent, source, finish)
    creation = rref.future()

    def copy(ended: Any) -> None:
        if source.done():
            return
        if ended.cancelled():
            source.set_exception(WorkerClosed(f"{agent.name} was shut down", agent.name))
        elif (error := ended.exception()) is not None:
            source.set_exception(error)
        else:
            source.set_result(None)
        source.exception()  # looked at: nobody else may ask for it

    agent.loop.call_soon_threadsafe(lambda: creation.add_done_callback(copy))
    return future


def release_users() -> None:
    """Release every reference of this process to a value elsewhere; later use is an error."""
    worker = process.current()
    users = list(_users)
    for user in users:
        user._deleted = True
    if users:
        worker.run(_release([user._rref for user in users]))
    _users.clear()


async def _release(rrefs: list[AiogradRRef[Any]]) -> None:
    await asyncio.gather(*(rref.release() for rref in rrefs), return_exceptions=True)


def debug_info() -> dict[str, str]:
    """Give the counters of references under torch's names."""
    worker = process.current()
    counters = worker.worker.debug_info()
    users = live_users()
    pending = sum(1 for user in users if not user.confirmed_by_owner() and user._late is None)
    creating = sum(1 for user in users if user._created is not None and not user._created.done())
    return {
        "num_owner_rrefs": str(counters["owner_rrefs"]),
        "num_pending_futures": str(creating),
        "num_pending_users": str(pending),
        "num_forks": str(counters["owner_rrefs"]),
    }


def live_users() -> list[RRef[Any]]:
    """Return the references of this process to values elsewhere that are still in use."""
    return list(_users)


# ── calls about the value, at its owner ─────────────────────────────────────────────────────────


def _local(rref: AiogradRRef[Any]) -> Any:
    try:
        return rref.local_value()
    except CreationFailed as error:
        raise_remote(error.remote, exact=True)


def _served(work: Callable[[], Any]) -> messages.Message:
    from aiograd.compat.torch_rpc.failures import describe

    try:
        value = work()
    except CreationFailed as error:
        value = error.remote
    except Exception as error:
        value = describe(error, process.current().get_worker_info())
    return messages.answer(value)


def _fetch(rref: AiogradRRef[Any]) -> messages.Message:
    return _served(rref.local_value)


def _fetch_type(rref: AiogradRRef[Any]) -> messages.Message:
    return _served(lambda: type(rref.local_value()))


def _backward(rref: AiogradRRef[Any], context_id: int, retain_graph: bool) -> messages.Message:
    from aiograd.compat.torch_rpc import autograd

    return _served(lambda: autograd.backward_from(_local(rref), context_id, retain_graph))


def _call(to: str, func: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Call one of the functions above and wait."""
    worker = process.current()
    agent = worker.agent
    future: AiogradFuture[Any] = AiogradFuture(loop=agent.loop)
    ended = Latch(future)
    try:
        agent.call(to, func, args, timeout=worker.seconds(timeout), future=future)
        return ended.wait(agent)
    except AiogradError as error:
        raise translate(error) from error


def _call_async(to: str, func: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Call one of the functions above; return a torch future of the value."""
    worker = process.current()
    agent = worker.agent
    source: AiogradFuture[Any] = AiogradFuture(loop=agent.loop)

    def finish(ended: Any) -> Any:
        try:
            return _value(ended.result())
        except AiogradError as error:
            raise translate(error) from error

    future = follow(agent, source, finish)
    agent.call(to, func, args, timeout=worker.seconds(timeout), future=source)
    return future


def _value(message: messages.Message) -> Any:
    """Return the value of an answer; raise an exception of the creating function as it was."""
    from torch.distributed.rpc import internal

    found = messages.unpack(message, internal._internal_rpc_pickler)
    if isinstance(found, internal.RemoteException):
        raise_remote(found, exact=True)
    return found


def _block(future: asyncio.Future[Any]) -> Any:
    """Wait for a future of the loop, in a thread."""
    from aiograd.rpc.api import run_sync

    if future.done() and not future.cancelled():
        return future.result()
    return run_sync(future)


# ── proxies ─────────────────────────────────────────────────────────────────────────────────────


class RRefProxy:
    """Attributes are methods of the value; a call runs at the owner."""

    def __init__(self, rref: RRef[Any], rpc_api: Any, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref, self.rpc_api, self.rpc_timeout = rref, rpc_api, timeout

    def __getattr__(self, name: str) -> Any:
        return partial(_invoke, self.rref, self.rpc_api, name, self.rpc_timeout)


def _invoke(
    rref: RRef[Any], rpc_api: Any, name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    """Call a method at the owner, once the type of the value is known."""
    from aiograd.compat.torch_rpc import api

    def call(type_future: Any) -> Any:
        kind = type_future.value()
        func = _call_method
        scripted = issubclass(kind, torch.jit.ScriptModule | torch._C.ScriptModule)
        # On the class: AttributeError here if there is no such method, before anything is sent.
        if not scripted and messages.is_async(getattr(kind, name)):
            func = _call_async_method
        return rpc_api(rref.owner(), func, args=(rref, name, args, kwargs), timeout=timeout)

    type_future = rref._get_type(timeout=timeout, blocking=False)
    if rpc_api is not api.rpc_async:
        type_future.wait()
        return call(type_future)
    result = Future()

    def copy(ended: Any) -> None:
        try:
            value = ended.value()
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    def proceed(known: Any) -> None:
        try:
            call(known).add_done_callback(copy)
        except Exception as error:
            result.set_exception(error)

    type_future.add_done_callback(proceed)
    return result


def _call_method(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)


def _call_async_method(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)


_call_async_method._wrapped_async_rpc_function = _call_method  # type: ignore[attr-defined]
