"""A snapshot made small enough to be sent to a page every second. Pure.

Links are added up per worker (64 workers have 4032 of them), calls and references are cut to the
oldest and largest, with how many there are. What the page shows of waits is found here, by the code
that `aiograd stuck` uses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any, Final

from aiograd.observe.snapshot import CallRow, Data, LinkRow
from aiograd.observe.waits import Finding, find

CALLS: Final = 300
REFERENCES: Final = 300
CONTEXTS: Final = 100
FINDINGS: Final = 20
_NUMBERS: Final = ("name", "incarnation", "cpu", "started", "sent", "received", "lag", "memory")
OLDER: Final = 5.0  # seconds after which a wait is shown: most calls of most programs are shorter
HOPS: Final = 30


def digest(data: Data) -> dict[str, Any]:
    """Return what a page needs, as plain data."""
    calls = _calls(data)
    contexts = _contexts(data)
    return {
        "version": data.version,
        "taken": data.taken,
        "by": data.by,
        "workers": _workers(data),
        "calls": [asdict(row) for row in calls[:CALLS]],
        "call_count": len(calls),
        "edges": _edges(data),
        "findings": [_finding(each) for each in find(data, OLDER)[:FINDINGS]],
        "references": [asdict(row) for row in data.references[:REFERENCES]],
        "reference_count": sum(row.count for row in data.references),
        "reference_bytes": sum(row.size for row in data.references),
        "contexts": contexts[:CONTEXTS],
        "context_count": len(contexts),
        "collectives": [asdict(row) for row in data.collectives],
    }


def slim(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a digest when there is a newer one: what lines of numbers need."""
    return {
        "taken": found["taken"],
        "workers": [{key: row[key] for key in _NUMBERS} for row in found["workers"]],
        "calls": [],
    }


def _finding(found: Finding) -> dict[str, Any]:
    # Cut first: a thousand calls may wait for one worker.
    count, found.hops = len(found.hops), found.hops[:HOPS]
    return {**asdict(found), "hop_count": count}


def _workers(data: Data) -> list[dict[str, Any]]:
    """Return the rows of workers, with what belongs to each of them added up."""
    links: dict[str, list[LinkRow]] = {row.name: [] for row in data.workers}
    for each in data.links:
        if each.peer != each.worker and each.worker in links:
            links[each.worker].append(each)
    # Not the counters of workers, which count requests of the library as well.
    calling = Counter(row.caller for row in data.pending if row.kind != "service")
    called = Counter(row.callee for row in data.running if row.kind != "service")
    found = []
    for row in data.workers:
        answered = row.cpu is not None
        sums: dict[str, Any] = {
            "calling": calling[row.name] if answered else None,
            "called": called[row.name] if answered else None,
        }
        found.append({**asdict(row), **sums, **_added_up(links[row.name])})
        found[-1]["limits"] = {name: count for name, count in row.limits.items() if count}
    return found


def _added_up(links: list[LinkRow]) -> dict[str, Any]:
    return {
        "sent": sum(each.sent for each in links),
        "received": sum(each.received for each in links),
        "links": sum(each.state == "open" for each in links),
        "suspects": sorted(each.peer for each in links if each.suspect)[:8],
    }


def _calls(data: Data) -> list[CallRow]:
    """Return each call once, with what both of its ends know; the oldest first."""
    found: dict[str, CallRow] = {}
    for row in data.pending:
        if row.kind != "service":
            found[row.key] = row
    for row in data.running:
        if row.kind == "service":
            continue
        pending = found.get(row.key)
        if pending is not None:
            row.line, row.parent = pending.line, pending.parent
            row.age = pending.age if row.age is None else row.age
            row.kind = pending.kind
        found[row.key] = row
    return sorted(found.values(), key=lambda row: -(row.age or 0.0))


def _edges(data: Data) -> list[dict[str, Any]]:
    """Return who waits for whom, added up per pair of workers."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in data.pending:
        edge = found.setdefault(
            (row.caller, row.callee),
            {"from": row.caller, "to": row.callee, "count": 0, "oldest": 0.0},
        )
        edge["count"] += 1
        edge["oldest"] = max(edge["oldest"], row.age or 0.0)
    return sorted(found.values(), key=lambda edge: -edge["oldest"])[:CALLS]


def _contexts(data: Data) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in data.contexts:
        context = found.setdefault(
            row.id, {"id": row.id, "opened_by": row.opened_by, "parts": [], "passes": []}
        )
        context["parts"].append(asdict(row))
    for each in data.passes:
        if each.context in found:
            found[each.context]["passes"].append(asdict(each))
    return list(found.values())
