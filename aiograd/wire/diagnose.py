"""Diagnosis of a failed encoding: which part of the value cannot be sent.

It encodes parts of the value again, from the outside inwards, and names the innermost one that
fails, as a path a reader can follow: `args[0]['x'].lock`. Slow, but only after a failure.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any, Protocol

_DEPTH = 32  # parts of a path; a longer one helps no reader


class Encoder(Protocol):
    """What the diagnosis needs of a codec."""

    def encode(self, value: Any, departure: Any) -> object:
        """Encode a value, or raise."""


def find_culprit(
    codec: Encoder, value: Any, departure: Any, name: str, error: Exception
) -> tuple[str, str]:
    """Return the path of the innermost part that fails, and its description."""
    # Parts already tried, on all levels: values may contain themselves.
    seen: set[int] = set()
    # One level per round. When no part of the value fails alone, the value itself is the culprit.
    for _ in range(_DEPTH):
        for path, part in _parts(value, name):
            if id(part) in seen:
                continue
            seen.add(id(part))
            failure = _failure(codec, part, departure)
            if failure is not None:
                # Its traceback holds this frame, which must not hold the error in turn.
                value, name, error = part, path, failure.with_traceback(None)
                break
        else:
            break
    return name, _describe(value, error)


def _failure(codec: Encoder, value: Any, departure: Any) -> Exception | None:
    try:
        codec.encode(value, departure)
    except Exception as error:
        return error
    return None


def _describe(value: Any, error: Exception) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    text = str(error) or type(error).__name__
    return text if kind in text else f"{kind}: {text}"


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what `value` is made of, each with its path."""
    if name == "call":  # the root of a call: (args, kwargs) or (func, args, kwargs)
        *func, args, kwargs = value
        for each in func:
            yield "func", each
        yield from ((f"args[{i}]", each) for i, each in enumerate(args))
        yield from ((f"kwargs[{key!r}]", each) for key, each in (kwargs or {}).items())
        return
    if isinstance(value, dict):
        for key, each in value.items():
            with contextlib.suppress(Exception):
                yield f"{name}[{_short(key)}]", each
        for key in value:
            yield f"{name} key {_short(key)}", key
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"{name}{{{_short(each)}}}", each) for each in value)
    # A class is pickled by name or by value as a whole; its attributes as paths would mislead.
    if isinstance(value, type) or _decides_itself(value):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f"{name}.{key}", each) for key, each in list(attributes.items()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                yield f"{name}.{slot}", getattr(value, slot)
    # cloudpickle sends the globals that a function's code names, and its closure.
    if isinstance(value, types.FunctionType):
        for variable in value.__code__.co_names:
            if variable in value.__globals__:
                yield f"{name}.{variable}", value.__globals__[variable]
    closure = getattr(value, "__closure__", None)
    if closure and hasattr(value, "__code__"):
        for variable, cell in zip(value.__code__.co_freevars, closure, strict=False):
            with contextlib.suppress(ValueError):
                yield f"{name}.{variable}", cell.cell_contents


def _decides_itself(value: Any) -> bool:
    """Whether its class defines what is pickled of it: then its attributes are not to blame."""
    # An exception's default reduction does include its attributes, and a function's globals and
    # closure are pickled by cloudpickle.
    if isinstance(value, BaseException | types.FunctionType):
        return False
    cls: Any = type(value)
    return any(
        "__reduce__" in c.__dict__ or "__reduce_ex__" in c.__dict__ for c in cls.__mro__[:-1]
    )


def _short(key: Any) -> str:
    # Anything may happen in a user's `__repr__`; the diagnosis must not fail with another error.
    try:
        text = repr(key)
    except Exception:
        text = f"<{type(key).__name__}>"
    return text if len(text) <= 40 else text[:37] + "…"
