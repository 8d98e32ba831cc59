"""What this machine has, and what is missing: the answer to "what do you run it on?".

Every line is a finding: "ok" needs no thought, "note" is worth knowing, "fail" will not work. The
output is meant to be pasted into a report of a problem, so it has no secrets and no environment.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Final, NamedTuple

from aiograd.observe import runfolder
from aiograd.rpc.transport.network import is_loopback
from aiograd.wire.handshake import VERSION

EXTRAS: Final = {
    "uvloop": "a faster event loop",
    "torch": "torch tensors (extra torch)",
    "aiohttp": "the page (extra dashboard)",
    "prometheus_client": "Prometheus (extra metrics)",
    "opentelemetry": "OpenTelemetry (extra otel)",
    "anywidget": "the live view in notebooks (extra notebook)",
    "safetensors": "files of weights (extra io)",
    "ml_dtypes": "compressed gradients (extra compress)",
}
_FILES: Final = 1024  # open files that a worker may need with many peers
_MEMORY: Final = 64 << 20  # bytes of /dev/shm for large messages


class Check(NamedTuple):
    """One finding."""

    state: str  # "ok", "note" or "fail"
    what: str
    found: str


def examine() -> list[Check]:
    """Look at this machine."""
    found = []
    for check in (_versions, _loops, _extras, _addresses, _limits, _folders, _workers):
        try:
            found += list(check())
        except Exception as error:  # of any kind: the other findings count all the more
            found.append(Check("fail", check.__name__.strip("_"), repr(error)))
    return found


def as_lines(checks: list[Check], paint: Callable[[str, str], str]) -> list[str]:
    """Return the findings as lines."""
    colours = {"ok": "32", "note": "33", "fail": "31"}
    width = max(len(check.what) for check in checks)
    return [
        f"{paint(colours[state], state.ljust(4))}  {what.ljust(width)}  {found}"
        for state, what, found in checks
    ]


def _versions() -> Iterator[Check]:
    yield Check("ok", "aiograd", f"{_version('aiograd')} (wire version {VERSION})")
    yield Check("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("numpy", "cloudpickle"):
        version = _version(name)
        yield Check("ok" if version else "fail", name, version or "is not installed")


def _loops() -> Iterator[Check]:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 1

    with asyncio.Runner() as runner:
        works = runner.run(answer()) == 1
    yield Check("ok" if works else "fail", "event loop", "asyncio works")


def _extras() -> Iterator[Check]:
    for module, what in EXTRAS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            yield Check("note", module, f"is not installed: {what}")
        except Exception as error:
            yield Check("fail", module, f"is broken: {error!r}")
        else:
            yield Check("ok", module, _version(module.replace("_", "-")) or "is there")


def _version(name: str) -> str:
    for each in (name, f"{name}-api", f"{name}-client"):
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _addresses() -> Iterator[Check]:
    name = socket.gethostname()
    try:
        addresses = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield Check("note", "host name", f"{name} cannot be resolved ({error}): see /etc/hosts")
        return
    shown = f"{name} is {', '.join(addresses)}"
    if all(is_loopback(address) for address in addresses):
        shown += ": other hosts cannot use it as a rendezvous"
        yield Check("note", "host name", shown)
    else:
        yield Check("ok", "host name", shown)
    yield Check(
        "ok" if hasattr(socket, "AF_UNIX") else "note",
        "unix sockets",
        "are there"
        if hasattr(socket, "AF_UNIX")
        else "are not there: TCP is used on one host, too",
    )


def _limits() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("ok", "cores", str(cores))
    try:
        import resource
    except ImportError:
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    state = "ok" if files >= _FILES else "note"
    yield Check(
        state, "open files", f"{files} (`ulimit -n`; each peer of a worker takes one or two)"
    )
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        enough = free >= _MEMORY
        shown = f"{free >> 20} MiB of shared memory"
        more = "" if enough else ": large messages between processes go through sockets"
        yield Check("ok" if enough else "note", "/dev/shm", shown + more)


def _folders() -> Iterator[Check]:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    state = "ok" if free > 1 << 20 else "fail"
    yield Check(state, "temporary folder", f"{tempfile.gettempdir()}, {free >> 20} MiB free")
    where = runfolder.folder()
    found = "none that is private to this user: `aiograd status` finds no cluster by itself"
    yield Check("ok" if where else "note", "run folder", str(where) if where else found)


def _workers() -> Iterator[Check]:
    records = runfolder.records()
    clusters = {record.cluster for record in records}
    yield Check("ok", "running here", f"{len(records)} workers of {len(clusters)} clusters")
    main = sys.argv[0]
    yield Check("ok", "command", f"{main} by {sys.executable}")
