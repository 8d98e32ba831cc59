"""Tables and lines for a terminal: what `aiograd status`, `top`, `stuck` and `stacks` print. Pure.

Names and texts of other workers are printed without control characters: they must not move the
cursor or change colours. Colour is a matter of the caller (`paint`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from aiograd.observe.snapshot import (
    BLOCKED,
    HIDDEN,
    LOST,
    RUNNING,
    SILENT,
    STOPPED,
    CallRow,
    Data,
    WorkerRow,
)
from aiograd.observe.waits import Finding, describe, seconds

Paint = Callable[[str, str], str]  # colour and text

COLOURS: Final = {
    RUNNING: "32",
    HIDDEN: "36",
    BLOCKED: "33",
    STOPPED: "33",
    SILENT: "33",
    LOST: "31",
}
SORTS: Final = ("rank", "calls", "cpu", "memory", "lag", "bytes")


def plain(_: str, text: str) -> str:
    """Paint nothing: for pipes and files."""
    return text


def ansi(colour: str, text: str) -> str:
    """Paint for a terminal."""
    return f"\x1b[{colour}m{text}\x1b[0m"


def clean(text: str) -> str:
    """Return a text that cannot move the cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def short_path(line: str, folder: str | None = None) -> str:
    """Return "file:line" relative to the working directory, or its last two parts."""
    if not line:
        return ""
    folder = os.getcwd() if folder is None else folder
    if line.startswith(folder + os.sep):
        return clean(line[len(folder) + 1 :])
    parts = line.split(os.sep)
    return clean(os.sep.join(parts[-2:]) if len(parts) > 3 else line)


