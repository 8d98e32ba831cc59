"""What happened in a simulation, in order: the last events to read, and a hash of all of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from typing import Any

LAST = 50  # events shown when something went wrong
QUIET = frozenset({"sent", "read"})  # hashed, but too many to be read


class Trace:
    """Two runs with equal hashes did the same things at the same times."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, all_of_it: bool = False) -> None:
        self._loop = loop
        self._hash = hashlib.blake2b(digest_size=16)
        self._all = all_of_it
        self._frozen = False
        self.events: deque[tuple[float, str, tuple[Any, ...]]] = deque(
            maxlen=None if all_of_it else LAST
        )

    def __call__(self, kind: str, *facts: Any) -> None:
        now = self._loop.time()
        self._hash.update(f"{now!r} {kind} {facts!r}\n".encode())
        if self._all or (kind not in QUIET and not self._frozen):
            self.events.append((now, kind, facts))

    def freeze(self) -> None:
        """Something is wrong: the events that led to it are those to be read."""
        self._frozen = True

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def lines(self) -> list[str]:
        return [
            f"{now:12.6f}  {kind:<10} {' '.join(map(str, facts))}"
            for now, kind, facts in self.events
        ]
