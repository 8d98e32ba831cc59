"""Barriers and gatherings of one worker, carried over the wire.

Of each group the member of the lowest rank leads: the others bring it their values, and its answer
is everyone's. Who has brought what is the book-keeping of `Gatherings`, without I/O; who is there
is told by `members.py`.

    service          from → to             says                     answer
    cluster.gather   member → its leader   my value                 everyone's values

Workers that wait for each other, without I/O: gatherings of a group, and the way out.

In both, one worker leads: the others bring it something and wait for its answer.

    Gatherings   one value from every member of a group, all of them back to everyone; those that
                 wait at the same time pair up in the order in which each member brought them
    Farewell     rounds of counts, until no call is on its way anywhere

`members.py` carries both over the wire. Who is lost is the membership's business: it is told here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from aiograd.errors import DeadlineExceeded, NotAllowed, UnknownWorker, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import LOST_PEERS, PeerInfo


class Assembly:
    """What one worker takes part in, and what it leads."""

    def __init__(self, agent: Agent, peers: Callable[[], Sequence[PeerInfo]]) -> None:
        self._agent = agent
        self._peers = peers  # the members, in order of rank
        self._gatherings = Gatherings()  # of the groups that this worker leads
        self._waiting: dict[Brought, asyncio.Future[dict[str, Any]]] = {}  # for the others
        # Held by whoever gathers, so that those of one group begin in the order of their calls.
        self._lines: WeakValueDictionary[Group, asyncio.Lock] = WeakValueDictionary()
        self._gone: dict[bytes, str] = {}  # incarnation and name of those who can come no more
        agent.services["cluster.gather"] = self._on_gather

    async def gather(
        self, value: Any, names: Iterable[str] | None, timeout: float, what: str
    ) -> dict[str, Any]:
        """Exchange a value with all the others of a group: all members, or `names`."""
        group = self._group(names)
        self._check_alive(group)
        leader = group[0][0]
        line = self._lines.setdefault(group, asyncio.Lock())
        try:
            # One of a group at a time: a value that brings references may be overtaken on its way.
            # The leader asks itself, too: what it does to the result is nothing to the others.
            async with asyncio.timeout(None if timeout == math.inf else timeout), line:
                request = self._agent.request(
                    leader, "cluster.gather", group, value, timeout=math.inf
                )
                return dict(await request)
        except TimeoutError:
            missing = [leader]
            if leader == self._agent.name:
                missing = [name for name in self._gatherings.missing(group) if name != leader]
            raise DeadlineExceeded(", ".join(missing), what, timeout) from None

    def gone(self, peer: PeerInfo, error: Exception) -> None:
        """End what can never be complete without this worker."""
        self._gone[peer.incarnation] = peer.name
        if len(self._gone) > LOST_PEERS:
            del self._gone[next(iter(self._gone))]
        for brought in self._gatherings.gone(peer.incarnation):
            self._end(brought, error)

    def returned(self, peer: PeerInfo) -> None:
        """A worker that was lost is there again."""
        self._gone.pop(peer.incarnation, None)

    def close(self, error: Exception) -> None:
        """End everything that is waited for here."""
        for brought in self._waiting:
            self._end(brought, error)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _group(self, names: Iterable[str] | None) -> Group:
        members = self._peers()
        if isinstance(names, str):
            raise TypeError(f"names should be several names, not the string {names!r}")
        if names is not None:
            wanted = {self._agent.directory.find(name).name for name in names}
            known = {peer.name for peer in members}
            if wanted - known:
                raise UnknownWorker(min(wanted - known), tuple(known))
            members = [peer for peer in members if peer.name in wanted]
        if all(peer.incarnation != self._agent.incarnation for peer in members):
            raise ValueError(f"{self._agent.name} is not one of the workers that gather")
        return tuple((peer.name, peer.incarnation) for peer in members)

    def _check_alive(self, group: Group) -> None:
        for name, incarnation in group:
            if incarnation in self._gone:
                raise WorkerLost(name, "no", "it left before everyone had come")

    async def _take_part(self, group: Group, name: str, value: Any) -> dict[str, Any]:
        """Bring a member's value and wait for the others'; if cancelled, it was never here."""
        self._check_alive(group)  # not before: a loss may be read in the same tick as the request
        brought = self._gatherings.bring(group, name, value)
        future: asyncio.Future[dict[str, Any]] = self._agent.loop.create_future()
        self._waiting[brought] = future
        future.add_done_callback(retrieve)
        try:
            self._give_out(group)
            return await future
        finally:
            del self._waiting[brought]
            self._gatherings.take_back(brought)

    def _give_out(self, group: Group) -> None:
        """Give everyone's values to everyone, if all have come."""
        for brought in [each for each in self._gatherings if each.group == group]:
            if self._waiting[brought].done():  # cancelled in this very tick
                self._gatherings.take_back(brought)
        everyone = self._gatherings.complete(group)
        values = {brought.name: brought.value for brought in everyone}
        for brought in everyone:
            self._waiting[brought].set_result(values)

    def _end(self, brought: Brought, error: Exception) -> None:
        future = self._waiting[brought]
        if not future.done():
            future.set_exception(error)

    def _on_gather(self, sender: PeerInfo, group: Group, value: Any) -> Any:
        if (sender.name, sender.incarnation) not in group:
            raise NotAllowed(f"{sender.name} is not one of those who gather", self._agent.name)
        return self._take_part(group, sender.name, value)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Look at an outcome, so that it is not reported as forgotten."""
    if not future.cancelled():
        future.exception()


# Name and incarnation of each member, in order of rank: a restarted worker makes another group. The
# first one leads.
Group = tuple[tuple[str, bytes], ...]


@dataclass(eq=False, slots=True)
class Brought:
    """A value that somebody has brought to the leader of a group, and waits with."""

    group: Group
    name: str
    value: Any


class Gatherings:
    """What has been brought to one worker, as the leader of groups, until everyone has come."""

    def __init__(self) -> None:
        self._waiting: dict[Group, dict[str, list[Brought]]] = {}  # in the order they came

    def bring(self, group: Group, name: str, value: Any) -> Brought:
        """Bring a member's value, behind those that it has brought before."""
        brought = Brought(group, name, value)
        self._waiting.setdefault(group, {}).setdefault(name, []).append(brought)
        return brought

    def take_back(self, brought: Brought) -> None:
        """Its owner waits no longer: as if it had never come."""
        members = self._waiting.get(brought.group, {})
        line = members.get(brought.name, [])
        if brought in line:
            line.remove(brought)
            self._tidy(brought.group)

    def missing(self, group: Group) -> list[str]:
        """Who has brought nothing that waits."""
        members = self._waiting.get(group, {})
        return [name for name, _ in group if name not in members]

    def complete(self, group: Group) -> list[Brought]:
        """Take out the first value of everyone, in order of rank; nothing while one is missing."""
        if self.missing(group):
            return []
        members = self._waiting[group]
        found = [members[name].pop(0) for name, _ in group]
        self._tidy(group)
        return found

    def gone(self, incarnation: bytes) -> list[Brought]:
        """Give up, and return, what waits in vain without this worker."""
        ended = [group for group in self._waiting if any(each == incarnation for _, each in group)]
        return [
            brought
            for group in ended
            for line in self._waiting.pop(group).values()
            for brought in line
        ]

    def _tidy(self, group: Group) -> None:
        members = {name: line for name, line in self._waiting[group].items() if line}
        if members:
            self._waiting[group] = members
        else:
            del self._waiting[group]

    def __iter__(self) -> Iterator[Brought]:
        for members in self._waiting.values():
            for line in members.values():
                yield from line
