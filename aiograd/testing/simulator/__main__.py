"""Replay seeds: `python -m aiograd.testing.simulator SEED [--count N] [--trace] [--shrink]`.

Prints each violation, with the faults of its plan and the last events before it; `--bug NAME` (or
`all`) plants a bug and names the first seed that finds it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

from aiograd._progress import Progress
from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.planted_bugs import BUGS, planted
from aiograd.testing.simulator.run import Report, run, shrink


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Parse the arguments and run seeds; 1 if one failed, or a planted bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m aiograd.testing.simulator")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="number of seeds, from SEED on")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--shrink", action="store_true", help="leave out faults while it fails")
    parser.add_argument("--bug", choices=[*BUGS, "all"], help="plant a bug and look for it")
    args = parser.parse_args()
    if args.bug is not None:
        return _hunt(list(BUGS) if args.bug == "all" else [args.bug], args.seed, args.count)
    failed, begin = 0, time.perf_counter()
    for seed in (bar := Progress(range(args.seed, args.seed + args.count), "seeds")):
        report = run(make_plan(seed), trace=args.trace)
        if not report.ok:
            failed += 1
            _tell(shrink(report.plan) if args.shrink else report, bar.say)
        elif args.count == 1:
            bar.say(str(report))
            bar.say(f"  trace {report.digest}  outcomes {report.outcomes}")
            if args.trace:
                bar.say("\n".join(report.trace))
    _say(f"{args.count} seeds, {failed} failed, {time.perf_counter() - begin:.1f} s")
    return bool(failed)


def _tell(report: Report, say: Callable[[str], None]) -> None:
    say(str(report))
    say("\n".join(report.trace))
    say(f"commit {_commit()}, trace {report.digest}")


def _hunt(names: list[str], seed: int, count: int) -> int:
    missed = 0
    for name in names:
        with planted(name) as bug:
            for tried in (bar := Progress(range(count), name)):
                report = run(make_plan(seed + tried))
                if not report.ok:
                    bar.say(
                        f"{name}: {bug.text}: seed {seed + tried}: {report.violations[0][:120]}"
                    )
                    break
            else:
                missed += 1
                _say(f"{name}: NOT FOUND in {count} seeds")
    return bool(missed)


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
