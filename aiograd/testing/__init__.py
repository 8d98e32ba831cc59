"""Tools for our tests and for users' own: gradient checks, fault injection, a simulator.

    gradcheck         gradients against finite differences
    fault_injection   messages that fail, vanish, arrive late or twice
    chaos_proxy       a proxy that cuts real connections at any byte
    simulator/        the library in virtual time, with seeded faults
    soak/             real workers that work for a long time while they are killed

Modules of this package may import every layer of the library; no layer imports this package. The
three modules and the two folders do not import each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiograd.testing.fault_injection import Faults
from aiograd.testing.gradcheck import gradcheck, gradgradcheck

if TYPE_CHECKING:
    from aiograd.testing.simulator import simulate

__all__ = ["Faults", "gradcheck", "gradgradcheck", "simulate"]


def __getattr__(name: str) -> Any:
    # Loaded at its first use: the simulator imports every layer of the library, and few of the
    # programs that check gradients need it.
    if name == "simulate":
        from aiograd.testing.simulator import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# So that completion in a shell finds what is imported later.
def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
