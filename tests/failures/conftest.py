"""The failure table on real processes: every row a test, every test a figure.

    make failures           # medians of 3 runs, with the times that users have by default

In an ordinary run everything that only waits (heartbeats, silence, leases, grace) is ten times as
fast as by default, and so are the promises that depend on it. A test fails at four times a promise.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiograd.cluster.local import LocalCluster
from aiograd.rpc.options import Options

RUNS = int(os.environ.get("AIOGRAD_FIGURES", "0"))
PACE = 1.0 if RUNS else 10.0  # how much faster than by default time passes for those who wait
MARGIN = 4.0  # a busy machine is no broken promise


@dataclass
class Table:
    """What was measured: row and what → promise, unit, figures by loop."""

    rows: dict[tuple[str, str], tuple[float, str, dict[str, list[float]]]] = field(
        default_factory=dict
    )

    def add(self, row: str, what: str, promise: float, figure: float, unit: str, loop: str) -> None:
        _, _, figures = self.rows.setdefault((row, what), (promise, unit, {}))
        figures.setdefault(loop, []).append(figure)

    def __str__(self) -> str:
        lines = ["| row | what happens | promised | asyncio | uvloop |", "|---|---|---|---|---|"]
        for (row, what), (promise, unit, figures) in sorted(self.rows.items(), key=_order):
            found = [_show(figures.get(loop), unit) for loop in ("asyncio", "uvloop")]
            lines.append(f"| {row} | {what} | ≤ {promise:g} {unit} | {found[0]} | {found[1]} |")
        return "\n".join(lines)


def _order(item: tuple[tuple[str, str], Any]) -> tuple[int, str]:
    row, what = item[0]
    return int(row.removeprefix("F").split()[0]), what


def _show(figures: list[float] | None, unit: str) -> str:
    if not figures:
        return "–"
    middle = statistics.median(figures)
    return f"{middle:.2g} {unit}" if middle < 10 else f"{middle:.1f} {unit}"


TABLE = Table()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if RUNS > 1 and "repetition" in metafunc.fixturenames:
        metafunc.parametrize("repetition", range(RUNS))


@pytest.fixture
def repetition() -> int:
    return 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if RUNS:
        terminalreporter.write_line(f"\nThe failure table, medians of {RUNS}:\n\n{TABLE}")


def loop_kind() -> str:
    module = type(asyncio.get_running_loop()).__module__
    return "uvloop" if module.startswith("uvloop") else "asyncio"


@pytest.fixture
def figure(repetition: int) -> Callable[..., None]:
    """`figure("F1", "a worker is killed", 0.5, seconds)`: note it, and hold it to the promise."""

    def note(
        row: str, what: str, promise: float, found: float, unit: str = "s", loop: str = ""
    ) -> None:
        TABLE.add(row, what, promise, found, unit, loop or loop_kind())
        limit = MARGIN * promise
        assert found <= limit, f"{row}, {what}: {found:.3g} {unit}, promised {promise:g} {unit}"

    return note


@pytest.fixture
def cluster() -> Callable[..., LocalCluster]:
    """Make a cluster of processes, all on the loop of the test, in which waiting is quick."""

    def make(n_workers: int, **settings: Any) -> LocalCluster:
        return LocalCluster(n_workers, options=options(**settings))

    return make


def options(**settings: Any) -> Options:
    quick = {
        "heartbeat": 1.0 / PACE,
        "silence": 5.0 / PACE,
        "lease": 10.0 / PACE,
        "grace": 5.0 / PACE,
        "timeout": 60.0,
    }
    return Options(loop=loop_kind(), **{**quick, **settings})
