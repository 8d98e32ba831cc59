"""Run crash points: `python -m aiograd.testing.simulator.crashpoints`; `--help` lists its options.

Prints each violation with the command that replays it, and at the end how many cases there are, how
many were run and what their calls ended with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter

from aiograd._progress import Progress
from aiograd.testing.simulator.crashpoints.cases import (
    LARGE,
    Case,
    Portion,
    Tally,
    describe,
    hunt,
    run_case,
    run_portion,
    sample,
)
from aiograd.testing.simulator.crashpoints.programs import PROGRAMS
from aiograd.testing.simulator.planted_bugs import BUGS
from aiograd.testing.simulator.run import isolated


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Parse the arguments, and run what they ask for."""
    parser = argparse.ArgumentParser(prog="python -m aiograd.testing.simulator.crashpoints")
    parser.add_argument("--sample", type=int, default=0, help="about so many cases; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the order of events and the sample")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--all", action="store_true", help="also the largest shapes, not sampled")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", help="replay one case: PROGRAM:POINT:WORKER:FAULT")
    parser.add_argument("--bug", choices=[*BUGS, "all"], help="plant a bug and look for it")
    parser.add_argument("--trace", action="store_true", help="with --case: print every event")
    args = parser.parse_args()
    if args.case is not None:
        return _replay(Case.parse(args.case, args.seed), trace=args.trace)
    if args.bug is not None:
        return _hunt(list(BUGS) if args.bug == "all" else [args.bug], args.sample, args.seed)
    programs = [name for name in PROGRAMS if args.only in name]
    if not (args.only or args.sample or args.all):
        programs = [name for name in programs if name.partition("/")[0] not in LARGE]
    return _run_all(sample(args.sample, args.seed, programs), args.processes)


def _run_all(portions: list[Portion], processes: int) -> int:
    tally, begin = Tally(), time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.imap_unordered(run_portion, portions)
        for part in (bar := Progress(found, "programs", total=len(portions))):
            tally.add(part)
            for result in part.failed[:3]:
                bar.say(describe(result))
    seconds = time.perf_counter() - begin
    kinds = Counter(text.split(":")[0] for result in tally.failed for text in result.violations)
    _say(
        f"{tally.programs} programs, {tally.points} points, {tally.cases} cases, "
        f"{tally.runs} runs, {len(tally.failed)} violations {dict(sorted(kinds.items())) or ''}"
    )
    _say(f"outcomes {dict(sorted(tally.outcomes.items()))}")
    _say(f"{seconds:.1f} s, {tally.runs / seconds:.0f} runs/s in {processes} processes")
    return bool(tally.failed)


def _hunt(names: list[str], limit: int, seed: int) -> int:
    missed = 0
    for name in names:
        found = hunt(name, limit or 2000, seed)
        missed += found is None
        tries, text = (found[0], describe(found[1])) if found is not None else (0, "NOT FOUND")
        _say(f"{name}: {tries} {text}")
    return bool(missed)


def _replay(case: Case, *, trace: bool) -> int:
    with isolated() as errors:
        result = run_case(case, errors, trace=trace)
    if trace or not result.ok:
        _say("\n".join(result.trace))
    at = result.points[case.at] if 0 <= case.at < len(result.points) else None
    _say(f"{case}: {'ok' if result.ok else 'FAILED'}  at {at}, {len(result.points)} points")
    _say("\n".join(f"  {text}" for text in result.violations))
    _say(f"  trace {result.digest}  outcomes {result.outcomes}")
    return not result.ok


if __name__ == "__main__":
    sys.exit(main())
