"""What the system knows of a process: memory, processor time, and whether it is stopped.

Read from /proc where there is one; elsewhere the numbers of this process alone, from `resource`.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

# The state of a process in /proc/PID/stat: T stopped by a signal, t by a debugger.
_STOPPED: Final = frozenset("Tt")
_GONE: Final = frozenset("ZX")


def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def memory() -> int | None:
    """Return the bytes of this process that are resident."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the most so far, for want of better
    return most if sys.platform == "darwin" else most * 1024


def processor_time() -> float:
    """Return the seconds of processor time that this process has used."""
    times = os.times()
    return times.user + times.system


def is_stopped(pid: int) -> bool:
    """Tell whether a process of this host is stopped, by a signal or by a debugger."""
    return _state(pid) in _STOPPED


def is_alive(pid: int) -> bool | None:
    """Tell whether a process of this host runs; None where that cannot be told."""
    if not os.path.isdir("/proc/self"):
        return None
    state = _state(pid)
    return state != "" and state not in _GONE


def _state(pid: int) -> str:
    try:
        # The name of the program is in parentheses, and may have spaces and parentheses in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
