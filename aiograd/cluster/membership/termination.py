"""Termination detection: when is no call under way anywhere in the cluster? No I/O.

The coordinator runs the detector during a graceful shutdown. The members send it the counts of
their calls, round by round; `coordinator.py` carries the reports over the wire.

    round 0    all want to leave
    round n    each member waits until its own calls are answered, then reports its counts
    last       two successive rounds with equal counts and no call outstanding
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["TerminationDetector"]


@dataclass(frozen=True, slots=True)
class _Report:
    outstanding: int  # calls made and not yet answered
    started: int  # calls ever made


class TerminationDetector:
    """The coordinator's side of a graceful shutdown: decides when no call can be under way.

    In round 0 each member says that it wants to leave. In every later round each member waits until
    its own calls are answered, then reports. One round of zeros proves nothing: while the reports
    are collected, a chain of calls can move from members that have yet to report to members that
    already did. But if a second round finds zeros again and no member has made a call since, then
    at the moment between the two rounds there was no call anywhere, and so there is none now.
    """

    def __init__(self) -> None:
        self._round = 0
        self._reports: dict[str, _Report] = {}  # of the current round
        self._before: dict[str, _Report] | None = None  # of the one before it, from round 1 on

    def report(self, name: str, outstanding: int, started: int) -> None:
        """Take the counts of a member; each reports once per round."""
        self._reports[name] = _Report(outstanding, started)

    def decide(self, members: Collection[str]) -> bool | None:
        """End the round if all of `members` have reported: True if it was the last one.

        None while a report is missing. A worker that is lost is no member, and not waited for.
        """
        if not all(name in self._reports for name in members):
            return None
        # Reports of workers that were lost during the round are dropped: they would make two
        # successive rounds differ.
        reports = {name: self._reports[name] for name in members}
        quiet = all(report.outstanding == 0 for report in reports.values())
        done = self._before == reports and quiet
        # Round 0 carries no counts, so nothing may be compared with it.
        self._before = reports if self._round else None
        self._round += 1
        self._reports = {}
        return done
