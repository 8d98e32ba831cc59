"""How the passes of a context ended, as far as one worker knows.

The originator of a pass decides its outcome, once. A participant cannot tell whether the pass went
well elsewhere, and any rule by which it guesses is wrong in some order of deaths. Until it knows the
outcome it shows no number of the pass (`PassUndecided`), so a gradient of a failed pass cannot be read
anywhere, however messages are delayed and whichever workers die. Knowledge travels as a `Report`: what
one originator says of all its passes in one context.

    originator                                                  participant
    decided(7, well) ── report, in front of the next message ─▶ learn(report), outcome(…, 7) → True

A report is complete, so the latest one of an originator replaces all earlier ones. It lists only
passes that run and passes that failed: all others below `limit` ended well. So it stays small in a
context with many passes. A worker passes reports of others on, so that knowledge follows the calls.

Pure state: `reports` sends reports and ends passes by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Report(NamedTuple):
    """What an originator says of its passes in one context; plain data, travels as a tuple."""

    incarnation: bytes  # of the originator
    name: str
    version: int  # grows with every decision: the highest one is the latest
    limit: int  # every pass with a smaller number has begun
    best: int  # the highest number of a pass that ended well; -1 if none did
    running: tuple[int, ...]
    failed: tuple[int, ...]

    def outcome(self, number: int) -> bool | None:
        """Tell whether a pass ended well; None if it was undecided when the report was made."""
        if number >= self.limit or number in self.running:
            return None
        return number not in self.failed


class Outcomes:
    """What one worker knows of the outcomes of one context's passes."""

    __slots__ = ("_best", "_failed", "_limit", "_own", "_reports", "_told", "running", "version")

    def __init__(self) -> None:
        # Grows with everything that is learned; 0: there is nothing to report. Calls of contexts
        # without a pass, so most calls, compare only this number.
        self.version: int = 0
        self.running: dict[int, None] = {}  # passes begun here and not decided
        self._limit, self._best, self._own = 0, -1, 0
        self._failed: list[int] = []  # passes begun here that failed
        self._reports: dict[bytes, Report] = {}  # the latest one of each other originator
        self._told: dict[bytes, int] = {}  # incarnation of a peer → version that it knows

    # ── at the originator ───────────────────────────────────────────────────────────────────────

    def begun(self, number: int) -> None:
        """Note that a pass begins here."""
        self.running[number] = None
        self._limit = number + 1

    def decided(self, number: int, well: bool) -> bool:
        """Decide the outcome of a pass that began here; False if it was decided before."""
        if number not in self.running:
            return False
        del self.running[number]
        # Failed ones are listed for ever: they are few, and the report must stay complete.
        if not well:
            self._failed.append(number)
        elif number > self._best:
            self._best = number
        self._own += 1
        self.version += 1
        return True

    # ── anywhere ────────────────────────────────────────────────────────────────────────────────

    def learn(self, report: Report, sender: bytes) -> bool:
        """Take in a report that the peer `sender` sent; False if it says nothing new."""
        known = self._reports.get(report.incarnation)
        # Reports of one originator may come by several ways and in any order.
        if known is not None and known.version >= report.version:
            return False
        self._reports[report.incarnation] = report
        # A peer that knew everything before still does: it need not get back what it has just sent.
        if self._told.get(sender, 0) == self.version:
            self._told[sender] = self.version + 1
        self.version += 1
        return True

    def outcome(self, originator: bytes, number: int) -> bool | None:
        """Tell whether a pass of another worker ended well; None if that is not known."""
        report = self._reports.get(originator)
        return None if report is None else report.outcome(number)

    def best(self, originator: bytes) -> int:
        """Return the highest number of another worker's pass known to have ended well, or -1."""
        report = self._reports.get(originator)
        return -1 if report is None else report.best

    def knows_all(self, peer: bytes) -> bool:
        """Tell whether a peer was sent everything that is known here."""
        return self._told.get(peer, 0) == self.version

    def forget_told(self, peer: bytes) -> None:
        """Count a peer as ignorant again: what was sent has not reached it."""
        self._told.pop(peer, None)

    def tell(self, peer: bytes, me: tuple[str, bytes]) -> Iterator[Report]:
        """Yield the reports that a peer may not have; from now on it counts as knowing them."""
        self._told[peer] = self.version
        # All of them: what a peer knows is remembered as one number, not one per originator.
        if self._own:
            name, incarnation = me
            running, failed = tuple(self.running), tuple(self._failed)
            yield Report(incarnation, name, self._own, self._limit, self._best, running, failed)
        for report in self._reports.values():
            # Of its own passes the peer itself decides.
            if report.incarnation != peer:
                yield report
