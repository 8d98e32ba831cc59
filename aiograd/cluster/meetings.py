"""Workers that wait for each other, without I/O: gatherings of a group, and the way out.

In both, one worker leads: the others bring it something and wait for its answer.

    Gatherings   one value from every member of a group, all of them back to everyone; those that
                 wait at the same time pair up in the order in which each member brought them
    Farewell     rounds of counts, until no call is on its way anywhere

`members.py` carries both over the wire. Who is lost is the membership's business: it is told here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
