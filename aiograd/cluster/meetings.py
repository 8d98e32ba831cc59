"""Workers that wait for each other, without I/O: gatherings of a group, and the way out.

In both, one worker leads: the others bring it something and wait for its answer.

    Gatherings   one value from every member of a group, all of them back to everyone;
                 the n-th gathering of a group here pairs up with the n-th one there
    Farewell     rounds of counts, until no call is on its way anywhere

`members.py` carries both over the wire. Who is lost is the membership's business: it is told here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Farewell", "Gathering", "Gatherings", "Group"]

# Name and incarnation of each member, in order of rank: a restarted worker makes another group, so
# that the members count their gatherings from 0 together again. The first one leads.
Group = tuple[tuple[str, bytes], ...]


@dataclass(slots=True)
class Gathering:
    """One gathering at its leader: who has brought what."""

    group: Group
    turn: int
    values: dict[str, Any] = field(default_factory=dict)

    def missing(self) -> list[str]:
        return [name for name, _ in self.group if name not in self.values]


class Gatherings:
    """The gatherings of one worker: the turns it has taken, and those that it leads."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._turns: dict[Group, int] = {}  # how many of each group this worker has begun
        self._led: dict[tuple[Group, int], Gathering] = {}

    def begin(self, group: Group) -> int:
        """Take the next turn of a group."""
        turn = self._turns.get(group, 0)
        self._turns[group] = turn + 1
        return turn

    def bring(self, group: Group, turn: int, name: str, value: Any) -> Gathering | None:
        """Bring a member's value to the leader; None when the leader is done with this turn."""
        gathering = self._led.get((group, turn))
        if gathering is None:
            if name != self._own and turn < self._turns.get(group, 0):
                return None  # the leader took this turn before, and it is over
            gathering = self._led[group, turn] = Gathering(group, turn)
        gathering.values[name] = value
        if not gathering.missing():
            del self._led[group, turn]
            gathering.values = {member: gathering.values[member] for member, _ in group}
        return gathering

    def end(self, gathering: Gathering) -> None:
        """Forget a gathering that its leader gave up."""
        self._led.pop((gathering.group, gathering.turn), None)

    def gone(self, incarnation: bytes) -> list[Gathering]:
        """Give up, and return, what can never be complete without this worker."""

        def concerns(group: Group) -> bool:
            return any(member == incarnation for _, member in group)

        self._turns = {group: turn for group, turn in self._turns.items() if not concerns(group)}
        ended = [gathering for (group, _), gathering in self._led.items() if concerns(group)]
        for gathering in ended:
            self.end(gathering)
        return ended

    def __len__(self) -> int:
        return len(self._led)


@dataclass(frozen=True, slots=True)
class _Report:
    outstanding: int  # calls made and not yet answered
    started: int  # calls ever made


class Farewell:
    """The leader's side of a graceful shutdown: when is it certain that nothing is going on?

    In round 0 everyone says that it wants to leave. In every later round each worker waits until
    its own calls are answered, then reports. One round of zeros proves nothing: while the reports
    are collected, a chain of calls can move from workers that have yet to report to workers that
    already did. But if a second round finds zeros again and nobody has made a call since, then at
    the moment between the two rounds there was no call anywhere, and so there is none now.
    """

    def __init__(self) -> None:
        self._round = 0
        self._reports: dict[str, _Report] = {}  # of the current round
        self._before: dict[str, _Report] | None = None  # of the one before it, from round 1 on

    def report(self, name: str, outstanding: int, started: int) -> None:
        """Hear from a worker; each reports once per round."""
        self._reports[name] = _Report(outstanding, started)

    def decide(self, members: Collection[str]) -> bool | None:
        """End the round if all of `members` have reported: True when it was the last one."""
        if not all(name in self._reports for name in members):
            return None
        reports = {name: self._reports[name] for name in members}
        quiet = all(report.outstanding == 0 for report in reports.values())
        done = self._before == reports and quiet
        self._before = reports if self._round else None
        self._round += 1
        self._reports = {}
        return done
