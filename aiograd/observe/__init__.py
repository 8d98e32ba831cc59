"""What a cluster is doing, as plain data: pulled when somebody asks, free when nobody does.

    snapshot   the data: workers, links, calls, references, contexts, passes, collectives
    tables     one worker's part of it, read from the tables that are there anyway
    stacks     where tasks and threads are: the line of user code that each has reached
    notes      what the watchdog leaves for others while an event loop is blocked
    blocked    what a host knows of a worker that does not answer
    inspector  asks this worker and others, in bounded time; `inspect`
    waits      who waits for whom: cycles and chains, without I/O
    json_logs  log lines as JSON, with the call they belong to
    runfolder  which workers run on this host, for commands that look at them

Nothing here is called by a call, a message or a node: everything is derived from tables when it is
asked for. `tables` reads `rpc`, `rref` and `dist`; what it needs of the membership is given to it.
Terminal, page, notebook and exporters are in `views`, above `cluster`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiograd.observe.inspector import Inspector, Membership
    from aiograd.rpc.agent import Agent

__all__ = ["Part", "attach"]


class Part:
    """What a worker has to be looked at; the inspector is loaded with the first question."""

    def __init__(
        self, agent: Agent, members: Membership | None, counters: Callable[[], dict[str, int]]
    ) -> None:
        self._agent, self._members = agent, members
        self._debug_info = counters  # not `counters`: that is how a worker asks its parts
        self._began = agent.loop.time()
        self._inspector: Inspector | None = None

    @property
    def inspector(self) -> Inspector:
        """What takes snapshots for this worker."""
        if self._inspector is None:
            from aiograd.observe.inspector import Inspector

            self._inspector = Inspector(self._agent, self._members, self._debug_info, self._began)
        return self._inspector

    def service(self, name: str) -> Callable[..., Any]:
        """Return a service that a method of the inspector answers."""
        return lambda *args: getattr(self.inspector, name)(*args)


def attach(
    agent: Agent, members: Membership | None, counters: Callable[[], dict[str, int]]
) -> Part:
    """Let a worker answer those who look at it."""
    part = agent.parts[Part] = Part(agent, members, counters)
    agent.services |= {
        "inspect": part.service("part_asked"),
        "inspect.all": part.service("all_asked"),
        "inspect.host": part.service("host_asked"),
        "inspect.stacks": part.service("stacks_asked"),
        "inspect.stacks.all": part.service("all_stacks_asked"),
        "inspect.record": part.service("record_asked"),
        "inspect.record.all": part.service("record_all_asked"),
    }
    return part
