"""Secrets that no text shows, and the keyring: which secret is shared with which peer.

A secret passes through stack frames, records and errors. Logs, debuggers and error reporters print
those, and must not show it. So its text is "<secret>".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

OTHERS: Final = "*"  # in a mapping by name: every other worker; no worker can have this name
SHORTEST: Final = 16  # bytes; a shorter secret can be guessed


class Secret(bytes):
    """Bytes that no text shows; `hex()` still does, for the one file that carries them.

    A subclass of bytes, so that `hmac` and files take it as it is.
    """

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


class Keyring:
    """The secrets of one worker: one that it shares with all, or one for each name.

    With several, the name that the other side claims decides which one it has to know. So no worker
    can pass for another one, and two workers that share none cannot connect. The alternative, one
    key per cluster and certificates for names, needs an authority that all of them trust.
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
        """Return, for one handshake, a function from a claimed name to the secret it must prove.

        `token` makes random bytes. A name without a secret gets some, so that it fails exactly as a
        wrong secret does, and a peer without the secret cannot find out which names are known here.
        """
        # Made before the name is known, and anew for each handshake: not even this worker itself
        # could prove to know them.
        others = Secret(token(32)) if self._others is None else self._others
        return lambda name: self._secrets.get(name, others)
