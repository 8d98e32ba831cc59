"""How recordings look: a table for the terminal, and Chrome's trace format.

Plain functions of spans. Pictures are `aiograd.viz.timeline`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiograd.rpc.spans import Span

_MICRO = 1e6  # Chrome counts microseconds


def table(spans: Sequence[Span]) -> str:
    """One line per key and worker, the longest in total first."""
    groups: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        groups.setdefault((span.key, span.worker), []).append(span.seconds)
    rows: list[tuple[str, ...]] = [("key", "worker", "count", "total ms", "mean ms", "max ms")]
    for (key, worker), times in sorted(groups.items(), key=lambda item: -sum(item[1])):
        figures = (sum(times), sum(times) / len(times), max(times))
        rows.append((key, worker, str(len(times)), *(f"{1e3 * each:.3f}" for each in figures)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """One process per worker; what overlaps without nesting stands in different threads."""
    pids = {name: pid for pid, name in enumerate(sorted({span.worker for span in spans}))}
    begin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for name, pid in pids.items()
    ]
    for span, lane in lanes(spans):
        args = {**(span.detail or {}), **({"error": span.error} if span.error else {})}
        events.append(
            {
                "ph": "X",
                "name": span.key,
                "cat": span.kind,
                "pid": pids[span.worker],
                "tid": lane,
                "ts": (span.start - begin) * _MICRO,
                "dur": span.seconds * _MICRO,
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Spans in order of their start, each with the first lane of its worker that has room.

    In a lane, of two spans one ends before the other begins, or lies inside it.
    """
    open_ends: dict[str, list[list[float]]] = {}  # per worker and lane, ends of spans still open
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        rows = open_ends.setdefault(span.worker, [])
        for ends in rows:
            while ends and ends[-1] <= span.start:
                ends.pop()
        free = (n for n, ends in enumerate(rows) if not ends or span.end <= ends[-1])
        lane = next(free, len(rows))
        if lane == len(rows):
            rows.append([])
        rows[lane].append(span.end)
        placed.append((span, lane))
    return placed
