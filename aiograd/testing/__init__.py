"""Tools for our tests and for users' own: gradient checks, faults, a simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiograd.testing.fault_injection import Faults
from aiograd.testing.gradcheck import gradcheck, gradgradcheck

if TYPE_CHECKING:
    from aiograd.testing.simulator import simulate

__all__ = ["Faults", "gradcheck", "gradgradcheck", "simulate"]


def __getattr__(name: str) -> Any:
    if name == "simulate":  # few of those who check gradients do
        from aiograd.testing.simulator import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
