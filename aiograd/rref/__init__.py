"""Values that stay put: references to them, and who keeps them alive."""

from aiograd.rref.owners import RRefs, attach
from aiograd.rref.rref import RRef, remote

__all__ = ["RRef", "RRefs", "attach", "remote"]
