"""Where a worker can be used: in its own process, on its own loop or in threads without a loop.

A second event loop would wait for futures that another one ends, and a forked child has a copy of
the worker that nothing ever reaches. Both would be hangs, so both are errors at once.

Ordinary calls are not to pay for this. On the worker's thread it is enough that the worker's loop
runs, which is cheap to ask; everything else comes here. A fork lets that question be answered with
no, so that its calls come here, too.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import TYPE_CHECKING

from aiograd.errors import ForkedProcessError, WrongLoopError

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

_agents: weakref.WeakSet[Agent] = weakref.WeakSet()  # whom a fork of this process concerns


def settle(agent: Agent) -> None:
    """The agent lives in this process and on this loop from now on."""
    _agents.add(agent)


def check_place(agent: Agent) -> None:
    """Raise if the agent cannot be used from here."""
    if os.getpid() != agent.process:
        raise ForkedProcessError(agent.name)
    running = asyncio._get_running_loop()
    if running is not None and running is not agent.loop:
        raise WrongLoopError(agent.name, agent.loop.is_closed())


def _never() -> bool:
    return False


def _in_forked_child() -> None:
    for agent in _agents:
        agent.loop_runs = _never


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
