"""How exceptions cross the wire: as themselves, with cause, members, notes, and where from.

Each exception of the chain is encoded on its own, so that one that cannot travel or cannot be
rebuilt spoils only itself: it arrives as `RemoteError`. The receiver adds a note with the function,
the worker and the remote traceback. Between partners `plain_faults` takes over.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudpickle import cloudpickle

from aiograd.errors import RemoteError
from aiograd.rpc import plain_exceptions
from aiograd.rpc.extension import Departure
from aiograd.rpc.plain_exceptions import text_of as _text
from aiograd.rpc.plain_exceptions import type_name as _type_name
from aiograd.wire.safecodec import DataCodec

if TYPE_CHECKING:
    from aiograd.wire.codec import Codec

_TEXT = 64 * 1024  # of a traceback; beyond that nobody reads
_COPIED = 1 << 20  # bytes of an error with tensors or large arrays; beyond that its text must do
_CHAIN = 16  # exceptions of a chain or group that are followed
_OURS = "aiograd.rpc."  # modules whose frames tell a reader nothing about the failed function

# Not an Exception, or meaningful only to the machinery that would catch it at the caller.
_NEVER = (StopIteration, StopAsyncIteration, asyncio.CancelledError)


class Fault(NamedTuple):
    """One exception as plain data."""

    pickled: bytes | None  # None: it cannot travel
    type_name: str
    message: str
    notes: tuple[str, ...]
    cause: Fault | None
    context: Fault | None
    suppress: bool
    members: tuple[Fault, ...] | None  # of an exception group, whose `pickled` is its class


def describe(codec: Codec | DataCodec, error: BaseException, departure: Any) -> Any:
    """Take an exception apart. Never raises, whatever its methods do."""
    if isinstance(codec, DataCodec):
        return plain_exceptions.describe(codec, error)
    return _describe(codec, error, departure, set())


def _describe(codec: Codec, error: BaseException, departure: Any, seen: set[int]) -> Fault:
    seen.add(id(error))

    def follow(other: BaseException | None) -> Fault | None:
        if other is None or id(other) in seen or len(seen) >= _CHAIN:
            return None
        return _describe(codec, other, departure, seen)

    members: tuple[Fault, ...] | None = None
    if isinstance(error, BaseExceptionGroup):
        members = tuple(
            _describe(codec, each, departure, seen) for each in error.exceptions[:_CHAIN]
        )
    return Fault(
        _pickled(codec, error, departure, group=members is not None),
        _type_name(error),
        _text(error),
        tuple(str(note) for note in getattr(error, "__notes__", ()) if isinstance(note, str)),
        follow(error.__cause__),
        follow(error.__context__) if error.__cause__ is None else None,
        bool(error.__suppress_context__),
        members,
    )


def _pickled(codec: Codec, error: BaseException, departure: Any, group: bool) -> bytes | None:
    if (not isinstance(error, Exception) or isinstance(error, _NEVER)) and not group:
        return None
    trial = Departure(departure.to, departure.kind)  # undone unless the bytes are used
    try:
        value: Any = (
            (type(error), error.message) if isinstance(error, BaseExceptionGroup) else error
        )
        payload = codec.encode(value, trial)
        if not (payload.travelled or payload.buffers):
            return payload.data
        trial.cancel()
        if payload.size() > _COPIED:
            return None
        # What it carries comes along as copies, without graph; references are not for pickling.
        copied: bytes = cloudpickle.dumps(value)
        return copied if len(copied) <= _COPIED else None
    except Exception:
        trial.cancel()
        return None


def rebuild(codec: Codec | DataCodec, fault: Any, worker: str) -> Exception:
    """Put an exception together again; RemoteError where that fails."""
    if isinstance(codec, DataCodec):
        return plain_exceptions.rebuild(fault, worker)
    return _rebuild(codec, fault, worker)


def _rebuild(codec: Codec, fault: Fault, worker: str) -> Exception:
    error = _rebuilt(codec, fault, worker)
    try:
        if fault.cause is not None:
            error.__cause__ = _rebuild(codec, fault.cause, worker)
        elif fault.context is not None:
            error.__context__ = _rebuild(codec, fault.context, worker)
        error.__suppress_context__ = fault.suppress
        missing = [n for n in fault.notes if n not in getattr(error, "__notes__", ())]
        for note in missing:
            error.add_note(note)
    except Exception:
        return _remote(fault, worker)
    return error


def _rebuilt(codec: Codec, fault: Fault, worker: str) -> Exception:
    if fault.pickled is None:
        return _remote(fault, worker)
    try:
        value = codec.decode(fault.pickled)
        if fault.members is not None:
            cls, message = value
            value = _group(cls, message, [_rebuild(codec, each, worker) for each in fault.members])
    except Exception as trouble:
        error = _remote(fault, worker)
        error.add_note(f"it could not be rebuilt here: {_type_name(trouble)}: {_text(trouble)}")
        return error
    return value if isinstance(value, Exception) else _remote(fault, worker)


def _group(cls: Any, message: str, members: list[Exception]) -> Exception:
    try:
        group = cls(message, members)
        if isinstance(group, Exception):
            return group
    except Exception:  # a subclass with another constructor
        pass
    return ExceptionGroup(message, members)


def _remote(fault: Fault, worker: str) -> RemoteError:
    text = "\n".join(fault.notes)
    return RemoteError(fault.type_name, fault.message, text, worker)


def annotate(error: Exception, function: str, worker: str, text: str) -> Exception:
    """Say where it happened, in a note that tracebacks show."""
    note = f"raised by {function}() on {worker}:\n{text}"
    if isinstance(error, RemoteError) and not error.traceback_text:
        error.traceback_text = text
        error.args = (error.type_name, error.message, text, error.worker)
    try:
        error.add_note(note)
    except Exception:
        return RemoteError(_type_name(error), _text(error), text, worker)
    return error


def traceback_text(error: BaseException) -> str:
    """The remote traceback, without our own frames at its top. Never raises."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:
        text = f"{_type_name(error)} (its traceback could not be shown)"
    return text if len(text) <= _TEXT else text[: _TEXT // 2] + "\n…\n" + text[-_TEXT // 2 :]
