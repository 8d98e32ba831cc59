"""Ids of contexts that partners brought and that were released: late messages must not revive them.

Each partner has a memory of its own, so one that opens and leaves thousands of contexts pushes out
ids of its own only. The registry remembers the contexts of this worker and of trusted peers itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from aiograd.rpc.directory import LOST_PEERS

IDS: Final = 4096  # of one partner; no message is overtaken by so many contexts


class ReleasedForPartners:
    """The ids of released contexts, by the name of the partner that brought them."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()

    def __contains__(self, context_id: int) -> bool:
        return any(context_id in ids for ids in self._ids.values())

    def __len__(self) -> int:
        return sum(map(len, self._ids.values()))

    def add(self, partner: str, context_id: int) -> None:
        """Remember that a context was released."""
        ids = self._ids.get(partner)
        if ids is None:
            ids = self._ids[partner] = OrderedDict()
            if len(self._ids) > LOST_PEERS:
                self._ids.popitem(last=False)
        ids[context_id] = None
        while len(ids) > IDS:
            ids.popitem(last=False)
