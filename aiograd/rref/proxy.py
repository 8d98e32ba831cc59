"""Calling methods of a value at its owner: `rref.rpc_async().method(...)` and its siblings.

A proxy call is an ordinary call of `call_method` at the owner. Its first argument, the subject,
stands for the value: it arrives as the owner's record, and the call starts when the value is there.
`call_method` only finds the method, which then runs as a function of its kind does: a coroutine and
an `@inline` method on the loop, any other in a thread; those of a serial object in turn.
A guest may call what the value's class exposes, and nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from aiograd.errors import NotAllowed, ProtocolError, RRefError, WorkerLost, WrongThread
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import expose
from aiograd.rpc.callee.exposure import exposed_method
from aiograd.rpc.callee.functions import TASK, Delegate, Target
from aiograd.rpc.future import Future
from aiograd.rpc.scope import current_guest
from aiograd.rref.futures import OwnerFuture, Reference, block_on
from aiograd.rref.refcount.records import OwnerRecord, UserRecord, pack_fork
from aiograd.rref.registry import RRefs
from aiograd.rref.serial import INSIDE, Turn, is_serial
from aiograd.rref.services import owner_lost

if TYPE_CHECKING:
    from aiograd.rpc.extension import Arrival, Departure


class Subject:
    """The value of a reference, as the first argument of a call to its owner."""

    __slots__ = ("rref",)

    def __init__(self, rref: Reference) -> None:
        self.rref: Reference = rref


class SubjectTraveller:
    """Names the value by its fork, without making another one for the message.

    The call itself keeps the reference until it is answered, so the owner knows the fork as long.
    """

    tag = "rref.subject"

    def __init__(self, refs: RRefs) -> None:
        self._refs = refs

    def depart(self, subject: Subject, departure: Departure) -> Any:
        """Return the packed fork, or a fork of its own for a call to ourselves."""
        record = self._refs.usable(subject.rref)
        if isinstance(record, UserRecord):
            return pack_fork(record.id, record.fork, record.known)
        # A value of our own has no fork to name, and may not even be in the table.
        return self._refs.depart(subject.rref, departure)

    def arrive(self, data: Any, arrival: Arrival) -> OwnerRecord | Turn:
        """Return the owner's record, or its turn; the call waits until its value is there."""
        refs = self._refs
        if isinstance(data, bytes):
            record = refs.value_services.found(arrival.sender, data)
        else:
            found = refs.receive(data, arrival.sender)
            if not isinstance(found, OwnerRecord):
                raise ProtocolError(
                    "rref.subject: a method is called on a worker that does not own the value",
                    arrival.sender.name,
                )
            record = found
        if not record.ready:
            turn = refs.turns.take(record)
            # `join` is called while the value is set, so before calls that arrive later.
            arrival.waits.append(refs.value_services.later(record, turn.join))
            return turn
        if is_serial(record.value):
            turn = refs.turns.take(record)
            turn.join(record)
            return turn
        return record


