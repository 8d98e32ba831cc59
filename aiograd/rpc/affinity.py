"""Affinity: a worker belongs to one process and one event loop.

    use of a worker         on its thread, while its loop runs  ─▶ goes on (two cheap tests)
                            anywhere else                       ─▶ check_affinity: may raise
    fork of its process     in the child                        ─▶ calls raise, descriptors close

A second event loop would wait for futures that another one ends, and a forked child has a copy of
the worker that no message ever reaches. Both would hang, so both are errors at once. Threads
without a loop may use a worker.

A forked child, of `multiprocessing` for example, also gets a copy of every descriptor. While it
lives, peers of a killed worker see no end of their connections, and its listeners still accept. So
every holder of such descriptors registers here, and a fork hook closes them in the child. Shared
memory stays mapped: its end tells no peer anything, and arrays that the child uses may lie in it.

Not covered: children that are forked without Python's hooks, by a C library, and a connection of
which the kernel or TLS has not told us yet at the moment of the fork. A parent that sees the
process end knows of those losses, too (`cluster` reports them).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from aiograd.errors import ForkedProcessError, WrongLoopError


class Worker(Protocol):
    """What affinity has to know of a worker (`Agent` is one)."""

    name: str
    process: int  # the id of the process it was made in
    loop: asyncio.AbstractEventLoop
    loop_runs: Callable[[], bool]  # asked by every call on the worker's thread


class Holder(Protocol):
    """An object with descriptors that mean nothing in another process."""

    def descriptors(self) -> Iterable[int]:
        """Return the open ones; negative numbers are skipped."""


# Of the process, not of a worker: fork hooks belong to the process and cannot be removed.
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def check_affinity(worker: Worker) -> None:
    """ForkedProcessError or WrongLoopError if the worker cannot be used from here."""
    if os.getpid() != worker.process:
        raise ForkedProcessError(worker.name)
    running = asyncio._get_running_loop()  # unlike the public one, it does not raise without a loop
    if running is not None and running is not worker.loop:
        raise WrongLoopError(worker.name, worker.loop.is_closed())


def watch_forks(worker: Worker) -> None:
    """Let every use of the worker in a forked child go through `check_affinity`."""
    _workers.add(worker)


def close_in_children(holder: Holder) -> None:
    """Close the descriptors of `holder` in every child that is forked while it lives."""
    _holders.add(holder)


def descriptor(transport: Any) -> int:
    """Return the descriptor of an asyncio transport; -1 if it has none, or no longer."""
    try:
        sock = transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())
    except Exception:  # not connected yet, or half closed: the other descriptors must still close
        return -1


def _never() -> bool:
    return False


def _in_child() -> None:
    # A call on the worker's thread only asks whether its loop runs, because `getpid` for every
    # call would be paid by processes that never fork. In the child the answer becomes "no", so
    # that its calls reach `check_affinity`.
    for worker in _workers:
        worker.loop_runs = _never
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
