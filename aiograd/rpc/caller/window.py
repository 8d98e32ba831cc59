"""Calls that wait because enough others are under way to the same peer.

The oldest starts when there is room. That alone would be a deadlock where a call here, made by the
peer, calls it back and the window is full of calls that wait for just this one. So of every call
that runs here, the *parent*, one child may be under way beyond the window: whoever waits then waits
for a brother, which ends sooner or later, and a peer gets no more than one call beyond the window
for each that runs here.

A parent is known by its deadline: the very object in `current.DEADLINE`, which tasks and threads
inherit, and which no other call has. Pure: `Caller` starts and ends calls.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from typing import Any

_MANY = 1024  # parents after which those are looked for that have ended
Start = tuple[Any, ...]  # arguments of `Caller._start`


class Waiting(OrderedDict[Any, Start]):
    """Futures of calls that have not started, in order, with what starts them."""

    def __init__(self) -> None:
        super().__init__()
        # By the id of a parent: itself, and children that wait (or did: see `due`).
        self.families: dict[int, tuple[float, deque[Any]]] = {}
        self._beyond: dict[int, tuple[float, int]] = {}  # itself, and the call beyond the window

    def enter(self, future: Any, start: Start, parent: float) -> None:
        self[future] = start
        if parent is not math.inf:
            self.families.setdefault(id(parent), (parent, deque()))[1].append(future)

    def due(self, pending: Container[int]) -> Iterator[tuple[float, Start]]:
        """Children that may start beyond the window, with their parents, which were taken out.

        `pending` has the ids of calls under way. Say for each one that it has `left`."""
        if len(self._beyond) > _MANY:
            self.tidy(pending)
        for key, (parent, children) in list(self.families.items()):
            while children and children[0] not in self:  # started or given up meanwhile
                children.popleft()
            if not children:
                del self.families[key]
            elif key not in self._beyond or self._beyond[key][1] not in pending:
                yield parent, self.pop(children.popleft())

    def left(self, parent: float, id_: int) -> None:
        self._beyond[id(parent)] = parent, id_

    def tidy(self, pending: Container[int]) -> None:
        """Forget parents of which nothing waits or is under way any more."""
        if not self:
            self.families.clear()
        self._beyond = {key: each for key, each in self._beyond.items() if each[1] in pending}
