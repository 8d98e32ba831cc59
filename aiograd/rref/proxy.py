"""Calling methods of a value at its owner: `rref.rpc_async().method(...)` and its two siblings.

A proxy call is an ordinary call of `call_method` at the owner. Its first argument, the subject,
stands for the value: it arrives as the owner's record, and the call starts when the value is there.
A guest may call what the value's class exposes, and nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from aiograd.errors import NotAllowed, ProtocolError, WrongThread
from aiograd.rpc.api import expose
from aiograd.rpc.callee.exposure import exposed_method
from aiograd.rpc.future import Future
from aiograd.rpc.scope import GUEST, current_agent
from aiograd.rref.futures import OwnerFuture, block_on
from aiograd.rref.refcount.records import OwnerRecord, UserRecord, pack_fork

if TYPE_CHECKING:
    from aiograd.rpc.extension import Arrival, Departure
    from aiograd.rref.registry import RRefs
    from aiograd.rref.rref import RRef


class Subject:
    """The value of a reference, as the first argument of a call to its owner."""

    __slots__ = ("rref",)

    def __init__(self, rref: RRef) -> None:
        self.rref = rref


class SubjectTraveller:
    """Names the value by its fork; the call itself keeps the reference until it is answered."""

    tag = "rref.subject"

    def __init__(self, refs: RRefs) -> None:
        self._refs = refs

    def depart(self, subject: Subject, departure: Departure) -> Any:
        ref = self._refs.usable(subject.rref)
        if isinstance(ref, UserRecord):
            return pack_fork(ref.id, ref.fork, ref.known)
        return self._refs.depart(subject.rref, departure)  # to oneself

    def arrive(self, data: Any, arrival: Arrival) -> OwnerRecord:
        refs = self._refs
        if isinstance(data, bytes):
            owned = refs.value_services.found(arrival.sender, data)
        else:
            found = refs.receive(data, arrival.sender)
            if not isinstance(found, OwnerRecord):
                raise ProtocolError("a method is called where its object is", arrival.sender.name)
            owned = found
        if not owned.ready:
            arrival.waits.append(refs.value_services.later(owned))
        return owned


@expose
def call_method(
    subject: OwnerRecord, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run at the owner: call a method of the value. A coroutine is awaited by the worker."""
    if type(subject) is not OwnerRecord:
        raise ProtocolError("a method is called without its object", current_agent().name)
    value = subject.result()
    result = _method(value, name)(*args, **kwargs)
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(
            f"{type(value).__name__}.{name}() is a generator, and a proxy call gives one result: "
            "return a list, or use ag.rpc_stream with a function that takes the RRef"
        )
    return result


def _method(value: Any, name: str) -> Callable[..., Any]:
    if GUEST.get() is None:
        return getattr(value, name)  # type: ignore[no-any-return]
    method = exposed_method(value, name)
    if method is None:
        why = f"{type(value).__name__}.{name!s:.80}() is not exposed here"
        raise NotAllowed(why, current_agent().name)
    return method


class _Proxy:
    """Attributes are methods of the value; one proxy may be used for many calls."""

    __slots__ = ("_rref", "_timeout")

    def __init__(self, rref: RRef, timeout: float | None) -> None:
        self._rref, self._timeout = rref, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._rref!r}>"

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _begin(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Future[Any]:
        rref, refs = self._rref, self._rref._refs
        refs.usable(rref)
        answer = OwnerFuture(loop=refs.agent.loop)
        answer._rref = rref
        refs.agent.call(
            refs.messenger.reach(rref._ref.owner)
            if isinstance(rref._ref, UserRecord)
            else refs.agent.name,
            call_method,
            (Subject(rref), name, args, kwargs),
            timeout=self._timeout,
            frame=frame,
            future=answer,
        )
        answer._function = name
        if isinstance(rref._ref, UserRecord):
            answer.follow(rref._ref)
        return answer


class AsyncProxy(_Proxy):
    """`await rref.rpc_async().method(...)`."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._begin(name, args, kwargs, sys._getframe(1))


class SyncProxy(_Proxy):
    """`rref.rpc_sync().method(...)`, off the loop."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            raise WrongThread("this is an event loop: await rref.rpc_async().method(...)")
        return block_on(self._rref._refs.agent, self._begin(name, args, kwargs, sys._getframe(1)))


class RemoteProxy(_Proxy):
    """`rref.remote().method(...)`: the result stays at the owner."""

    __slots__ = ()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> RRef:
        rref, refs = self._rref, self._rref._refs
        refs.usable(rref)
        to = (
            refs.messenger.reach(rref._ref.owner)
            if isinstance(rref._ref, UserRecord)
            else refs.agent.name
        )
        self._check(name)
        return refs.remote(
            to,
            call_method,
            (Subject(rref), name, args, kwargs),
            timeout=self._timeout,
            frame=sys._getframe(1),
            subject=rref,
        )

    def _check(self, name: str) -> None:
        """Refuse an unknown attribute at once, where finding out does not stop a loop."""
        rref = self._rref
        ref = rref._ref
        if isinstance(ref, OwnerRecord):
            if ref.ready and ref.error is None and not hasattr(ref.value, name):
                getattr(ref.value, name)
            return
        known = rref._type
        told = known is not None and known.done() and not known.cancelled()
        if known is not None and told and hasattr(known.result(), name):
            return
        if asyncio._get_running_loop() is not None:
            return  # the new reference will say it
        refs = rref._refs
        if not block_on(refs.agent, refs.ask(rref, "rref.has", name, timeout=self._timeout)):
            raise AttributeError(f"the value on {ref.owner.name} has no attribute {name!r}")
