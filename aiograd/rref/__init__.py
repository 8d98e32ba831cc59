"""Values that stay with their owner: references to them, and reference counts across workers.

    rref       `RRef` and `remote`: what users see
    proxy      calls of methods of a value at its owner
    registry   `RRefs`: creates, sends and uses references of one worker; its store of results
    futures    futures that know the reference they are about; fetches that piggyback on creations
    services   messages about references, and the services that answer them
    refcount/  the reference-count protocol, sans I/O: knows nothing of agents and loops

Each module imports only those below it. `wire` and `rpc` do not know of this package: `attach`
plugs it into an agent through the seams in `rpc.extension`.
"""

from aiograd.rref.registry import RRefs, attach
from aiograd.rref.rref import RRef, remote

__all__ = ["RRef", "RRefs", "attach", "remote"]
