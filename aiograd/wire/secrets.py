"""Secrets that no text shows, and the keyring: which secret is shared with which peer.

A secret passes through stack frames, records and errors. Logs, debuggers and error reporters print
those, and must not show it. So its text is "<secret>".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

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

    With several, the name of the other side decides which one it has to know. So no worker can pass
    for another one, and two workers that share none cannot connect. The alternative, one key per
    cluster and certificates for names, needs an authority that all of them trust.
    """

    def __init__(self, secrets: bytes | Mapping[str, bytes]) -> None:
        named = secrets if isinstance(secrets, Mapping) else {OTHERS: secrets}
        if any(len(secret) < SHORTEST for secret in named.values()):
            raise ValueError(f"a secret has at least {SHORTEST} bytes")
        self._secrets = {name: Secret(secret) for name, secret in named.items()}
        self._others = self._secrets.pop(OTHERS, None)
        self._derived: list[tuple[Secret, Any]] | None = None

    def secret_for(self, name: str) -> Secret | None:
        """Return the secret to share with the worker of this name; None if there is none."""
        return self._secrets.get(name, self._others)

    def shares(self, name: str) -> bool:
        """Whether there is a secret to share with the worker of this name."""
        return self.secret_for(name) is not None

    def owner_of(self, secret: Secret) -> str:
        """Return the name that a secret is for; "" if it is not for one name only."""
        names = [name for name, each in self._secrets.items() if each == secret]
        return names[0] if len(names) == 1 and secret != self._others else ""

    def candidates(self, name: str = "") -> tuple[Secret, ...]:
        """Return the secrets that the worker of this name may know, or any worker at all."""
        if name:
            found = self.secret_for(name)
            return () if found is None else (found,)
        rest = () if self._others is None else (self._others,)
        return tuple(dict.fromkeys((*rest, *self._secrets.values())))  # each once

    def derived(self, derive: Callable[[bytes], T]) -> Sequence[tuple[Secret, T]]:
        """Return each secret with what one function makes of it, which is computed once."""
        # For strangers: with a hundred partners, to derive their keys takes longer than all else
        # that a hello costs.
        if self._derived is None:
            self._derived = [(secret, derive(secret)) for secret in self.candidates()]
        return self._derived
