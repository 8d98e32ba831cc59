"""Tools for our tests and for users' own: gradient checks, faults, a pytest plugin."""

from aiograd.testing.faults import Faults
from aiograd.testing.gradcheck import gradcheck, gradgradcheck

__all__ = ["Faults", "gradcheck", "gradgradcheck"]
