"""Barriers and gathers: every member of a group brings a value and gets the values of all.

Of each group the member of the lowest rank is the root: the others send it their values, and its
reply carries the values of all.

    service          from → to             carries        reply
    cluster.gather   member → root         its value      the values of all, by name

    PendingGathers   the root's bookkeeping, without I/O
    Collectives      one worker's part: takes part in gathers, and is the root of some

Gathers of one group that are under way at the same time pair up in the order in which each member
began them. `member.py` reports which workers have left or are lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from aiograd.cluster.membership.roster import RANKS
from aiograd.errors import (
    DeadlineExceeded,
    NotAllowed,
    ProtocolError,
    UnknownWorker,
    WorkerLost,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import LOST_PEERS, PeerInfo, forget_one
from aiograd.rpc.link.ledger import MEMORY, Hold

__all__ = ["Collectives", "Contribution", "Group", "PendingGathers", "mark_retrieved"]

_MEMBER: Final = 256  # bytes that a member of a group takes in the tables of a gather

# Name and incarnation of each member, in order of rank; the first one is the root. The incarnation
# makes a restarted worker another group: its gathers never pair with those of its earlier start.
Group = tuple[tuple[str, bytes], ...]


@dataclass(eq=False, slots=True)
class Contribution:
    """The value of one member of a group, held at the root until the gather is complete."""

    group: Group
    name: str
    value: Any


class PendingGathers:
    """The contributions at one root whose gathers are not complete yet."""

    def __init__(self) -> None:
        # Per group and member a queue: the heads of all queues make up the next complete gather.
        self._waiting: dict[Group, dict[str, list[Contribution]]] = {}

    def add(self, group: Group, name: str, value: Any) -> Contribution:
        """Add a member's value, behind those that it has added before."""
        contribution = Contribution(group, name, value)
        self._waiting.setdefault(group, {}).setdefault(name, []).append(contribution)
        return contribution

    def withdraw(self, contribution: Contribution) -> None:
        """Remove a contribution, as if it had never been added; without effect if it is gone."""
        members = self._waiting.get(contribution.group, {})
        queue = members.get(contribution.name, [])
        if contribution in queue:
            queue.remove(contribution)
            self._drop_empty(contribution.group)

    def missing(self, group: Group) -> list[str]:
        """List the members that have nothing waiting."""
        members = self._waiting.get(group, {})
        return [name for name, _ in group if name not in members]

    def complete(self, group: Group) -> list[Contribution]:
        """Take out the first value of each member, in order of rank; empty if one is missing."""
        if self.missing(group):
            return []
        members = self._waiting[group]
        found = [members[name].pop(0) for name, _ in group]
        self._drop_empty(group)
        return found

    def gone(self, incarnation: bytes) -> list[Contribution]:
        """Remove and return what cannot complete without this worker."""
        ended = [group for group in self._waiting if any(each == incarnation for _, each in group)]
        return [
            contribution
            for group in ended
            for queue in self._waiting.pop(group).values()
            for contribution in queue
        ]

    def _drop_empty(self, group: Group) -> None:
        # `missing` relies on it: a member without contributions has no queue.
        members = {name: queue for name, queue in self._waiting[group].items() if queue}
        if members:
            self._waiting[group] = members
        else:
            del self._waiting[group]

    def __iter__(self) -> Iterator[Contribution]:
        for members in self._waiting.values():
            for queue in members.values():
                yield from queue


