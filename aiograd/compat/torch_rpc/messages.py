"""What crosses between two torch programs: a pickle, the tensors in it, the references in it.

    caller   pack(PythonUDF(f, args, kwargs)) ─▶ (data, tensors, forks) ─▶ aiograd call of `serve`
    callee   serve ─▶ unpack ─▶ f(*args) ─▶ pack(result) ─▶ … ─▶ caller: unpack

torch's own pickler makes the pickle, so functions and classes go by name, also those of `__main__`:
their globals are shared by all calls, as programs expect. Reducers that a program registered, and
picklers of its own, are honoured. Tensors and references stay outside of the pickle, where aiograd
sees them: tensors take their graph along, references are counted.

Everything here runs in threads of the program or of the worker, never on the loop: a pickle of the
user's may import modules, sleep, or fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch.distributed.rpc import internal
from torch.distributed.rpc.internal import PythonUDF, RemoteException

from aiograd.compat.torch_rpc import process
from aiograd.compat.torch_rpc.failures import CreationFailed, describe, raise_remote, translate
from aiograd.compat.torch_rpc.futures import is_future
from aiograd.dist.context import CURRENT
from aiograd.errors import AiogradError
from aiograd.rpc.agent import current_agent
from aiograd.torch.optim import pinned

Message = tuple[bytes, list[Any], list[Any]]

# References in the message that is being packed or unpacked in this thread. `__getstate__` of a
# user's class may pack another value meanwhile.
_departing: ContextVar[list[Any] | None] = ContextVar("aiograd_torch_departing", default=None)
_arrived: ContextVar[list[Any]] = ContextVar("aiograd_torch_arrived", default=[])  # noqa: B039

ASYNC_MARK: Final = "_wrapped_async_rpc_function"  # of torch's `async_execution`


def depart(fork: Any) -> int | None:
    """Add a reference to the message that is being packed; None if none is."""
    forks = _departing.get()
    if forks is None:
        return None
    forks.append(fork)
    return len(forks) - 1


def arrived(index: int) -> Any:
    """Return a reference of the message that is being unpacked."""
    return _arrived.get()[index]


def pack(value: Any, pickler: Any) -> Message:
    """Pickle a value; its tensors and references stay outside."""
    forks: list[Any] = []
    token = _departing.set(forks)
    try:
        data, tensors = pickler.serialize(value)
    finally:
        _departing.reset(token)
    return data, tensors, forks


def unpack(message: Message, pickler: Any) -> Any:
    """Return the value of a message."""
    data, tensors, forks = message
    token = _arrived.set(forks)
    try:
        return pickler.deserialize(data, tensors)
    finally:
        _arrived.reset(token)


def pack_call(func: Any, args: Any, kwargs: Any, pickler: Any) -> Message:
    """Pickle a call."""
    if CURRENT.get() is not None:
        args, kwargs = with_graph(args), with_graph(kwargs)
    if isinstance(func, torch.jit.ScriptFunction):
        func = ScriptCall(torch._jit_internal._qualified_name(func))
    return pack(PythonUDF(func, args, kwargs), pickler)


class ScriptCall:
    """A function that TorchScript compiled, by its name: the callee has compiled it, too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = torch.jit._state._python_cu.find_function(self.name)
        if found is None:
            raise RuntimeError(f"{self.name} is not compiled by TorchScript on this worker")
        return found(*args, **kwargs)


def with_graph(value: Any) -> Any:
    """Replace Parameters that need a gradient by tensors that lead to them, in plain containers.

    torch's pickler sends a Parameter by its data, which silently cuts its graph.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_graph(each) for each in value])
    if kind is dict:
        return {key: with_graph(each) for key, each in value.items()}
    if isinstance(value, torch.nn.Parameter) and value.requires_grad:
        return value.view_as(value)
    return value


# ── at the callee ───────────────────────────────────────────────────────────────────────────────


def run(message: Message) -> Any:
    """Call the function of a message; return its result, or a RemoteException."""
    try:
        call = unpack(message, internal._internal_rpc_pickler)
        if isinstance(call, AttributeError):  # the function or a class in it is not here
            raise call
        if CURRENT.get() is None:
            return call.func(*call.args, **call.kwargs)
        with pinned():
            return call.func(*call.args, **call.kwargs)
    except Exception as error:
        return describe(error, process.current().get_worker_info())


def answer(value: Any) -> Message:
    """Pack a result; one that cannot travel is an error of the call."""
    if CURRENT.get() is not None:
        value = with_graph(value)
    try:
        return pack(value, internal._internal_rpc_pickler)
    except Exception as error:
        failure = describe(error, process.current().get_worker_info())
        return pack(failure, internal._internal_rpc_pickler)


def serve(data: bytes, tensors: list[Any], forks: list[Any]) -> Message:
    """Run a call; give its result as a message."""
    return answer(run((data, tensors, forks)))


async def serve_async(data: bytes, tensors: list[Any], forks: list[Any]) -> Message:
    """Run a call of an `async_execution` function, without holding a thread until it ends."""
    pool = current_agent().pool
    value = await _outcome(data, tensors, forks)
    message: Message = await pool.run(answer, value)
    return message


def create(data: bytes, tensors: list[Any], forks: list[Any]) -> Any:
    """Run a call whose result stays here."""
    return kept(run((data, tensors, forks)))


async def create_async(data: bytes, tensors: list[Any], forks: list[Any]) -> Any:
    """Run a call of an `async_execution` function whose result stays here."""
    return kept(await _outcome(data, tensors, forks))


def kept(value: Any) -> Any:
    """Return a value that stays here; an exception of its function stays as one."""
    if isinstance(value, RemoteException):
        raise CreationFailed(value.msg, value.exception_type)
    return value


async def _outcome(data: bytes, tensors: list[Any], forks: list[Any]) -> Any:
    """Call a function that returns a future of torch; wait for it on the loop."""
    agent = current_agent()
    loop = agent.loop
    future = await agent.pool.run(run, (data, tensors, forks))
    if isinstance(future, RemoteException):
        return future
    if not is_future(future):
        return RemoteException(
            f"On {process.current().get_worker_info()}:\n"
            "Functions decorated with @rpc.async_function must return a torch.futures.Future "
            f"object, but got {type(future)}",
            RuntimeError,
        )
    ended: asyncio.Future[None] = loop.create_future()

    def done(_: Any) -> None:
        loop.call_soon_threadsafe(_settle, ended)

    future.add_done_callback(done)
    await ended

    def value() -> Any:
        try:
            return future.wait()
        except Exception as error:
            return describe(error, process.current().get_worker_info())

    return await agent.pool.run(value)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# ── at the caller ───────────────────────────────────────────────────────────────────────────────


def outcome(source: asyncio.Future[Any], pickler: Any) -> Any:
    """Return the result of a call that has ended, or raise its error as torch does."""
    try:
        message = source.result()
    except (AiogradError, TimeoutError, ConnectionError) as error:
        raise translate(error) from error
    except asyncio.CancelledError:
        raise RuntimeError("the call was cancelled: this worker has shut down") from None
    found = unpack(message, pickler)
    if isinstance(found, RemoteException):
        raise_remote(found, exact=False)
    return found


def is_async(func: Callable[..., Any]) -> bool:
    """Tell whether torch's `async_execution` marks a function."""
    return hasattr(func, ASYNC_MARK)
