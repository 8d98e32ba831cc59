"""Which agent is current, and the scope of the running call: deadline, guest, recording.

Inside a called function both are set in its `contextvars.Context`. Elsewhere the current agent is
the last one started in this process and still open: a notebook cell that awaits loses its
ContextVars, so the agent must be found without them.
"""

from __future__ import annotations

import asyncio
import math
from contextvars import ContextVar, Token
from typing import Any, Final

from aiograd.errors import WorkerClosed
from aiograd.rpc.directory import PeerInfo


class RunningCall:
    """The identity of a call that runs here, and what its thread waits for."""

    # Without `__init__` and slots: one is made for every call, and few calls set anything of it.
    cancelled: bool = False  # its caller wants no result any more
    waits: list[asyncio.Future[Any]] | None = None  # futures that its thread blocks on

    def begin_wait(self, future: asyncio.Future[Any]) -> None:
        """Note that a thread of the call blocks on a future of its loop."""
        waits = self.waits
        if waits is None:
            waits = self.__dict__.setdefault("waits", [])  # a call may have several threads
        waits.append(future)

    def end_wait(self, future: asyncio.Future[Any]) -> None:
        """Note that the thread goes on."""
        assert self.waits is not None
        self.waits.remove(future)

    def cancel(self) -> None:
        """Cancel what the call's thread waits for, now and from now on. Call it on the loop.

        The thread itself cannot be stopped, but calls that it makes can.
        """
        # In this order; the thread adds its future first and then looks at the flag.
        self.cancelled = True
        for future in list(self.waits or ()):
            future.cancel()


class CallScope:
    """What code knows about the call it runs in. Immutable, and inherited by tasks and threads."""

    __slots__ = ("call", "deadline", "guest", "recording")

    def __init__(
        self,
        deadline: float = math.inf,
        guest: PeerInfo | None = None,
        recording: Any = None,
        call: object | None = None,
    ) -> None:
        self.deadline: float = deadline  # loop time at which the call must have ended
        self.guest: PeerInfo | None = guest  # the caller, if it may call only what is exposed
        self.recording: Any = recording  # where spans of calls made here go, while somebody records
        # The identity of the call: calls that it makes are known as its children by it. Two scopes
        # of one call, with and without a recording, share it. None outside of any call. Not the
        # scope itself: an object that refers to itself is freed only by the garbage collector.
        # A `RunningCall` unless the function has ended before anything else happens.
        self.call: object | None = call

    def recorded(self, recording: Any) -> CallScope:
        """Return the same scope with another recording."""
        return CallScope(self.deadline, self.guest, recording, self.call)


NO_CALL: Final = CallScope()
SCOPE: Final[ContextVar[CallScope]] = ContextVar("aiograd_scope", default=NO_CALL)
# Bound once: every call asks for its scope, and enters one at the callee.
current_scope: Final = SCOPE.get
enter_scope: Final = SCOPE.set
AGENT: Final[ContextVar[Any]] = ContextVar("aiograd_agent", default=None)

# Agents of this process in the order of their start: the one process-wide list.
_open: list[Any] = []


def current() -> Any:
    """Return the agent of this context, else the last one started here; else WorkerClosed.

    For modules below `agent`, which has `current_agent` with a type.
    """
    agent = AGENT.get()
    if agent is not None and not agent.closed:
        return agent
    if not _open:
        raise WorkerClosed()
    return _open[-1]


def current_guest() -> PeerInfo | None:
    """Return the caller of the running call, if it may call only what is exposed here."""
    return SCOPE.get().guest


def inherited_deadline() -> float:
    """Return the loop time at which the running call must have ended; inf if there is none."""
    return SCOPE.get().deadline


def record(recording: Any) -> None:
    """Let calls made in this context be recorded."""
    SCOPE.set(SCOPE.get().recorded(recording))


def use(agent: Any) -> Token[Any]:
    """Make `agent` current in the running context."""
    return AGENT.set(agent)


def opened(agent: Any) -> None:
    """Note that an agent has started: it is current where no context says otherwise."""
    if agent not in _open:
        _open.append(agent)


def closed(agent: Any) -> None:
    """Note that an agent has ended."""
    if agent in _open:
        _open.remove(agent)