class Collectives:
    """The gathers that one worker takes part in, and those of which it is the root."""

    def __init__(self, agent: Agent, peers: Callable[[], Sequence[PeerInfo]]) -> None:
        self._agent = agent
        self._peers = peers  # the members, in order of rank
        self._pending = PendingGathers()  # of the groups whose root this worker is
        # The reply to each contribution; every one in `_pending` has one.
        self._replies: dict[Contribution, asyncio.Future[dict[str, Any]]] = {}
        # One lock per group, alive while a gather holds or awaits it.
        self._locks: WeakValueDictionary[Group, asyncio.Lock] = WeakValueDictionary()
        # Incarnation and name of workers that left or are lost, the latest `LOST_PEERS` of them: a
        # gather with one of these fails at once, instead of waiting for a value that never comes.
        self._gone: dict[bytes, str] = {}
        agent.services["cluster.gather"] = self._on_gather

    async def gather(
        self, value: Any, names: Iterable[str] | None, timeout: float, what: str
    ) -> dict[str, Any]:
        """Exchange a value with all members of a group: all workers, or those of `names`.

        DeadlineExceeded names `what`, and at the root the members that are missing.
        """
        group = self._group(names)
        self._check_alive(group)
        root = group[0][0]
        lock = self._locks.setdefault(group, asyncio.Lock())
        try:
            # One gather of a group at a time. A value with references in it takes longer to send,
            # so the next gather could overtake it, and calls would pair up in the wrong order.
            async with asyncio.timeout(None if timeout == math.inf else timeout), lock:
                # The root sends a request to itself, too: its result is a copy like everyone's,
                # and changing it changes nobody else's.
                request = self._agent.request(
                    root, "cluster.gather", group, value, timeout=math.inf
                )
                return dict(await request)
        except TimeoutError:
            missing = [root]
            if root == self._agent.name:
                missing = [name for name in self._pending.missing(group) if name != root]
            raise DeadlineExceeded(", ".join(missing), what, timeout) from None

    def gone(self, peer: PeerInfo, error: Exception) -> None:
        """Fail the gathers that cannot complete without a worker that left or is lost."""
        self._gone[peer.incarnation] = peer.name
        if len(self._gone) > LOST_PEERS:
            forget_one(self._gone, self._gone.__getitem__)
        self.cut_off(peer, error)

    def cut_off(self, peer: PeerInfo, error: Exception) -> None:
        """Fail the gathers here in which a worker takes part whose session is lost.

        What it sent, or was to be sent, may be lost with it. It is not gone: while it is a member,
        the next gather may find it again.
        """
        for contribution in self._pending.gone(peer.incarnation):
            self._fail(contribution, error)

    def waiting(self) -> list[tuple[list[str], list[str]]]:
        """List the gathers whose root this worker is: the names of the group, and who has come."""
        groups = dict.fromkeys(contribution.group for contribution in self._pending)
        return [
            ([name for name, _ in group], [name for name, _ in group if name not in missing])
            for group in groups
            for missing in [set(self._pending.missing(group))]
        ]

    def returned(self, peer: PeerInfo) -> None:
        """Accept a worker again that was taken for lost and has reconnected."""
        self._gone.pop(peer.incarnation, None)

    def close(self, error: Exception) -> None:
        """Fail all gathers of which this worker is the root."""
        for contribution in self._replies:
            self._fail(contribution, error)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _group(self, names: Iterable[str] | None) -> Group:
        members = self._peers()
        if isinstance(names, str):
            raise TypeError(f"names should be several names, not the string {names!r}")
        if names is not None:
            wanted = {self._agent.directory.find(name).name for name in names}
            known = {peer.name for peer in members}
            # The directory also knows workers that are lost; they are no members.
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

    def _on_gather(self, sender: PeerInfo, group: Group, value: Any) -> Any:
        # Exact types first: the group becomes a key, and its names are compared from now on with
        # every worker that is lost. A tensor among them would fail that for everybody.
        if not _is_group(group):
            raise ProtocolError("cluster.gather: malformed group", sender.name)
        if (sender.name, sender.incarnation) not in group:
            raise NotAllowed(f"{sender.name} is not one of those who gather", self._agent.name)
        if group[0] != (self._agent.name, self._agent.incarnation):
            raise NotAllowed(f"{self._agent.name} is not the root of this group", self._agent.name)
        return self._contribute(group, sender, value)

    def _hold(self, sender: PeerInfo, group: Group) -> Hold | None:
        """Count what a partner lets wait here; Overloaded if that is too much."""
        if not self._agent.restricts(sender):
            return None
        hold = self._agent.accounts.of(sender.name).hold()
        hold.take("gathers")
        # The value itself counts as an argument of a request that has not ended.
        hold.take(MEMORY, _MEMBER * len(group))
        return hold

    async def _contribute(self, group: Group, sender: PeerInfo, value: Any) -> dict[str, Any]:
        """Add a member's value and wait for the others'; withdraw it if cancelled."""
        # Checked here, in the task, not in `_on_gather`: a loss may be read in the same tick as
        # the request, and the group could then never complete.
        self._check_alive(group)
        hold = self._hold(sender, group)
        contribution = self._pending.add(group, sender.name, value)
        reply: asyncio.Future[dict[str, Any]] = self._agent.loop.create_future()
        self._replies[contribution] = reply
        reply.add_done_callback(mark_retrieved)
        try:
            self._reply_if_complete(group)
            return await reply
        finally:
            del self._replies[contribution]
            self._pending.withdraw(contribution)
            if hold is not None:
                hold.close()

    def _reply_if_complete(self, group: Group) -> None:
        """Give the values of all to all, if none is missing."""
        for contribution in [each for each in self._pending if each.group == group]:
            # Cancelled in this very tick: its task has yet to run, and to withdraw it.
            if self._replies[contribution].done():
                self._pending.withdraw(contribution)
        contributions = self._pending.complete(group)
        values = {contribution.name: contribution.value for contribution in contributions}
        for contribution in contributions:
            self._replies[contribution].set_result(values)

    def _fail(self, contribution: Contribution, error: Exception) -> None:
        reply = self._replies[contribution]
        if not reply.done():
            reply.set_exception(error)


def _is_group(value: Any) -> bool:
    return (
        type(value) is tuple
        and 0 < len(value) <= RANKS
        and all(
            type(each) is tuple
            and len(each) == 2
            and type(each[0]) is str
            and type(each[1]) is bytes
            and len(each[1]) == 16
            for each in value
        )
        and len({name for name, _ in value}) == len(value)
    )


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()
