"""Whether operations are recorded: a switch per task, not per thread.

A ContextVar, so that `no_grad()` held across an `await` never reaches another task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# Every operation reads this, so it is a bare ContextVar without a function around it. The mode does
# not travel with calls to other workers.
recording: ContextVar[bool] = ContextVar("aiograd_recording", default=True)


class _Mode:
    """A `with` block and a decorator that sets the switch and puts it back."""

    value: bool

    def __init__(self) -> None:
        # One per block this object is open in: `with mode:` may be nested in itself.
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(recording.set(self.value))

    def __exit__(self, *_: object) -> None:
        recording.reset(self._tokens.pop())

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # A mode of its own per call: calls may overlap in several tasks and threads, and a
            # token can only be reset in the context that made it.
            with type(self)():
                return function(*args, **kwargs)

        return cast(F, wrapped)


class no_grad(_Mode):  # noqa: N801  a name users know
    """Record nothing inside this block or function.

    >>> w = ag.ones(2, requires_grad=True)
    >>> with ag.no_grad():
    ...     w -= 0.1
    >>> w.requires_grad, w.is_leaf
    (True, True)
    """

    value = False


class enable_grad(_Mode):  # noqa: N801
    """Record again inside a `no_grad()` block.

    >>> with ag.no_grad():
    ...     with ag.enable_grad():
    ...         ag.is_grad_enabled()
    True
    """

    value = True


def is_grad_enabled() -> bool:
    """Return whether operations are recorded in this task now.

    >>> ag.is_grad_enabled()
    True
    """
    return recording.get()
