"""Where a worker can be used: in its own process, on its own loop or in threads without a loop.

A second event loop would wait for futures that another one ends, and a forked child has a copy of
the worker that nothing ever reaches. Both would be hangs, so both are errors at once.

Ordinary calls are not to pay for this. On the worker's thread it is enough that the worker's loop
runs, which is cheap to ask; everything else comes here. A fork lets that question be answered with
no, so that its calls come here, too.

Close the descriptors of workers in children that a process forks.

A forked child, of `multiprocessing` for example, gets a copy of every descriptor. As long as it
lives, peers of a killed worker see no end of their connections, and its listeners still accept. So
everything that has such descriptors registers here, and a hook closes them in the child.

Shared memory stays: its end tells nobody anything, and arrays that the child uses may lie in it.

Not covered: children that are forked without Python's hooks, by a C library, and a connection of
which the kernel or TLS has not told us yet at the moment of the fork. A parent that sees the
process end knows of those losses, too (`Coordinator.process_ended`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

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


class Holder(Protocol):
    """Something with descriptors that mean nothing in another process."""

    def descriptors(self) -> Iterable[int]:
        """Give the open ones; negative numbers are skipped."""


# The one list of this process: hooks for forks belong to the process and cannot be taken back.
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def close_in_children(holder: Holder) -> None:
    """Close what `holder` has in every child that is forked while it lives."""
    _holders.add(holder)


def descriptor(transport: Any) -> int:
    """The descriptor of an asyncio transport; -1 if it has none, or no longer."""
    try:
        sock = transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())
    except Exception:  # not connected yet, or half closed: what others have must still be closed
        return -1


def _in_child() -> None:
    holders = list(_holders)
    _holders.clear()
    if not holders:
        return
    empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for holder in holders:
        with contextlib.suppress(Exception):  # the child must go on in any case
            for each in holder.descriptors():
                if each >= 0:
                    # Never `shutdown`, which would end the parent's connection. And not `close`:
                    # the objects of the parent are here, too, and close their number once more
                    # when they are collected. By then it might be a file of the child's.
                    os.dup2(empty, each, inheritable=False)
    os.close(empty)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