def size(count: float | None) -> str:
    """Return a number of bytes for people."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def milliseconds(value: float | None) -> str:
    """Return a short duration for people."""
    return "–" if value is None else f"{value * 1e3:.1f} ms"


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows in columns, two spaces apart; those in `right` end together."""
    right = set(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# ── status and top ──────────────────────────────────────────────────────────────────────────────


def status(data: Data, paint: Paint = plain) -> list[str]:
    """Return a table of the workers, and a line for each that is not well."""
    rows = [("worker", "rank", "state", "process", "memory", "lag", "calling", "called", "values")]
    rows += [
        (
            clean(row.name) + (" *" if row.coordinator else ""),
            str(row.rank),
            row.state,
            f"{clean(row.host)}:{row.pid}" if row.pid is not None else "–",
            size(row.memory),
            milliseconds(row.lag),
            _count(row, "pending_calls"),
            _count(row, "running_calls"),
            _count(row, "owner_rrefs"),
        )
        for row in data.workers
    ]
    lines = columns(rows, right=(1, 4, 5, 6, 7, 8))
    for i, row in enumerate(data.workers, 1):
        lines[i] = _paint_word(lines[i], row.state, paint)
    lines += [
        paint(COLOURS.get(row.state, "0"), f"{clean(row.name)} is {row.state}: {clean(row.why)}")
        for row in data.troubled
    ]
    if differing := differing_versions(data.workers):
        lines.append(f"versions differ: {differing}")
    reached = [
        f"{row.name} {name} ×{n}" for row in data.workers for name, n in row.limits.items() if n
    ]
    if reached:
        lines.append(f"limits reached: {', '.join(map(clean, reached))}")
    return lines


def _count(row: WorkerRow, name: str) -> str:
    return str(row.counters[name]) if name in row.counters else "–"


def _paint_word(line: str, word: str, paint: Paint) -> str:
    before, found, after = line.partition(f" {word} ")
    return before + " " + paint(COLOURS.get(word, "0"), word) + " " + after if found else line


def differing_versions(workers: Iterable[WorkerRow]) -> str:
    """Return which versions of what the workers have, where they differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in workers:
        for name, version in row.versions.items():
            if name == "loop":  # workers may have any
                continue
            found.setdefault(name, {}).setdefault(version, []).append(clean(row.name))
    return "; ".join(
        f"{name} {', '.join(f'{version} ({len(names)})' for version, names in versions.items())}"
        for name, versions in found.items()
        if len(versions) > 1
    )


class Rates:
    """What has changed between two snapshots, per second."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, float]] = {}
        self._taken = 0.0

    def update(self, data: Data) -> dict[str, dict[str, float]]:
        """Take in a snapshot; the rates by worker, empty for those that were not there before."""
        now = _totals(data)
        passed = data.taken - self._taken
        rates = {
            name: {key: max(0.0, (value - before[key]) / passed) for key, value in totals.items()}
            for name, totals in now.items()
            if (before := self._before.get(name)) is not None and passed > 0
        }
        self._before, self._taken = now, data.taken
        return rates


def _totals(data: Data) -> dict[str, dict[str, float]]:
    found = {
        row.name: {"cpu": row.cpu, "calls": float(row.started), "sent": 0.0, "received": 0.0}
        for row in data.workers
        if row.cpu is not None
    }
    for link in data.links:
        if link.peer != link.worker and link.worker in found:
            found[link.worker]["sent"] += link.sent
            found[link.worker]["received"] += link.received
    return found


def top(
    data: Data,
    rates: Mapping[str, Mapping[str, float]],
    sort: str = "rank",
    height: int = 40,
    paint: Paint = plain,
) -> list[str]:
    """Return the screen of `aiograd top`: workers, then what runs there, the oldest first."""
    workers = sorted(
        data.workers, key=lambda row: (-_sort_key(row, rates.get(row.name, {}), sort), row.rank)
    )
    lines = _live_workers(workers, rates)
    for i, row in enumerate(workers, 1):
        lines[i] = _paint_word(lines[i], row.state, paint)
    room = max(3, height - 4)
    if len(lines) > room:
        lines = [*lines[:room], f"… and {len(lines) - room} more"]
    room = height - len(lines) - 2
    calls = [row for row in data.running if row.kind != "service"]
    if calls and room > 1:
        calls.sort(key=lambda row: -(row.age or 0.0))
        lines += ["", *_live_calls(calls[: room - 1])]
    return lines


def _sort_key(row: WorkerRow, rate: Mapping[str, float], sort: str) -> float:
    by = {
        "calls": rate.get("calls", 0.0),
        "cpu": rate.get("cpu", 0.0),
        "memory": float(row.memory or 0),
        "lag": row.lag or 0.0,
        "bytes": rate.get("sent", 0.0) + rate.get("received", 0.0),
    }
    return by.get(sort, 0.0)


def _live_workers(
    workers: Sequence[WorkerRow], rates: Mapping[str, Mapping[str, float]]
) -> list[str]:
    rows = [
        ("worker", "state", "cpu", "memory", "lag", "calls/s", "out/s", "in/s", "called", "values")
    ]
    for row in workers:
        rate = rates.get(row.name, {})
        rows.append(
            (
                clean(row.name),
                row.state,
                f"{100 * rate['cpu']:.0f} %" if rate else "–",
                size(row.memory),
                milliseconds(row.lag),
                f"{rate['calls']:.0f}" if rate else "–",
                size(rate.get("sent")),
                size(rate.get("received")),
                _count(row, "running_calls"),
                _count(row, "owner_rrefs"),
            )
        )
    return columns(rows, right=range(2, 10))


def _live_calls(calls: Iterable[CallRow]) -> list[str]:
    rows = [("running", "on", "at", "since", "for")]
    rows += [
        (
            clean(row.function),
            clean(row.callee),
            short_path(row.at),
            seconds(row.age),
            clean(row.caller),
        )
        for row in calls
    ]
    return columns(rows, right=(3,))


# ── stuck and stacks ────────────────────────────────────────────────────────────────────────────


def stuck(findings: Sequence[Finding], older: float, paint: Paint = plain) -> list[str]:
    """Return why a cluster does not go on."""
    if not findings:
        return [f"nothing waits for longer than {older:g} s"]
    lines = []
    for finding in findings:
        title, *hops = describe([finding], short_path)
        lines += [paint("1", clean(title)), *map(clean, hops)]
    return lines


def stacks(found: Mapping[str, Any]) -> list[str]:
    """Return the stacks of workers; equal ones are shown once, with how many there are."""
    lines = []
    for name, entries in found.items():
        lines.append(f"── {clean(name)}")
        if isinstance(entries, str):
            lines.append(f"   {clean(entries)}")
            continue
        groups: dict[tuple[str, ...], list[str]] = {}
        for entry in entries:
            groups.setdefault(tuple(entry["stack"]), []).append(f"{entry['kind']} {entry['name']}")
        for stack, names in groups.items():
            more = f" (and {len(names) - 1} like it)" if len(names) > 1 else ""
            lines.append(f"   {clean(names[0])}{more}")
            lines += [f"     {clean(each)}" for each in stack]
    return lines
