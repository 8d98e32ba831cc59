"""Termination detection: when is no call under way anywhere in the cluster? No I/O.

One worker leads a graceful shutdown; the others send it their counts, round by round.
`coordinator` carries the reports over the wire.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


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
