"""How cost grows with size, as curves; beside another tree, before and after.

    python benchmarks/scaling/run.py                     # this tree
    python benchmarks/scaling/run.py --against ../old    # this tree beside another one
    python benchmarks/scaling/run.py --only contexts --sizes 1000,10000

Each point runs in a process of its own (`curves.py`). A figure is a cost per unit of work, so a
cost that grows as the work does is a flat row. The last column is the largest figure as a multiple
of the smallest, beside the goal where there is one. The exit code says whether all goals are met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from curves import CURVES, Curve, Figures

HERE = Path(__file__).resolve()
TREE = HERE.parents[2]


def measure(tree: Path, name: str, size: int, patience: float) -> Figures | None:
    """Measure one point on the library in `tree`; None if it fails or takes too long."""
    command = [sys.executable, str(HERE.parent / "curves.py"), name, str(size)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=patience
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(*done.stderr.splitlines()[-1:], file=sys.stderr)
        return None
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def show(curve: Curve, sizes: tuple[int, ...], points: list[Figures | None], label: str) -> bool:
    """Print the rows of one curve; return whether its goals are met."""
    good = True
    figures = list(dict.fromkeys(key for point in points if point for key in point))
    for figure in figures or list(curve.goals):
        values = [point.get(figure) if point else None for point in points]
        known = [value for value in values if value is not None]
        cells = "".join(f"{'—' if value is None else f'{value:.4g}':>11}" for value in values)
        growth = max(known) / min(known) if known and min(known) else 0.0
        goal = curve.goals.get(figure)
        said = f"{growth:8.2f}x"
        if goal is not None:
            met = len(known) == len(sizes) and growth <= goal
            good, said = good and met, f"{said}  {'≤' if met else 'MISSED:'} {goal:g}x"
        most = curve.most.get(figure)
        if most is not None:
            met = values[-1] is not None and values[-1] <= most
            good, said = good and met, f"{said}  {'≤' if met else 'MISSED:'} {most:g}"
        print(f"  {label:7} {figure:14}{cells}{said}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another tree: its figures come first")
    parser.add_argument("--only", default="", help="curves whose name contains this")
    parser.add_argument("--sizes", help="other sizes, separated by commas")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one point")
    given = parser.parse_args()
    good = True
    for name, curve in CURVES.items():
        if given.only not in name:
            continue
        sizes = tuple(map(int, given.sizes.split(","))) if given.sizes else curve.sizes
        print(f"{name}: {curve.title}")
        print(" " * 24 + "".join(f"{size:>11}" for size in sizes) + "   growth")
        trees = [(TREE, "now")]
        if given.against is not None:
            trees.insert(0, (given.against.resolve(), "before"))
        for tree, label in trees:
            points = [measure(tree, name, size, given.patience) for size in sizes]
            met = show(curve, sizes, points, label)
            good = good and (met or label == "before")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
