"""Bytes that prove something and show nothing, and which of them to share with whom.

A secret passes through frames, records and errors on its way; whoever prints those, or lets a
debugger or an error reporter do it, must not see it. So it says "<secret>" of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

OTHERS: Final = "*"  # in a mapping by name: everybody else; no worker can have this name
SHORTEST: Final = 16  # bytes; a shorter secret can be guessed


class Secret(bytes):
    """Bytes that no text shows; `hex()` still does, for the one file that carries them."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


class Keyring:
    """The secrets of one worker: one that it shares with all, or one for each name.

    With several, the name that the other side claims decides which one it has to know. So nobody
    can pass for somebody else, and two workers that share none cannot connect.
    """

    def __init__(self, secrets: bytes | Mapping[str, bytes]) -> None:
        named = secrets if isinstance(secrets, Mapping) else {OTHERS: secrets}
        if any(len(secret) < SHORTEST for secret in named.values()):
            raise ValueError(f"a secret has at least {SHORTEST} bytes")
        self._secrets = {name: Secret(secret) for name, secret in named.items()}
        self._others = self._secrets.pop(OTHERS, None)

    def shares(self, name: str) -> bool:
        """Whether there is a secret to share with the worker of this name."""
        return self._others is not None or name in self._secrets

    def chooser(self, token: Callable[[int], bytes]) -> Callable[[str], Secret]:
        """What tells, in one handshake, which secret the one of this name has to know.

        For a name without one it is random bytes, so that it fails exactly as a wrong secret does
        and a stranger cannot find out who is known here. They are made before the name is told,
        and anew each time: not even this worker itself could prove to know them.
        """
        others = Secret(token(32)) if self._others is None else self._others
        return lambda name: self._secrets.get(name, others)
