"""Barriers and gatherings of one worker, carried over the wire.

Of each group the member of the lowest rank leads: the others bring it their values, and its answer
is everyone's. Who has brought what is the book-keeping of `Gatherings`, without I/O; who is there
is told by `members.py`.

    service          from → to             says                     answer
    cluster.gather   member → its leader   my value of this turn    everyone's values
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiograd.cluster.meetings import Gathering, Gatherings, Group
from aiograd.errors import DeadlineExceeded, NotAllowed, RpcError, UnknownWorker, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import LOST_PEERS, PeerInfo

__all__ = ["Assembly", "retrieve"]


class Assembly:
    """What one worker takes part in, and what it leads."""

    def __init__(self, agent: Agent, peers: Callable[[], Sequence[PeerInfo]]) -> None:
        self._agent = agent
        self._peers = peers  # the members, in order of rank
        self._gatherings = Gatherings(agent.name)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # by id of the gathering
        self._gone: dict[bytes, str] = {}  # incarnation and name of those who can come no more
        agent.services["cluster.gather"] = self._on_gather

    async def gather(
        self, value: Any, names: Iterable[str] | None, timeout: float, what: str
    ) -> dict[str, Any]:
        """Exchange a value with all the others of a group: all members, or `names`."""
        group = self._group(names)
        self._check_alive(group)
        turn = self._gatherings.begin(group)
        leader = group[0][0]
        if leader != self._agent.name:
            request = self._agent.request(
                leader, "cluster.gather", group, turn, value, what, timeout=timeout
            )
            return dict(await request)
        gathering = self._gatherings.bring(group, turn, leader, value)
        assert gathering is not None
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                return dict(await self._complete(gathering))
        except TimeoutError:
            late = DeadlineExceeded(", ".join(gathering.missing()), what, timeout)
            self._give_up(gathering, late)
            raise late from None
        except asyncio.CancelledError:
            self._give_up(gathering, RpcError(f"{leader} gave up the {what}"))
            raise

    def gone(self, peer: PeerInfo, error: Exception) -> None:
        """End what can never be complete without this worker."""
        self._gone[peer.incarnation] = peer.name
        if len(self._gone) > LOST_PEERS:
            del self._gone[next(iter(self._gone))]
        for gathering in self._gatherings.gone(peer.incarnation):
            self._give_up(gathering, error)

    def close(self, error: Exception) -> None:
        """End everything that is waited for here."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

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

    def _complete(self, gathering: Gathering) -> asyncio.Future[dict[str, Any]]:
        """The result of a gathering, for one that waits for it."""
        future = self._waiting.get(id(gathering))
        if future is None:
            future = self._waiting[id(gathering)] = self._agent.loop.create_future()
            future.add_done_callback(retrieve)
        if not gathering.missing():
            del self._waiting[id(gathering)]
            future.set_result(gathering.values)
        return asyncio.shield(future)

    def _give_up(self, gathering: Gathering, error: Exception) -> None:
        self._gatherings.end(gathering)
        future = self._waiting.pop(id(gathering), None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _on_gather(self, sender: PeerInfo, group: Group, turn: int, value: Any, what: str) -> Any:
        if (sender.name, sender.incarnation) not in group:
            raise NotAllowed(f"{sender.name} is not one of those who gather", self._agent.name)
        self._check_alive(group)
        gathering = self._gatherings.bring(group, turn, sender.name, value)
        if gathering is None:
            raise RpcError(f"{self._agent.name} has given up this {what} already")
        return self._complete(gathering)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Look at an outcome, so that it is not reported as forgotten."""
    if not future.cancelled():
        future.exception()
