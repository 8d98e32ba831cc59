"""What simulated programs did, and whether the outcome of each call is right.

Every call has an id that travels with it; its function notes itself here when it runs. So the
ledger knows how often a call ran, what it returned, when it ended, and whether an error was
justified by a fault that really happened (`schedule.Harm`). The result of every call is known
beforehand: a wrong one, or an error without a reason, is a violation of an invariant.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aiograd.errors import (
    AiogradError,
    BackwardFailed,
    DeadlineExceeded,
    Overloaded,
    RRefError,
    RRefExpired,
    RRefReleased,
    UnknownContext,
    WorkerLost,
)
from aiograd.testing.simulator.schedule import DEATHS, Harm
from aiograd.testing.simulator.world import Node, World, here

# Promises of the library, in seconds.
LATE: Final = 0.25  # after its deadline, by which every call has ended
CANCELLED: Final = 0.5  # in which a cancelled coroutine has ended
NOTICED: Final = 1.0  # in which the death of a process is known
COMPUTING: Final = 5.0  # seconds: more than it takes until a pass has reached all workers
CallId = tuple[int, ...]  # a call made by the call (3,) is (3, 0), and so on


@dataclass
class Entry:
    """One call of a program."""

    id: CallId
    caller: Node
    to: str
    what: str
    timeout: float
    begin: float
    quick: bool  # its function needs far less time than it has: a timeout needs a reason
    patient: bool = False  # its timeout is a sum over many steps: one of them may end it early
    end: float = math.inf
    outcome: str = ""  # "" while it runs, then "ok", "cancelled" or the name of the error
    never: bool = False  # the error said that it did not run


@dataclass
class Ledger:
    """The record of one simulation, and its judge."""

    world: World
    harm: Harm
    entries: dict[CallId, Entry] = field(default_factory=dict)
    ran: dict[CallId, int] = field(default_factory=dict)
    began: dict[CallId, float] = field(default_factory=dict)  # when its function began
    stopped: dict[CallId, float] = field(default_factory=dict)  # when its coroutine ended
    values: list[tuple[Node, Any]] = field(default_factory=list)  # owner, weak reference
    violations: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def violated(self, invariant: str, text: str) -> None:
        """Note that an invariant was violated; the run goes on, to see what else is wrong."""
        self.world.trace("VIOLATION", invariant, text)
        self.world.trace.freeze()
        self.violations.append(f"{invariant}: {text}")

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    async def watch(
        self,
        entry: Entry,
        make: Callable[[], Any],
        expected: Any,
        *,
        errors: tuple[type[BaseException], ...] = (),
    ) -> Any:
        """Make a call, await it, and judge its outcome.

        Return its value, or None after an error. `errors` are outcomes that need no reason.
        """
        self.entries[entry.id] = entry
        try:
            value = await make()
        except asyncio.CancelledError:
            self._close(entry, "cancelled")
            raise
        except errors as error:
            self._close(entry, type(error).__name__)
        except Exception as error:
            self._close(entry, type(error).__name__)
            self.judge(entry, error)
        else:
            self._close(entry, "ok")
            if not equal(value, expected):
                self.violated("I2", f"{entry.what} gave {value!r:.100}, not {expected!r:.100}")
            if entry.id in self.ran and self.ran[entry.id] != 1:
                self.violated("I4", f"{entry.what} ran {self.ran[entry.id]} times")
            return value
        return None

    def _close(self, entry: Entry, outcome: str) -> None:
        entry.end, entry.outcome = self.world.loop.time(), outcome
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.world.trace("outcome", entry.id, entry.what, entry.to, outcome)
        late = entry.end - entry.begin - entry.timeout
        # A paused caller cannot be in time. Only its own pauses count: a paused callee is no
        # excuse, since the caller keeps the deadline.
        late -= entry.caller.delayed(entry.begin, entry.end)
        if late > LATE:
            self.violated("I1", f"{entry.what} to {entry.to} ended {late:.3f} s late: {outcome}")

    def judge(self, entry: Entry, error: Exception) -> None:
        """Decide whether an error is typed, names a worker, and had a reason."""
        what = f"{entry.what} to {entry.to}: {error!r:.200}"
        if not isinstance(error, AiogradError):
            self.violated("I2", f"untyped error from {what}")
            return
        worker = getattr(error, "worker", None)
        if worker == "" or (worker is None and not isinstance(error, UnknownContext)):
            self.violated("I2", f"an error that names no worker, from {what}")
        if isinstance(error, WorkerLost):
            # Notes are added on the way back. An error with notes is that of a call inside the
            # call, and its `executed` says nothing about the outer one.
            own = not getattr(error, "__notes__", None)
            entry.never = own and error.executed == "no" and worker == entry.to
            if not self.harm.may_lose(error.worker):
                self.violated("I8", f"nothing happened to {error.worker}, but {what}")
        elif isinstance(error, DeadlineExceeded):
            # A pass may end before its own deadline, because that of a part of it was spent.
            early = entry.begin + entry.timeout - entry.end
            if early > 0.001 and not isinstance(error, BackwardFailed) and not entry.patient:
                self.violated("I2", f"{early:.3f} s before the deadline, from {what}")
            if entry.quick and not self.harm.any:
                self.violated("I2", f"nothing was slow, but {what}")
        elif isinstance(error, Overloaded):
            entry.never = True
        elif isinstance(error, RRefExpired | RRefReleased):
            if not self.harm.lossy:
                self.violated("I5", f"no worker was lost, but {what}")
        elif isinstance(error, BackwardFailed | UnknownContext):
            if not self.harm.lossy and not (self.harm.any and isinstance(error, TimeoutError)):
                self.violated("I3", f"no worker was lost, but {what}")
            # Cuts and pauses make workers lose others that live; only where nothing but processes
            # ended it is certain which worker an error has to name.
            elif isinstance(error, BackwardFailed) and self.harm.kinds <= DEATHS:
                self._check_blamed(error, what)
        elif isinstance(error, RRefError):
            # The creation of a reference may have been late or refused, like other calls; its uses
            # then fail for that reason, without any fault.
            late = {"DeadlineExceeded", "Overloaded"} & self.outcomes.keys()
            if not self.harm.any and not late:
                self.violated("I2", f"nothing happened, but {what}")
        else:
            self.violated("I2", f"unexpected error from {what}")

    def _check_blamed(self, error: BackwardFailed, what: str) -> None:
        if not self.harm.may_lose(error.worker):
            self.violated("I3", f"nothing happened to {error.worker}, but {what}")

    def finish(self) -> None:
        """Judge again when all programs have ended: what can be known only then."""
        for id, count in self.ran.items():
            if count > 1:
                self.violated("I4", f"call {id} ran {count} times")
        for entry in self.entries.values():
            if entry.never and self.ran.get(entry.id):
                self.violated("I4", f"{entry.what} ran, but its error said that it did not")
            if not entry.outcome and entry.caller.alive:
                self.violated("I1", f"{entry.what} to {entry.to} never ended")
            if entry.outcome == "cancelled" and not self.harm.any:
                self._check_stopped(entry)
            # Other faults delay the news of a death, by as much as they last.
            if self.harm.kinds <= DEATHS:
                self._check_noticed(entry)
                if entry.what == "backward":
                    self._check_pass(entry)

    def _check_stopped(self, entry: Entry) -> None:
        """Check that a cancelled coroutine ended soon after it was cancelled, or had begun."""
        # The call may have waited for a connection; its cancellation then waits behind it.
        since = max(entry.end, self.began.get(entry.id, entry.end))
        late = self.stopped.get(entry.id, since) - since
        if late > CANCELLED + 2 * self._journey:
            self.violated("I1", f"{entry.what} went on for {late:.3f} s after it was cancelled")

    def _check_noticed(self, entry: Entry) -> None:
        """Check that a call to a worker that crashed failed soon after."""
        for node in self.world.dead:
            if node.name == entry.to and entry.begin <= node.died < entry.end < math.inf:
                late = entry.end - node.died
                if late > NOTICED + 2 * self._journey and entry.caller.alive:
                    self.violated(
                        "I1", f"{entry.what}: the death of {entry.to} was noticed {late:.3f} s late"
                    )

    def _check_pass(self, entry: Entry) -> None:
        """Check that a pass that failed because of a death failed soon after it."""
        if entry.outcome in ("", "ok", "cancelled") or not entry.caller.alive:
            return
        # A worker learns of a pass, and so can fail it, only when others have computed their part.
        # `crashpoints.trial` knows how long that takes, and is stricter.
        died = [n.died for n in self.world.dead if entry.begin <= n.died <= entry.end]
        late = entry.end - max(died, default=entry.end)
        if late > COMPUTING or entry.outcome == "PassTimedOut":
            self.violated("I1", f"{entry.what} failed {late:.3f} s after the last death")

    @property
    def _journey(self) -> float:
        settings = self.world.wire.settings
        return settings.latency + settings.jitter


def current_ledger() -> Ledger:
    """Return the ledger of the simulation that runs this function."""
    found: Ledger = here().world.parts[Ledger]
    return found


def enter(id: CallId) -> None:
    """Note that the function of a call begins to run; every function of a workload does so."""
    ledger = current_ledger()
    ledger.ran[id] = ledger.ran.get(id, 0) + 1
    ledger.began[id] = ledger.world.loop.time()
    ledger.world.trace("run", id)


def leave(id: CallId) -> None:
    """Note that the function of a call has ended, by whatever means."""
    ledger = current_ledger()
    ledger.stopped[id] = ledger.world.loop.time()


class Anything:
    """Stands for a result that is not known beforehand."""


ANY: Final = Anything()


def equal(value: Any, expected: Any) -> bool:
    """Compare exactly: programs compute with integers in floats, in any order."""
    if expected is ANY:
        return True
    if isinstance(expected, np.ndarray) or isinstance(value, np.ndarray):
        same = isinstance(expected, type(value))
        return same and bool(np.array_equal(value, expected))
    return bool(value == expected)
