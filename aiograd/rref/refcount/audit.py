"""Forks that were sent away and not heard of since.

A message that carries a reference may be thrown away where it arrives: the caller was cancelled,
the payload could not be decoded. Then nobody will ever give the fork back. So a sharer remembers
what it sent, and asks now and then. Most forks are given back, used or accepted long before that;
they cost one dict entry.

    sent ──round──▶ old ──asked, unknown──▶ suspect ──asked again, unknown──▶ given up

Two questions half a lease apart, because a question may overtake a large message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiograd.rref.refcount.records import RefId

_SENT: Final = 0
_OLD: Final = 1
_SUSPECT: Final = 2


class Watch:
    """Which forks are with whom, and how long we have heard nothing."""

    def __init__(self) -> None:
        self._stages: dict[RefId, tuple[bytes, int]] = {}  # fork → incarnation of its holder, stage

    def __len__(self) -> int:
        return len(self._stages)

    def __contains__(self, fork: RefId) -> bool:
        return fork in self._stages

    def add(self, fork: RefId, holder: bytes) -> None:
        self._stages[fork] = (holder, _SENT)

    def discard(self, fork: RefId) -> None:
        self._stages.pop(fork, None)

    def round(self, hurry: bool = False) -> dict[bytes, list[RefId]]:
        """Let everything grow older; return whom to ask about what.

        `hurry` asks about new forks too: at shutdown, when no call is on its way any more.
        """
        questions: dict[bytes, list[RefId]] = {}
        for fork, (holder, stage) in self._stages.items():
            if stage == _SENT and not hurry:
                self._stages[fork] = (holder, _OLD)
            else:
                questions.setdefault(holder, []).append(fork)
        return questions

    def answered(
        self, asked: Iterable[RefId], unknown: Iterable[RefId], hurry: bool = False
    ) -> list[RefId]:
        """Take an answer; return the forks to give up. The known ones start anew."""
        missing = set(unknown)
        given_up = []
        for fork in asked:
            if (found := self._stages.get(fork)) is None:
                continue
            holder, stage = found
            if fork not in missing:
                self._stages[fork] = (holder, _SENT)
            elif stage == _SUSPECT or hurry:
                given_up.append(fork)
            else:
                self._stages[fork] = (holder, _SUSPECT)
        return given_up

    def held_by(self, holder: bytes) -> list[RefId]:
        return [fork for fork, (who, _) in self._stages.items() if who == holder]
