"""Functions to run in worker processes, and to look at processes from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from aiograd.cluster.api import get_worker_info
from aiograd.rpc.api import rpc_sync
from aiograd.rpc.directory import WorkerInfo


def pid() -> int:
    return os.getpid()


async def who() -> WorkerInfo:
    return get_worker_info()


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def alive(process: int) -> bool:
    try:
        return read(f"/proc/{process}/stat").rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


async def gone(process: int) -> None:
    """Wait until a process that is not our child has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
        loop.remove_reader(descriptor)
        os.close(descriptor)


def ask(to: str) -> int:
    return rpc_sync(to, pid)


def parent_of(process: int) -> int:
    return int(read(f"/proc/{process}/stat").rpartition(b")")[2].split()[1])
