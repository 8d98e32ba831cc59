"""Run the peers in turn, each in its own environment, and print the best of each.

    python benchmarks/local/run.py [--reps 3] [--only local.mlp] [peer ...]

The interpreter of a peer is $BENCH_PYTHON_<NAME>, else .venv-bench/<name>/bin/python; aiograd and
numpy run in this one. A peer without an interpreter is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = {"aiograd": None, "numpy": None, "torch": "torch", "hips": "light"}


def interpreter(environment: str | None) -> str | None:
    if environment is None:
        return sys.executable
    given = os.environ.get(f"BENCH_PYTHON_{environment.upper()}")
    found = given or str(ROOT / ".venv-bench" / environment / "bin" / "python")
    return found if os.access(found, os.X_OK) else None


def run(peer: str, only: str) -> list[dict[str, object]]:
    """Times and memory of a peer, in two processes: measuring memory slows the timings down."""
    times = _run(peer, only, {"BENCH_MEMORY": "0"})
    return times + _run(peer, only, {"BENCH_MEMORY": "1", "MALLOC_MMAP_THRESHOLD_": "65536"})


def _run(peer: str, only: str, settings: dict[str, str]) -> list[dict[str, object]]:
    python = interpreter(ENVIRONMENTS[peer])
    if python is None:
        print(f"# {peer}: no interpreter", file=sys.stderr)
        return []
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}",
        "BENCH_METRICS": only,
        **settings,
    }
    done = subprocess.run(
        [python, str(HERE / f"{peer}_local.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        print(f"# {peer}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description="local autograd against its peers")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only", default="", help="comma-separated prefixes of metrics")
    parser.add_argument("peers", nargs="*", default=list(ENVIRONMENTS))
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    units: dict[str, object] = {}
    for repetition in range(options.reps):  # in both directions, so that no peer is always first
        for peer in options.peers if repetition % 2 == 0 else options.peers[::-1]:
            for record in run(peer, options.only):
                metric, value = str(record["metric"]), float(str(record["value"]))
                units[metric] = record["unit"]
                row = found.setdefault(metric, {})
                row[peer] = min(value, row.get(peer, value))
    print("metric", "unit", *options.peers, sep="\t")
    for metric, row in sorted(found.items()):
        mine = row.get("aiograd")
        cells = []
        for peer in options.peers:
            value = row.get(peer)
            ratio = f" (x{value / mine:.2f})" if value and mine and peer != "aiograd" else ""
            cells.append("-" if value is None else f"{value:.4g}{ratio}")
        print(metric, units[metric], *cells, sep="\t")


if __name__ == "__main__":
    main()
