"""Calls that wait because enough others are under way to the same peer. Pure.

The oldest starts when there is room. That alone would be a deadlock where a call that runs here,
made by the peer, calls the peer back, and the window is full of calls that wait for just this one.
So of every call that runs here, the *parent*, one child may be under way beyond the window: a child
that waits then waits for a sibling, which ends sooner or later, and a peer gets at most one call
beyond the window for each call of its own that runs here.

A parent is identified by its `CallScope.call`, which tasks and threads inherit. `Caller` starts and
ends calls.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from typing import Any, Final

_MANY: Final = 1024  # parents after which those are looked for that have ended


class Window(OrderedDict[Any, Any]):
    """Futures of calls that have not started, in order, with what starts them."""

    def __init__(self) -> None:
        super().__init__()
        # By the id of a parent: itself, and children that wait (or did: see `due`). The parent is
        # kept, so that its id is not given to another object meanwhile.
        self.families: dict[int, tuple[Any, deque[Any]]] = {}
        self._beyond: dict[int, tuple[Any, int]] = {}  # itself, and the call beyond the window

    def enter(self, future: Any, start: Any, parent: Any) -> None:
        """Let a call wait; `parent` is the call that makes it, or None."""
        self[future] = start
        if parent is not None:
            self.families.setdefault(id(parent), (parent, deque()))[1].append(future)

    def due(self, pending: Container[int]) -> Iterator[tuple[Any, Any, Any]]:
        """Take out children that may start beyond the window: parent, future, what starts it.

        `pending` has the ids of calls under way. Call `left` for each child that has started."""
        if len(self._beyond) > _MANY:
            self.tidy(pending)
        for key, (parent, children) in list(self.families.items()):
            while children and children[0] not in self:  # started or abandoned meanwhile
                children.popleft()
            if not children:
                del self.families[key]
            elif key not in self._beyond or self._beyond[key][1] not in pending:
                future = children.popleft()
                yield parent, future, self.pop(future)

    def left(self, parent: Any, id_: int) -> None:
        """Note that a child of `parent` is under way beyond the window."""
        self._beyond[id(parent)] = parent, id_

    def tidy(self, pending: Container[int]) -> None:
        """Forget parents of which nothing waits or is under way any more."""
        if not self:
            self.families.clear()
        self._beyond = {key: each for key, each in self._beyond.items() if each[1] in pending}
