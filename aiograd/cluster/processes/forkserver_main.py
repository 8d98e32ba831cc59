"""The nursery process: loads the library, then forks workers on request until nobody is left.

It runs no loop, no thread and no code of users, so that a fork of it is as good as a fresh process.
The driver's end is `nursery.py`; what a worker does is `process.py`'s business.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import selectors
import socket
import sys
from typing import NoReturn

import numpy as np

from aiograd.cluster.processes.worker_main import main

__all__ = ["nurse"]


def nurse() -> NoReturn:
    """Serve the driver at the socket named on the command line: one packet, one worker."""
    control = socket.socket(fileno=int(sys.argv[2]))
    gc.collect()
    gc.freeze()  # what the workers share, they should not touch
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if key.fileobj is not control:
                _bury(control, selector, key)
                continue
            number, pipes, _, _ = socket.recv_fds(control, 64, 3)
            if number:
                _make(control, selector, int(number), pipes)
            else:  # the driver is done, or gone; the workers have lifelines of their own
                selector.unregister(control)
    os._exit(0)


def _make(
    control: socket.socket, selector: selectors.BaseSelector, number: int, pipes: list[int]
) -> None:
    pid = os.fork()
    if pid == 0:
        inherited = [key.fd for key in selector.get_map().values()]
        selector.close()
        _become_worker(pipes, inherited)
    for each in pipes:
        os.close(each)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (number, pid))
    _say(control, f"start {number} {pid}")


def _bury(
    control: socket.socket, selector: selectors.BaseSelector, key: selectors.SelectorKey
) -> None:
    number, pid = key.data
    _, status = os.waitpid(pid, 0)
    selector.unregister(key.fd)
    os.close(key.fd)
    _say(control, f"exit {number} {os.waitstatus_to_exitcode(status)}")


def _say(control: socket.socket, what: str) -> None:
    with contextlib.suppress(OSError):  # the driver is gone
        control.send(what.encode())


def _become_worker(pipes: list[int], inherited: list[int]) -> NoReturn:
    """Take a session, standard streams, surroundings and random numbers of one's own."""
    try:
        os.setsid()
        for standard, each in enumerate(pipes):
            os.dup2(each, standard)
        for each in (*pipes, *inherited):
            os.close(each)
        path, folder, environment = marshal.load(sys.stdin.buffer)
        sys.path[:] = path
        os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        np.random.seed()  # all would draw the same numbers otherwise
        main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
