"""What tests of clusters on Dask and Ray share: far ends that do not fit, what is the engine's own.

The leak check of the suite leaves out the threads, sockets and processes of an engine, and nothing
else; everything of ours is checked, also our folders and records in a temporary folder of the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Threads by name: Dask's loop, profiler, executors and watchers of processes; Ray's readers of logs
# and errors, and its garbage collector.
THREADS = re.compile(r"IO loop|Profile|Dask-.*|AsyncProcess .*|ray_.*|PythonGCThread")
# Processes by command line: servers and workers of Ray, nannies and workers of Dask.
CHILDREN = re.compile(
    r"/ray/core/src/ray/|/ray/_private/|/ray/dashboard/|ray::|--multiprocessing-fork"
    r"|from multiprocessing\.\w+ import|distributed\.cli|bin/dask "
)


def own_threads(names: list[str]) -> list[str]:
    """Leave out the threads of an engine."""
    return [name for name in names if not THREADS.fullmatch(name)]


def own_children(pids: list[str]) -> list[str]:
    """Leave out the processes of an engine."""
    return [pid for pid in pids if not CHILDREN.search(_command(pid))]


def own_files(descriptors: dict[str, str]) -> list[str]:
    """Leave out the sockets, pipes and logs of an engine: what is ours has our name in its path.

    Workers of one host, as in these tests, meet at Unix sockets in a folder of ours.
    """
    return [
        f"{target} {where}"
        for fd, target in descriptors.items()
        if "aiograd" in (where := _addresses(fd)) or "aiograd" in target
    ]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has ended
        return "ray::"


def _addresses(fd: str) -> str:
    """Return both ends of a socket, as text; nothing for other files."""
    try:
        if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
            return ""
        with socket.socket(fileno=os.dup(int(fd))) as found:
            names = [found.getsockname()]
            with contextlib.suppress(OSError):
                names.append(found.getpeername())
            return str(names)
    except OSError:  # closed meanwhile
        return ""


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Let this process, and the processes of an engine that it starts, use a folder of their own.

    Its path is short: those of Unix sockets have 107 bytes at most.
    """
    before = os.environ.get("TMPDIR"), os.environ.get("XDG_RUNTIME_DIR")
    folder = tempfile.mkdtemp(prefix="ag-", dir="/tmp")
    os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = folder
    tempfile.tempdir = None
    try:
        yield Path(folder)
    finally:
        for name, value in zip(("TMPDIR", "XDG_RUNTIME_DIR"), before, strict=True):
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


def left_in(folder: Path) -> list[str]:
    """List folders and records of workers that live; those of killed ones go at the next start."""
    # Here: the leak check of the suite needs this module, and must not load the package.
    from aiograd.cluster.joining.folders import remove_abandoned
    from aiograd.observe.runfolder import records

    remove_abandoned(str(folder))
    folders = [each.name for each in folder.glob("aiograd-????????")]
    return folders + [f"record of {each.name}" for each in records()]


# A far end that does not fit, by what is wrong with it. Python runs this module at its start.
SITE = """
import os, sys
wrong = os.environ.get("AIOGRAD_TEST_WRONG", "")
if wrong == "python":
    import platform
    platform.python_version = lambda: "3.99.0"
elif wrong == "numpy":
    import numpy
    numpy.__version__ = "9.0.0"
elif wrong == "aiograd":
    import aiograd
    aiograd.__version__ = "9.9.0"
elif wrong == "no aiograd":
    sys.modules["aiograd"] = None
elif wrong == "no uvloop":
    sys.modules["uvloop"] = None
elif wrong == "hangs":
    import asyncio, aiograd.cluster.engines.engine as engine
    async def start(self):
        await asyncio.sleep(60)
    engine.HostedWorker.start = start
"""


def wrong_end(folder: Path, wrong: str) -> dict[str, str]:
    """Return environment variables under which Python runs as such a far end."""
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "AIOGRAD_TEST_WRONG": wrong}
