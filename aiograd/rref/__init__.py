"""Values that stay put: references to them, and who keeps them alive."""

from aiograd.rref.registry import RRefs, attach
from aiograd.rref.rref import RRef, remote

__all__ = ["RRef", "RRefs", "attach", "remote"]
