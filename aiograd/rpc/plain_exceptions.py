"""Exceptions between partners, which exchange plain data only: names and texts, never code.

    fault = (name, text, arguments or None, cause or None)

Our own errors and Python's builtin ones are rebuilt as themselves from an allow-list, with plain
data as arguments; everything else arrives as `RemoteError`. Tracebacks and notes are not sent: they
show source lines, paths and values that a partner must not see.
"""

from __future__ import annotations

import asyncio
import builtins
from typing import Any, Final

from aiograd.errors import AiogradError, ProtocolError, RemoteError, SerializationError
from aiograd.wire.safecodec import DataCodec

PlainFault = tuple[str, str, tuple[Any, ...] | None, Any]

_CAUSES: Final = 8  # of a chain; also bounds the recursion that a peer can cause
_TEXT: Final = 4096  # characters
_OURS: Final = "aiograd."
# Raised at the caller, these would end a generator or a task there instead of reporting a failure;
# a group would bring its members, which are no plain data.
_NEVER: Final = (StopIteration, StopAsyncIteration, asyncio.CancelledError, BaseExceptionGroup)


def describe(codec: DataCodec, error: BaseException, left: int = _CAUSES) -> PlainFault:
    """Return an exception as plain data. Never raises, whatever its methods do."""
    cause = error.__cause__
    return (
        _readable(type_name(error)),
        _readable(text_of(error)),
        _arguments(codec, error),
        describe(codec, cause, left - 1) if cause is not None and left else None,
    )


def rebuild(fault: Any, worker: str, left: int = _CAUSES) -> Exception:
    """Return the exception that a partner described; ProtocolError if the fault is malformed."""
    try:
        name, text, arguments, cause = fault
    except (TypeError, ValueError):
        raise ProtocolError("FAULT: expected name, text, arguments and cause", worker) from None
    if type(name) is not str or type(text) is not str:
        raise ProtocolError("FAULT: name and text must be str", worker)
    error = _known(name, arguments) or RemoteError(name[:200], text[:_TEXT], "", worker)
    if cause is not None and left:
        error.__cause__ = rebuild(cause, worker, left - 1)
    return error


def type_name(error: BaseException) -> str:
    """Return the name of an exception's type as tracebacks show it, with its module."""
    cls = type(error)
    module = "" if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return the message of an exception. Never raises, whatever its `__str__` does."""
    try:
        return str(error)[:_TEXT]
    except Exception as trouble:
        return f"<its text could not be made: {type(trouble).__name__}>"


def _arguments(codec: DataCodec, error: BaseException) -> tuple[Any, ...] | None:
    """Return what rebuilds the exception; None if its type is not on the allow-list."""
    # By identity: a class of the user's with the name of a known one must not pass for it.
    if _find(type_name(error)) is not type(error):
        return None
    try:
        payload = codec.encode(error.args, None)
    except (SerializationError, ValueError):  # such as text that is no Unicode
        return None
    return error.args if len(payload.data) <= _TEXT and not payload.travelled else None


def _readable(text: str) -> str:
    """Return text as UTF-8 can hold it: file names may contain lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def _known(name: str, arguments: Any) -> Exception | None:
    cls = _find(name)
    if cls is None or type(arguments) is not tuple:
        return None
    # The arguments come from the peer: the allow-listed constructor runs, and nothing else.
    try:
        return cls(*arguments)
    except Exception:  # these are not its arguments
        return None


def _find(name: str) -> type[Exception] | None:
    """Return the exception class of that name, of Python or of ours; imports nothing."""
    cls = _ours().get(name) if name.startswith(_OURS) else vars(builtins).get(name)
    if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _NEVER):
        return cls
    return None


def _ours() -> dict[str, type[Exception]]:
    # Computed each time, because layers define subclasses in modules imported later. Classes of
    # users that inherit from ours are left out by their module.
    found: dict[str, type[Exception]] = {}
    waiting: list[type[Exception]] = [AiogradError]
    while waiting:
        cls = waiting.pop()
        if cls.__module__.startswith(_OURS):
            found[f"{cls.__module__}.{cls.__qualname__}"] = cls
        waiting += cls.__subclasses__()
    return found
