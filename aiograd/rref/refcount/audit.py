"""Forks that were sent and not heard of since.

A message that carries a reference may be thrown away where it arrives: the caller was cancelled,
the payload could not be decoded. Then no worker will ever release the fork. So a sharer remembers
the forks it sent, and asks their holders from time to time. Most forks are released, used or
accepted long before that; they cost one dict entry.

    sent ──round──▶ old ──asked, unknown──▶ suspect ──asked again, unknown──▶ abandoned

Two questions half a lease apart, because a question may overtake a large message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiograd.rpc.directory import PeerInfo
from aiograd.rref.refcount.records import RefId

_SENT: Final = 0
_OLD: Final = 1
_SUSPECT: Final = 2


class Audit:
    """The forks that one worker sent, with their holders and how long they have been silent."""

    def __init__(self) -> None:
        self._stages: dict[RefId, tuple[PeerInfo, int]] = {}  # fork → holder, stage

    def __len__(self) -> int:
        return len(self._stages)

    def __contains__(self, fork: RefId) -> bool:
        return fork in self._stages

    def add(self, fork: RefId, holder: PeerInfo) -> None:
        """Remember a fork that is sent to a worker."""
        self._stages[fork] = (holder, _SENT)

    def discard(self, fork: RefId) -> None:
        """Forget a fork: its holder was heard of, or is lost."""
        self._stages.pop(fork, None)

    def round(self, at_shutdown: bool = False) -> list[tuple[PeerInfo, list[RefId]]]:
        """Age all forks by one stage; return which holder to ask about which forks.

        `at_shutdown` asks about new forks too: no call is under way any more then.
        """
        # Grouped by incarnation: PeerInfo hashes all its fields.
        questions: dict[bytes, tuple[PeerInfo, list[RefId]]] = {}
        # Asking changes no stage: only an answer makes a fork suspect, so a question that is lost
        # costs one round and nothing else.
        for fork, (holder, stage) in self._stages.items():
            if stage == _SENT and not at_shutdown:
                self._stages[fork] = (holder, _OLD)
            else:
                questions.setdefault(holder.incarnation, (holder, []))[1].append(fork)
        return list(questions.values())

    def answered(
        self, asked: Iterable[RefId], unknown: Iterable[RefId], at_shutdown: bool = False
    ) -> list[RefId]:
        """Take an answer; return the forks to abandon. The known ones start anew."""
        # At shutdown one answer is enough: no message is under way that could bring the fork.
        missing = set(unknown)
        abandoned = []
        for fork in asked:
            if (found := self._stages.get(fork)) is None:
                continue  # heard of while the question was under way
            holder, stage = found
            if fork not in missing:
                self._stages[fork] = (holder, _SENT)
            elif stage == _SUSPECT or at_shutdown:
                abandoned.append(fork)
            else:
                self._stages[fork] = (holder, _SUSPECT)
        return abandoned

    def holders(self) -> set[bytes]:
        """Return the incarnations that were sent silent forks."""
        return {holder.incarnation for holder, _ in self._stages.values()}

    def held_by(self, incarnation: bytes) -> list[RefId]:
        """Return the silent forks that one worker was sent."""
        return [
            fork for fork, (holder, _) in self._stages.items() if holder.incarnation == incarnation
        ]
