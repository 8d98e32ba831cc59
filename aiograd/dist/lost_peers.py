"""The peers that one worker has lost, by incarnation, in the order of their losses.

Passes and contexts compare what they knew when they began with what was lost since: the order of a
loss says which of the two came first.
"""

from __future__ import annotations

import math

from aiograd.rpc.directory import LOST_PEERS, forget_one


class LostPeers:
    """Incarnations of lost peers. Only the latest are remembered; `count` counts all of them."""

    def __init__(self) -> None:
        self.count: int = 0  # losses so far
        self._order: dict[bytes, int] = {}  # incarnation → the value of `count` at its loss
        self._names: dict[bytes, str] = {}

    def add(self, incarnation: bytes, name: str) -> None:
        """Note a loss."""
        self.count += 1
        self._names[incarnation] = name
        # A peer may be reported lost several times. The first loss counts: edges went with it.
        self._order.setdefault(incarnation, self.count)
        # The directory forgets a lost peer after LOST_PEERS others, so nothing can name it by then.
        if len(self._order) > 2 * LOST_PEERS:
            del self._names[forget_one(self._order, self._names.__getitem__)]

    def discard(self, incarnation: bytes) -> None:
        """Forget a loss: the peer is back in a new session."""
        self._order.pop(incarnation, None)
        self._names.pop(incarnation, None)

    def order(self, incarnation: bytes) -> float:
        """Return the number of a peer's loss; infinity if it is not lost."""
        return self._order.get(incarnation, math.inf)

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._order

    def __len__(self) -> int:
        return len(self._order)
