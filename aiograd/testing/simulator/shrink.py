"""Make a failing run smaller: leave out faults, as long as it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from aiograd.testing.simulator.plan import Plan
from aiograd.testing.simulator.run import Report, run
from aiograd.testing.simulator.schedule import Fault

T = TypeVar("T")


def minimize(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Delta debugging: a part of `items` that fails, and of which no single one can be left out."""
    current, pieces = list(items), 2
    while len(current) > 1:
        size = max(1, len(current) // pieces)
        for start in range(0, len(current), size):
            rest = current[:start] + current[start + size :]
            if rest and fails(rest):
                current, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(len(current), pieces * 2)
    return [] if current and fails([]) else current


def shrink(plan: Plan) -> Report:
    """The smallest run that violates one of the invariants that `plan` violates."""
    broken = _broken(run(plan))

    def fails(faults: list[Fault]) -> bool:
        return bool(broken & _broken(run(plan.with_faults(faults))))

    return run(plan.with_faults(minimize(plan.faults, fails)))


def _broken(report: Report) -> set[str]:
    return {text.partition(":")[0] for text in report.violations}
