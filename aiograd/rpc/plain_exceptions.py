"""Exceptions between partners: a type's name and text, never code.

    fault = (name, text, arguments or None, cause or None)

Our own errors and Python's builtin ones are rebuilt as themselves from an allow-list, with plain
data as arguments; everything else arrives as `RemoteError`. Tracebacks and notes stay at home: they
show source lines, paths and values that a partner has no business with.
"""

from __future__ import annotations

import asyncio
import builtins
from typing import Any, Final

from aiograd.errors import AiogradError, ProtocolError, RemoteError, SerializationError
from aiograd.wire.safecodec import DataCodec

PlainFault = tuple[str, str, tuple[Any, ...] | None, Any]

_CAUSES: Final = 8  # of a chain; more help nobody
_TEXT: Final = 4096  # characters
_OURS: Final = "aiograd."
_NEVER: Final = (StopIteration, StopAsyncIteration, asyncio.CancelledError, BaseExceptionGroup)


def describe(codec: DataCodec, error: BaseException, left: int = _CAUSES) -> PlainFault:
    """Say what happened, in plain data. Never raises, whatever the exception's methods do."""
    cause = error.__cause__
    return (
        _readable(type_name(error)),
        _readable(text_of(error)),
        _arguments(codec, error),
        describe(codec, cause, left - 1) if cause is not None and left else None,
    )


def rebuild(fault: Any, worker: str, left: int = _CAUSES) -> Exception:
    """Make the exception that a partner described; ProtocolError if it described none."""
    try:
        name, text, arguments, cause = fault
    except (TypeError, ValueError):
        raise ProtocolError("a fault of another form", worker) from None
    if type(name) is not str or type(text) is not str:
        raise ProtocolError("a fault without a name", worker)
    error = _known(name, arguments) or RemoteError(name[:200], text[:_TEXT], "", worker)
    if cause is not None and left:
        error.__cause__ = rebuild(cause, worker, left - 1)
    return error


def type_name(error: BaseException) -> str:
    cls = type(error)
    module = "" if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def text_of(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except Exception as trouble:
        return f"<its text could not be made: {type(trouble).__name__}>"


def _arguments(codec: DataCodec, error: BaseException) -> tuple[Any, ...] | None:
    """What makes the same exception again; None if it is not of a known type."""
    if _find(type_name(error)) is not type(error):
        return None
    try:
        payload = codec.encode(error.args, None)
    except (SerializationError, ValueError):  # such as text that is no Unicode
        return None
    return error.args if len(payload.data) <= _TEXT and not payload.travelled else None


def _readable(text: str) -> str:
    """Names of files, say, may hold halves of characters, which are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _known(name: str, arguments: Any) -> Exception | None:
    cls = _find(name)
    if cls is None or type(arguments) is not tuple:
        return None
    try:
        return cls(*arguments)
    except Exception:  # these are not its arguments
        return None


def _find(name: str) -> type[Exception] | None:
    """The exception of that name among the builtin ones and our own; imports nothing."""
    cls = _ours().get(name) if name.startswith(_OURS) else vars(builtins).get(name)
    if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _NEVER):
        return cls
    return None


def _ours() -> dict[str, type[Exception]]:
    found: dict[str, type[Exception]] = {}
    waiting: list[type[Exception]] = [AiogradError]
    while waiting:
        cls = waiting.pop()
        if cls.__module__.startswith(_OURS):
            found[f"{cls.__module__}.{cls.__qualname__}"] = cls
        waiting += cls.__subclasses__()
    return found
