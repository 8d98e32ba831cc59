"""What a pass will visit on one worker: found once, and good for every pass over the same tape."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from aiograd.autograd.graph import Accumulate, Node
from aiograd.autograd.sweep import Halves, contributions
from aiograd.dist.loops import Loop, cut
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.dist.weight import LATE, LONG, halves, weigh


class Topology:
    """The ends of edges a worker has, and how many contributions each node behind them will get."""

    __slots__ = (
        "_halves",
        "_opened",
        "_work",
        "awaited",
        "closes_loops",
        "counts",
        "dead",
        "gone",
        "heavy",
        "loops",
        "receives",
        "roots",
        "unreached",
    )

    def __init__(
        self,
        sends: Mapping[int, SendNode],
        receives: Mapping[int, RecvNode],
        roots: Iterable[Node] = (),
        *,
        capture: Collection[Node] = (),
        gone: Collection[bytes] = (),
        loops: bool = True,
    ) -> None:
        self.roots, self.gone = list(roots), list(gone)
        sends, self.receives = dict(sends), dict(receives)  # threads may be adding to them
        self.loops: dict[RecvNode, list[Loop]] = {}  # what peers find on their own tapes
        self.awaited: dict[int, SendNode] = {}  # by edge
        self.dead: list[SendNode] = []  # whose receivers were gone before the pass
        for edge, send in sends.items():
            if gone and send.incarnation in gone:
                self.dead.append(send)
            elif send.loops and loops:
                self.awaited[edge] = cut(send, capture, self.loops)
            else:
                self.awaited[edge] = send
        self.counts = contributions([*self.roots, *self.awaited.values(), *self.dead])
        self._work = weigh(self.counts)
        self.heavy = self._work > LONG
        self._halves: Halves | None = None
        self.unreached: list[RecvNode] = []
        self.closes_loops = False  # whether a peer may find something on our tape
        for node in self.receives.values():
            if node not in self.counts:
                self.unreached.append(node)
            if node.loops:
                self.closes_loops = True
        self._opened: list[Any] = []
        for opened in self.loops.values():
            for _, edge, place in opened:
                self._opened.append(sends[edge].parents[place])

    def halves(self, originator: bytes) -> Halves | None:
        """What can wait while peers go on with the rest; nothing if all is for the originator."""
        if self._work > LATE and self._halves is None:
            for node in self.receives.values():
                if node.incarnation != originator:
                    self._halves = halves(self.counts)
                    break
        return self._halves

    def fits(
        self, roots: Collection[Node], gone: Collection[bytes], sends: int, receives: int
    ) -> bool:
        """Whether a pass from these roots visits the same; edges are only ever added."""
        if (
            receives != len(self.receives)
            or sends != len(self.awaited) + len(self.dead)
            or self.roots != roots
            or self.gone != gone
        ):
            return False
        for node in self.counts:
            if node.hooks is not None:
                return False
            if node.__class__ is Accumulate and node.variable._hooks:
                return False
        for part in self._opened:
            if part.hooks is not None:
                return False
        return True
