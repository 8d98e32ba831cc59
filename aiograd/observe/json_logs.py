"""Log lines as JSON, one object per line, with the worker, peer, call and context they belong to.

    {"time": "2026-11-18T10:00:00.123+00:00", "level": "WARNING", "logger": "aiograd.link",
     "message": "…", "worker": "worker0", "peer": "driver", "call": "driver>worker0#7",
     "context": "281474976710657", "at": "train.py:31"}

On request: `json_logs.enable()` in a program, or `AIOGRAD_LOG=json` for worker processes. Which
call a line belongs to is looked up when it is written; calls that log nothing pay nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from aiograd.dist.context import CURRENT
from aiograd.observe.tables import key_of
from aiograd.rpc import scope
from aiograd.rpc.scope import AGENT, SCOPE

VARIABLE = "AIOGRAD_LOG"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record, with fields of the call that it was written in."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "at": f"{record.pathname}:{record.lineno}",
            "process": record.process,
            **where(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def where() -> dict[str, str]:
    """Return worker, peer, call and context of the running code, as far as there are such."""
    found: dict[str, str] = {}
    agent = AGENT.get()
    if agent is None:
        try:
            agent = scope.current()
        except Exception:  # there is no worker in this process
            return found
    found["worker"] = agent.name
    call = SCOPE.get().call
    if call is not None:
        for link in list(agent.links.all()):
            number = link.callee.execution.number_of(call)
            if number is not None:
                found["peer"] = link.peer.name
                found["call"] = key_of(link.peer.name, agent.name, number)
                break
    context = CURRENT.get()
    if context is not None and not context.released:
        found["context"] = str(context.id)
    return found


def enable(level: int = logging.INFO, stream: Any = None) -> logging.Handler:
    """Write all log lines of this process as JSON, to standard error by default."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    if root.level > level or root.level == logging.NOTSET:
        root.setLevel(level)
    return handler