@expose
def call_method(
    subject: OwnerRecord | Turn, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Delegate:
    """Return the method of the value that shall run, at its owner."""
    target, _, turn = find_method(subject, name, "call_method")
    if target.mode != TASK:  # only then can the result be a generator
        target.func = functools.partial(_run_method, target.name, target.func)
    return Delegate(target, tuple(args), kwargs, turn)


@expose
def stream_method(
    subject: OwnerRecord | Turn, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Delegate:
    """Return the generator method of the value that shall run, at its owner."""
    target, method, turn = find_method(subject, name, "stream_method")
    # It is called on the loop, where a generator function only makes its generator. Any other
    # function would do its work there and stop the loop.
    if not (inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)):
        raise TypeError(f"{target.name}() is no generator: call it by rref.rpc_async().{name}()")
    return Delegate(target, tuple(args), kwargs, turn)


call_method.__aiograd_delegate__ = True  # type: ignore[attr-defined]
stream_method.__aiograd_delegate__ = True  # type: ignore[attr-defined]


def find_method(
    subject: OwnerRecord | Turn,
    name: str,
    service: str,
    choose: Callable[[Any, str], Callable[..., Any]] | None = None,
) -> tuple[Target, Callable[..., Any], Turn | None]:
    """Return a method of the value as a target and as it is, and the turn of its call.

    `choose(value, name)` gives the method, or raises where the caller may not call it.
    """
    turn = None
    if type(subject) is Turn:
        turn, subject = subject, subject.record
    # The services are exposed, so a guest may call them with anything.
    if type(subject) is not OwnerRecord:
        raise ProtocolError(
            f"{service}: the subject is {type(subject).__name__}, not a reference",
            current_agent().name,
        )
    # The call waited for the value, or for the error of its function, which is raised here.
    value = subject.result()
    method = (choose or _method)(value, name)
    if turn is not None and turn.queued:
        INSIDE.set(value)
    return Target(method, f"{type(value).__name__}.{name}"), method, turn


def _run_method(kind: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(
            f"{kind}() is a generator, and a proxy call gives one result: read it by "
            f"`async for item in rref.rpc_stream().{kind.rpartition('.')[2]}(...)`"
        )
    return result


def _method(value: Any, name: str) -> Callable[..., Any]:
    # A trusted worker may call anything, callable attributes of the instance included.
    if current_guest() is None:
        return getattr(value, name)  # type: ignore[no-any-return]
    method = exposed_method(value, name)
    if method is None:
        why = f"{type(value).__name__}.{name!s:.80}() is not exposed here"
        raise NotAllowed(why, current_agent().name)
    return method


def method_name(method: Callable[..., Any]) -> str:
    """Return the name by which to call `Class.method` of a value elsewhere."""
    name = getattr(method, "__name__", "")
    # The qualified name of a method is that of its class and its own; of a function defined in
    # another one, `<locals>` stands before its own.
    owner, _, last = getattr(method, "__qualname__", "").rpartition(".")
    if not owner or owner.endswith("<locals>") or last != name or isinstance(method, type):
        raise TypeError(
            f"call() takes a method of the value's class, as in rref.call(Counter.add, 2), not "
            f"{method!r:.80}; for a function use ag.rpc_async(rref.owner(), f, args=(rref,))"
        )
    return name


class _Proxy:
    """Attributes are methods of the value; one proxy may be used for many calls."""

    __slots__ = ("_refs", "_rref", "_timeout")

    def __init__(self, refs: RRefs, rref: Reference, timeout: float | None) -> None:
        self._refs, self._rref, self._timeout = refs, rref, timeout

    # Any name is a method: whether the value has it is known at the owner only.
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._rref!r}>"

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _owner(self) -> str:
        """Return the owner's name; raises if the reference cannot be used."""
        record = self._refs.usable(self._rref)
        if isinstance(record, UserRecord):
            return self._refs.messenger.reach(record.owner)
        return self._refs.agent.name

    def begin(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        service: Callable[..., Delegate] = call_method,
    ) -> Future[Any]:
        """Start a call of a method; `frame` is the call site, `service` finds it at the owner."""
        rref, refs, owner = self._rref, self._refs, self._owner()
        record = rref.record
        if type(record) is OwnerRecord and record.ready and record.value is not None:
            self._check_turn(record.value, name)
        # It keeps the reference until the answer: a release must not overtake the call.
        answer = OwnerFuture(loop=refs.agent.loop)
        answer.rref = rref
        refs.agent.call(
            owner,
            service,
            (Subject(rref), name, args, kwargs),
            timeout=self._timeout,
            frame=frame,
            future=answer,
        )
        answer.info.name = name  # in errors and traces, not "call_method"
        if isinstance(rref.record, UserRecord):
            answer.follow(rref.record)
        return answer

    def _check_turn(self, value: Any, name: str) -> None:
        """Raise in a method of a serial object that calls another one and would wait for it."""
        if INSIDE.get() is value:
            raise RRefError(
                f"{type(value).__name__} is serial: {name}() would wait for the method that calls "
                f"it. Call self.{name}(), or rref.remote().{name}() without waiting for it",
                self._refs.agent.name,
            )


class AsyncProxy(_Proxy):
    """`await rref.rpc_async().method(...)`."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        # The frame of user code: `functools.partial` has none of its own.
        return self.begin(name, args, kwargs, sys._getframe(1))


class SyncProxy(_Proxy):
    """`rref.rpc_sync().method(...)`, off the loop."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            raise WrongThread("this is an event loop: await rref.rpc_async().method(...)")
        return block_on(self._refs.agent, self.begin(name, args, kwargs, sys._getframe(1)))


class RemoteProxy(_Proxy):
    """`rref.remote().method(...)`: the result stays at the owner."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Reference:
        rref, owner = self._rref, self._owner()
        self._check(name)
        return self._refs.remote(
            owner,
            call_method,
            (Subject(rref), name, args, kwargs),
            timeout=self._timeout,
            frame=sys._getframe(1),
            subject=rref,
        )

    def _check(self, name: str) -> None:
        """Raise AttributeError for an unknown attribute, where finding out does not stop a loop.

        On a loop the new reference will say it.
        """
        rref = self._rref
        record = rref.record
        if isinstance(record, OwnerRecord):
            if record.ready and record.error is None and not hasattr(record.value, name):
                getattr(record.value, name)  # raises with the text of the value's class
            return
        known = rref.type_future
        # Only a yes of the class is an answer: an instance may have more attributes.
        answered = known is not None and known.done() and not known.cancelled()
        if known is not None and answered and hasattr(known.result(), name):
            return
        if asyncio._get_running_loop() is not None:
            return
        refs = self._refs
        # No variable holds the future: the traceback of its error would hold this frame, the frame
        # the future, and that the reference.
        if not block_on(refs.agent, refs.ask(rref, "rref.has", name, timeout=self._timeout)):
            raise AttributeError(f"the value on {record.owner.name} has no attribute {name!r}")


class StreamProxy(_Proxy):
    """`async for item in rref.rpc_stream().method(...)`: a generator method, item by item."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> OwnerStream:
        refs, owner = self._refs, self._owner()
        if not refs.agent.here():
            raise WrongThread("a stream is read on the worker's loop, not in a thread")
        arguments = (Subject(self._rref), name, args, kwargs)
        stream = refs.agent.stream(owner, stream_method, arguments, timeout=self._timeout)
        return OwnerStream(stream, self._rref)


class OwnerStream(AsyncIterator[Any]):
    """A `Stream` from the owner of a reference, which it keeps: a release must not overtake it."""

    def __init__(self, stream: Any, rref: Reference) -> None:
        self._stream, self._rref = stream, rref

    def __aiter__(self) -> OwnerStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except WorkerLost as error:
            lost = owner_lost(error) if error.worker == self._rref.owner_name() else error
            if lost is error:
                raise
            raise lost from None

    async def aclose(self) -> None:
        """Stop reading; the generator at the owner is closed."""
        await self._stream.aclose()

    async def __aenter__(self) -> OwnerStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
