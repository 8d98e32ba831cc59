"""The output of workers for those who look at their cluster: the service "inspect.logs".

A cluster that forwards the output of its workers has their last lines; `aiograd logs` asks for
those that it has not seen. Lines are counted from the start of each worker, so a gap can be told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aiograd.cluster.processes.spawn import OutputLog
from aiograd.errors import NotAllowed
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo

__all__ = ["new_lines", "serve_logs"]


def new_lines(
    logs: Mapping[str, OutputLog], after: Mapping[str, Any]
) -> dict[str, tuple[int, list[str]]]:
    """Return, by worker, how many lines there were so far, and those after the ones seen."""
    found = {}
    for name, log in logs.items():
        seen = after.get(name, 0)
        # A worker that was restarted begins to count anew.
        seen = seen if type(seen) is int and 0 <= seen <= log.count else 0
        found[name] = (log.count, log.since(seen))
    return found


def serve_logs(agent: Agent, logs: Callable[[], Mapping[str, OutputLog]]) -> None:
    """Answer questions for the output of workers."""

    def asked(sender: PeerInfo, after: Any = None) -> str:
        if not agent.trusts(sender):
            raise NotAllowed(f"{sender.name} may not look at this cluster", agent.name)
        return json.dumps(new_lines(logs(), after if isinstance(after, Mapping) else {}))

    agent.services["inspect.logs"] = asked
