"""Simulate successions: `python -m aiograd.testing.simulator.succession SEED [--count N]`.

Prints each violation, with what happened in its rounds and the last events before it. `--points`
runs a fault at every boundary of one election instead, `--bug NAME` (or `all`) plants a bug and
names the first seed that finds it.
"""

from __future__ import annotations

import argparse
import sys
import time

from aiograd._progress import Progress
from aiograd.testing.simulator.planted_bugs import planted
from aiograd.testing.simulator.succession.bugs import BUGS
from aiograd.testing.simulator.succession.plan import make_plan
from aiograd.testing.simulator.succession.points import points, run_point
from aiograd.testing.simulator.succession.run import run


def main() -> int:
    """Parse the arguments and run seeds; 1 if one failed, or a planted bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m aiograd.testing.simulator.succession")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="number of seeds, from SEED on")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--points", action="store_true", help="a fault at every boundary")
    parser.add_argument("--bug", choices=[*BUGS, "all"], help="plant a bug and look for it")
    given = parser.parse_args()
    if given.bug is not None:
        names = list(BUGS) if given.bug == "all" else [given.bug]
        return max(_hunt(name, given.seed, given.count) for name in names)
    return _run_points(given.seed) if given.points else _run_seeds(given)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _run_seeds(given: argparse.Namespace) -> int:
    failed = successors = 0
    began = time.perf_counter()
    for seed in (bar := Progress(range(given.seed, given.seed + given.count), "seeds")):
        report = run(make_plan(seed), trace=given.trace)
        successors += report.terms
        failed += not report.ok
        if not report.ok or given.count == 1:
            bar.say(str(report))
        if not report.ok or given.trace:
            bar.say("\n".join(report.trace))
    seconds = time.perf_counter() - began
    _say(f"{given.count} seeds, {successors} successors, {failed} failed, {seconds:.1f} s")
    return bool(failed)


def _run_points(seed: int) -> int:
    failed = 0
    cases = list(points(seed))
    for point in (bar := Progress(cases, "points")):
        result = run_point(point)
        if not result.ok:
            failed += 1
            bar.say(f"{point}: {result.violations[0]}")
    _say(f"{len(cases)} crash points, {failed} failed")
    return bool(failed)


def _hunt(name: str, seed: int, count: int) -> int:
    with planted(name, BUGS) as bug:
        for tried in range(seed, seed + count):
            report = run(make_plan(tried))
            if not report.ok:
                _say(f"{name}: {bug.text}: seed {tried}: {report.violations[0][:120]}")
                return 0
    _say(f"{name}: NOT FOUND in {count} seeds")
    return 1


if __name__ == "__main__":
    sys.exit(main())
