"""Which agent is current, how much time the running call has left, and whether it is a guest's.

Inside a called function these are set in its `contextvars.Context`. Elsewhere the current agent is
the last one started in this process and still open: a notebook cell that awaits loses its
ContextVars, so it must be found without them.
"""

from __future__ import annotations

import math
import sys
from contextvars import ContextVar, Token
from types import FrameType
from typing import TYPE_CHECKING, Final

from aiograd.errors import WorkerClosed

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.directory import PeerInfo

AGENT: Final[ContextVar[Agent | None]] = ContextVar("aiograd_agent", default=None)
# Every call has an object of its own here, by which those that it makes are known as its children.
DEADLINE: Final[ContextVar[float]] = ContextVar("aiograd_deadline", default=math.inf)
# Who called, if it may call only what is exposed.
GUEST: Final[ContextVar[PeerInfo | None]] = ContextVar("aiograd_guest", default=None)

_open: list[Agent] = []  # agents of this process in order of their start; the one process-wide list


def current_agent() -> Agent:
    """The agent of this context, else the last one started here; else WorkerClosed."""
    agent = AGENT.get()
    if agent is not None and not agent.closed:
        return agent
    if not _open:
        raise WorkerClosed()
    return _open[-1]


def users_frame() -> FrameType:
    """The innermost frame that is not ours: the line to name when something was forgotten."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("aiograd."):
        frame = frame.f_back
    return frame


def use(agent: Agent) -> Token[Agent | None]:
    """Make `agent` current in the running context."""
    return AGENT.set(agent)


def opened(agent: Agent) -> None:
    if agent not in _open:
        _open.append(agent)


def closed(agent: Agent) -> None:
    if agent in _open:
        _open.remove(agent)
