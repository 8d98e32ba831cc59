"""What is known of a worker whose event loop does not answer: told by its watchdog and its host.

A blocked loop can answer no question, but its watchdog leaves a note (`notes`), which any process
of the same user on the same host can read. A process that is stopped runs no threads either; the
system says so.

    watchdog ──▶ note in the run folder ──▶ a worker of that host, or the command ──▶ snapshot
    /proc    ──────────────────────────────┘
"""

from __future__ import annotations

import time
from typing import Any

from aiograd.observe import runfolder
from aiograd.observe.snapshot import BLOCKED, LOST, SILENT, STOPPED, WorkerRow
from aiograd.rpc.observe.host import host_name, is_alive, is_stopped


def describe(incarnation: str, pid: int | None) -> dict[str, Any]:
    """Return what this host knows of a worker that does not answer."""
    for record in runfolder.records():
        if record.incarnation == incarnation:
            pid = record.pid
    found: dict[str, Any] = {"host": host_name(), "pid": pid}
    if pid is None:
        return {}
    if is_alive(pid) is False:
        return {**found, "state": LOST, "why": "its process has ended"}
    if is_stopped(pid):
        why = f"process {pid} is stopped (SIGSTOP, or a debugger): `kill -CONT {pid}` lets it go on"
        return {**found, "state": STOPPED, "why": why}
    note = runfolder.read_note(incarnation)
    if note is None:
        return found
    blocked = max(0.0, time.time() - float(note.get("since", 0.0)))
    stack = [str(line) for line in note.get("stack", ())]
    why = f"its event loop has been blocked for {blocked:.1f} s"
    at = str(note.get("at", ""))
    return {**found, "state": BLOCKED, "why": why, "blocked": blocked, "stack": stack, "at": at}


def apply(row: WorkerRow, known: dict[str, Any]) -> None:
    """Put what is known of a worker that did not answer into its row."""
    row.state = str(known.get("state", row.state or SILENT))
    for name in ("why", "host", "pid", "blocked", "stack", "at"):
        if known.get(name):
            setattr(row, name, known[name])
