"""Values that stay with their owner: references to them, and reference counts across workers.

    rref       `RRef` and `remote`: what users see
    proxy      calls of methods of a value at its owner
    registry   `RRefs`, all references of one worker; `ValueStore`, the values it keeps for others
    serial     objects whose calls run one at a time, in order of arrival
    futures    futures that know the reference they are about; fetches that piggyback on creations
    services   messages about references, and the services that answer them
    room       how many entries one partner may still add
    refcount/  the reference-count protocol, sans I/O: knows nothing of agents and loops

Each module imports only those below it, type-only imports included. Those below `rref` know an
`RRef` as `futures.Reference`. `wire` and `rpc` do not know of this package: `attach` plugs it into
an agent through the seams in `rpc.extension`.
"""

from aiograd.rpc.agent import Agent
from aiograd.rref.proxy import Subject, SubjectTraveller
from aiograd.rref.registry import RRefs
from aiograd.rref.rref import RRef, remote, wrap
from aiograd.rref.serial import serial

__all__ = ["RRef", "RRefs", "attach", "remote", "serial"]


def attach(agent: Agent) -> RRefs:
    """Plug references into an agent."""
    refs = agent.parts[RRefs] = RRefs(agent, wrap)
    agent.travellers.add(RRef, refs)
    agent.travellers.add(Subject, SubjectTraveller(refs))
    return refs
