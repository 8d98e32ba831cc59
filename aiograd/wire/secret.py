"""Bytes that prove something and show nothing.

A secret passes through frames, records and errors on its way; whoever prints those, or lets a
debugger or an error reporter do it, must not see it. So it says "<secret>" of itself.
"""

from __future__ import annotations


class Secret(bytes):
    """Bytes that no text shows; `hex()` still does, for the one file that carries them."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__
