"""`python -m aiograd.testing.simulator SEED [--count N] [--trace] [--shrink]`: replay seeds."""

from __future__ import annotations

import argparse
import sys
import time

from aiograd.testing.simulator.plan import make_plan
from aiograd.testing.simulator.run import run


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m aiograd.testing.simulator")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    failed = 0
    begin = time.perf_counter()
    for seed in range(args.seed, args.seed + args.count):
        report = run(make_plan(seed), trace=args.trace)
        if not report.ok or args.count == 1:
            _say(report)
        if not report.ok:
            failed += 1
        if args.trace or (not report.ok and args.count == 1):
            _say("\n".join(report.trace))
        if args.count == 1:
            _say(report.digest, report.outcomes)
    _say(f"{args.count} seeds, {failed} failed, {time.perf_counter() - begin:.1f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
