"""Tools for our tests and for users' own: gradient checks, faults, a pytest plugin."""

from aiograd.testing.gradcheck import gradcheck, gradgradcheck

__all__ = ["gradcheck", "gradgradcheck"]
