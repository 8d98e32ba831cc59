"""Errors as torch.distributed.rpc raises them: nearly always a RuntimeError, with its texts.

    callee   an exception of the user's function ─▶ RemoteException (torch's own record), or
             CreationFailed where the value stays ─▶ … wire … ─▶ caller: raise_remote
    caller   errors of aiograd ─▶ translate ─▶ RuntimeError, cause chained

Programs match these texts, and torch's own tests do, so they are part of the surface.
"""

from __future__ import annotations

import math
import sys
import traceback
from typing import Any, NoReturn

from torch.distributed.rpc.internal import RemoteException

from aiograd.errors import (
    AiogradError,
    BackwardFailed,
    DeadlineExceeded,
    RRefReleased,
    UnknownContext,
    UnknownWorker,
)

__all__ = [
    "NOT_INITIALIZED",
    "NO_AGENT",
    "CreationFailed",
    "describe",
    "raise_remote",
    "timed_out",
    "translate",
]

NOT_INITIALIZED = (
    "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first "
    "(aiograd.compat.torch_rpc.init_rpc in programs that import it)."
)
NO_AGENT = (
    "Current RPC agent is not set! Did you initialize the RPC framework "
    "(e.g. by calling `rpc.init_rpc`)?"
)


class CreationFailed(Exception):
    """The function of a `remote` call raised: its exception's type, and the text about it."""

    def __init__(self, message: str, exception_type: type[BaseException]) -> None:
        super().__init__(message, exception_type)
        self.remote = RemoteException(message, exception_type)


def describe(error: BaseException, worker: Any) -> Any:
    """Make torch's record of an exception, for the caller; print it here, as torch does."""
    text = f"On {worker}:\n{error!r}\n{traceback.format_exc()}"
    sys.stderr.write(text + "\n")
    return RemoteException(text, type(error))


def raise_remote(found: Any, *, exact: bool) -> NoReturn:
    """Raise the exception that a `RemoteException` stands for.

    `exact`: with its own type, as `to_here` does. Else as calls do: ValueError and TypeError stay,
    everything else is a RuntimeError.
    """
    text = found.msg.encode("utf-8").decode("unicode_escape")
    try:
        error = found.exception_type(text)
    except BaseException as failure:  # a class that cannot be made from one string
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {failure} "
            f"Original exception on remote side was {text}"
        ) from failure
    if not exact and not isinstance(error, RuntimeError):
        for kind in (ValueError, TypeError):
            if isinstance(error, kind):
                raise kind(text)
        raise RuntimeError(f"{found.exception_type.__name__}: {text}")
    raise error


def timed_out(seconds: float) -> RuntimeError:
    """Make the error of a call whose time is over."""
    shown = "inf" if seconds == math.inf else f"{seconds * 1000:g}"
    return RuntimeError(
        f"RPC ran for more than set timeout ({shown} ms) and will now be marked with an error"
    )


def translate(error: BaseException) -> BaseException:
    """Return the error that a torch program expects in place of one of aiograd's."""
    if isinstance(error, DeadlineExceeded):
        made: BaseException = timed_out(error.seconds)
    elif isinstance(error, UnknownWorker):
        made = RuntimeError(f"could not find destination: {error}")
    elif isinstance(error, UnknownContext):
        made = RuntimeError(f"Could not find autograd context with id: {error.context_id}")
    elif isinstance(error, BackwardFailed):
        made = RuntimeError(f"Error on Node {error.worker}: {error}")
    elif isinstance(error, RRefReleased):
        made = RuntimeError(f"{error}. Cannot call to_here() on it after deletion.")
    elif isinstance(error, AiogradError | TimeoutError | ConnectionError):
        if isinstance(error, RuntimeError):
            return error
        made = RuntimeError(str(error))
    else:
        return error
    made.__cause__ = error
    return made
