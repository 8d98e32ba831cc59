"""Exceptions on the wire: as themselves, with cause, group members, notes and origin.

    callee                                        caller
    describe(error) ─▶ Fault ──── FAULT frame ──▶ rebuild(fault) ─▶ annotate(…) ─▶ raised by `await`
    traceback_text(error) ──────────────────────▶ the note: function, worker, remote traceback

Each exception of a chain or group is encoded on its own, so that one that cannot be pickled or
rebuilt spoils only itself: it arrives as `RemoteError`. Between partners, which exchange plain data
only, `plain_exceptions` takes over.
"""

from __future__ import annotations

import asyncio
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudpickle import cloudpickle

from aiograd.errors import RemoteError
from aiograd.rpc import plain_exceptions
from aiograd.rpc.extension import Departure
from aiograd.rpc.plain_exceptions import text_of as _text
from aiograd.rpc.plain_exceptions import type_name as _type_name
from aiograd.wire.codec import YES
from aiograd.wire.safecodec import DataCodec

if TYPE_CHECKING:
    from aiograd.wire.codec import Codec

_TEXT = 64 * 1024  # characters of a traceback; nobody reads more
_COPIED = 1 << 20  # bytes of an error with tensors or large arrays; a larger one goes as its text
_CHAIN = 16  # exceptions of a chain or group that are followed
_RAISED = "raised by "  # how our notes begin
_OURS = "aiograd.rpc."  # modules whose frames say nothing about the function that failed

# Raised at the caller, these would end a generator or a task there instead of reporting a failure.
_NEVER = (StopIteration, StopAsyncIteration, asyncio.CancelledError)


class Fault(NamedTuple):
    """One exception as plain data, and the exceptions it leads to."""

    pickled: bytes | None  # None: it cannot be pickled
    type_name: str
    message: str
    notes: tuple[str, ...]
    cause: Fault | None
    context: Fault | None
    suppress: bool
    members: tuple[Fault, ...] | None  # of an exception group, whose `pickled` is its class


def describe(codec: Codec | DataCodec, error: BaseException, departure: Any) -> Any:
    """Return an exception as a `Fault`. Never raises, whatever its methods do."""
    if isinstance(codec, DataCodec):
        return plain_exceptions.describe(codec, error)
    return _describe(codec, error, departure, set())


def _describe(codec: Codec, error: BaseException, departure: Any, seen: set[int]) -> Fault:
    # Chains may be circular (`raise a from b` with b's context a), and long in loops that retry.
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
        # A traceback shows the context only where there is no cause.
        follow(error.__context__) if error.__cause__ is None else None,
        bool(error.__suppress_context__),
        members,
    )


def _pickled(codec: Codec, error: BaseException, departure: Any, group: bool) -> bytes | None:
    if (not isinstance(error, Exception) or isinstance(error, _NEVER)) and not group:
        return None
    # A departure of its own: what a traveller registers for this exception is undone at once if the
    # bytes are not used, without touching the rest of the message.
    trial = Departure(departure.to, departure.kind)
    try:
        # A group goes as its class and message; its members are faults of their own.
        value: Any = (
            (type(error), error.message) if isinstance(error, BaseExceptionGroup) else error
        )
        payload = codec.encode(value, trial)
        if not (payload.travelled == YES or payload.buffers):
            return payload.data
        trial.cancel()
        if payload.size() > _COPIED:
            return None
        # A fault has one pickle and no buffers. So tensors and arrays in it are sent as copies,
        # without graph; a reference cannot be pickled outside a call and makes it a RemoteError.
        copied: bytes = cloudpickle.dumps(value)
        return copied if len(copied) <= _COPIED else None
    except Exception:
        trial.cancel()
        return None


def rebuild(codec: Codec | DataCodec, fault: Any, worker: str) -> Exception:
    """Return the exception that a fault describes; a RemoteError where it cannot be rebuilt."""
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
        # Pickle may have brought them already, in the exception's `__dict__`.
        missing = [n for n in fault.notes if n not in getattr(error, "__notes__", ())]
        for note in missing:
            error.add_note(note)
    except Exception:  # its class refuses attributes or notes
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
    # `__reduce__` may return anything at all.
    return value if isinstance(value, Exception) else _remote(fault, worker)


def _group(cls: Any, message: str, members: list[Exception]) -> Exception:
    # The class as it was raised, where its constructor is that of a group; else the members are
    # what matters.
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
    """Add a note with function, worker and remote traceback; return the exception to raise.

    That is a RemoteError if the exception takes no notes.
    """
    note = f"{_RAISED}{function}() on {worker}:\n{text}"
    # A RemoteError carries the traceback as a fact, too, also when it is pickled again (`args`).
    # One that came through two hops keeps the first, where the error happened.
    if isinstance(error, RemoteError) and not error.traceback_text:
        error.traceback_text = text
        error.args = (error.type_name, error.message, text, error.worker)
    try:
        error.add_note(note)
    except Exception:
        return RemoteError(_type_name(error), _text(error), text, worker)
    return error


def explain_import(error: BaseException, what: str, worker: str) -> None:
    """Add a note to the error of an import that a message needed: what to do on which worker."""
    # A module that is there and does not contain the name: in the words of pickle, or, from Python
    # 3.14, as `getattr` of the module raises it.
    incomplete = isinstance(error, AttributeError) and (
        str(error).startswith("Can't get attribute") or isinstance(error.obj, ModuleType)
    )
    if not (incomplete or isinstance(error, ImportError)):
        return
    module = getattr(error, "name", None) if isinstance(error, ImportError) else None
    missing = f" (there is no {module})" if isinstance(error, ModuleNotFoundError) else ""
    error.add_note(
        f"{what} could not be found on {worker}: it travels by reference, so its module must be "
        f"importable there and contain it{missing}; to send it by value, call "
        "cloudpickle.register_pickle_by_value(module) before its first use"
    )


def _remove_notes(shown: traceback.TracebackException) -> None:
    """Leave notes out of a traceback: they travel by themselves.

    In the text as well, the traceback of a nested call would be there twice after two hops, and
    four times after three.
    """
    shown.__notes__ = None
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            _remove_notes(other)


def traceback_text(error: BaseException) -> str:
    """Return the text of a traceback, without our own frames at its top. Never raises."""
    # Only at the top: below a user's function, frames of ours are nested calls, and worth seeing.
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    try:
        shown = traceback.TracebackException(type(error), error, frames, compact=True)
        # What came from another worker has no frames here, and its chain is in its own note.
        notes = shown.__notes__ or ()
        rebuilt = any(isinstance(note, str) and note.startswith(_RAISED) for note in notes)
        _remove_notes(shown)
        text = "".join(shown.format(chain=not rebuilt))
    except Exception:
        text = f"{_type_name(error)} (its traceback could not be shown)"
    return text if len(text) <= _TEXT else text[: _TEXT // 2] + "\n…\n" + text[-_TEXT // 2 :]
