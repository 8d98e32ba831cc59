"""The numbers of a snapshot as metrics with stable names, for Prometheus and OpenTelemetry. Pure.

    name                         kind       labels                     what
    aiograd_workers              gauge      state                      workers
    aiograd_calls_started_total  counter    worker                     calls made
    aiograd_pending_calls        gauge      worker                     calls that have not ended
    aiograd_running_calls        gauge      worker                     calls of others that run
    aiograd_abandoned_calls      gauge      worker                     threads that work for nobody
    aiograd_oldest_call_seconds  gauge      worker                     age of the oldest of them
    aiograd_owner_rrefs          gauge      worker                     shared values
    aiograd_owned_bytes          gauge      worker                     bytes of shared values
    aiograd_user_rrefs           gauge      worker                     references to others' values
    aiograd_contexts             gauge      worker                     open contexts
    aiograd_backward_passes      gauge      worker                     backward passes under way
    aiograd_optimizer_steps_total counter    worker                     steps of optimisers
    aiograd_bytes_total          counter    worker, peer, direction    bytes of open links
    aiograd_link_up              gauge      worker, peer               1: connected
    aiograd_buffered_bytes       gauge      worker                     bytes that wait to be sent
    aiograd_loop_lag_seconds     gauge      worker                     how long a message waits
    aiograd_memory_bytes         gauge      worker                     resident memory
    aiograd_cpu_seconds_total    counter    worker                     processor time
    aiograd_threads              gauge      worker                     threads
    aiograd_limit_reached_total  counter    worker, limit              limits that were reached
    aiograd_info                 gauge      worker, version, python    1
    aiograd_calls_total          counter    worker, function, outcome  calls served
    aiograd_call_seconds         histogram  worker, function           how long they took there
    aiograd_passes_total         counter    worker, outcome            backward passes begun here
    aiograd_backward_seconds     histogram  worker                     how long they took

These names do not change within a major version. Labels are names of workers, states and limits,
bounded by the size of the cluster, and of functions: the first 100 of a worker, then "(others)".
Outcomes are "ok", "error" and "cancelled". The last four are counted by workers only while somebody
collects (`rpc.observe.tally`); all others are read from tables that are there anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from aiograd.observe.snapshot import (
    BLOCKED,
    HIDDEN,
    LOST,
    RUNNING,
    SILENT,
    STOPPED,
    Data,
    TallyRow,
    WorkerRow,
)

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
STATES: Final = (RUNNING, BLOCKED, STOPPED, SILENT, LOST, HIDDEN)


class Buckets(NamedTuple):
    """A histogram: how many were at most as long as each bound, the last one of them infinite."""

    cumulative: Sequence[tuple[str, float]]  # the bound as Prometheus writes it, and the count
    total: float  # seconds

    @property
    def number(self) -> float:
        """How many there were."""
        return self.cumulative[-1][1]


class Family(NamedTuple):
    """One metric: its name without `_total`, and a sample per set of labels."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]
    histograms: Sequence[tuple[tuple[str, ...], Buckets]] = ()  # instead, of that kind

    @property
    def full_name(self) -> str:
        """The name as Prometheus stores it."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name


Of = Callable[[WorkerRow], float | None]

_COUNTERS: Final = {
    "pending_calls": "Calls made that have not ended",
    "running_calls": "Calls of others that run",
    "abandoned_calls": "Threads that work for nobody",
    "owner_rrefs": "Shared values",
    "user_rrefs": "References to values elsewhere",
    "contexts": "Open contexts",
    "backward_passes": "Backward passes under way",
    "buffered_bytes": "Bytes that wait to be sent",
}
_PER_WORKER: Final[tuple[tuple[str, str, str, Of], ...]] = (
    ("calls_started", COUNTER, "Calls made", lambda row: row.started),
    ("optimizer_steps", COUNTER, "Steps of optimisers", lambda row: row.steps),
    ("loop_lag_seconds", GAUGE, "How long a message waits for the loop", lambda row: row.lag),
    ("memory_bytes", GAUGE, "Resident memory", lambda row: row.memory),
    ("cpu_seconds", COUNTER, "Processor time", lambda row: row.cpu),
    ("threads", GAUGE, "Threads", lambda row: row.threads),
)


def families(data: Data) -> list[Family]:
    """Return all metrics of a snapshot, also those without samples."""
    return list(_families(data))


def _families(data: Data) -> Iterator[Family]:
    states = dict.fromkeys(STATES, 0)
    for row in data.workers:
        states[row.state] = states.get(row.state, 0) + 1
    samples = [((state,), float(count)) for state, count in states.items()]
    yield Family("aiograd_workers", GAUGE, "Workers by state", ("state",), samples)
    known = [row for row in data.workers if row.pid is not None and row.cpu is not None]
    for name, text in _COUNTERS.items():
        found = [((row.name,), float(row.counters[name])) for row in known if name in row.counters]
        yield Family(f"aiograd_{name}", GAUGE, text, ("worker",), found)
    for name, kind, text, of in _PER_WORKER:
        values = [(row.name, of(row)) for row in known]
        found = [((worker,), float(value)) for worker, value in values if value is not None]
        yield Family(f"aiograd_{name}", kind, text, ("worker",), found)
    oldest = {row.name: 0.0 for row in known}
    for call in data.pending:
        if call.caller in oldest:
            oldest[call.caller] = max(oldest[call.caller], call.age or 0.0)
    owned = {row.name: 0.0 for row in known}
    for reference in data.references:
        if reference.owner in owned:
            owned[reference.owner] += reference.size
    for name, text, sums in (
        ("oldest_call_seconds", "Age of the oldest pending call", oldest),
        ("owned_bytes", "Bytes of shared values", owned),
    ):
        found = [((worker,), value) for worker, value in sums.items()]
        yield Family(f"aiograd_{name}", GAUGE, text, ("worker",), found)
    links = [link for link in data.links if link.worker != link.peer]
    sizes: dict[tuple[str, ...], float] = {}
    up: dict[tuple[str, ...], float] = {}
    for link in links:
        for direction, count in (("sent", link.sent), ("received", link.received)):
            key = (link.worker, link.peer, direction)
            sizes[key] = sizes.get(key, 0.0) + count
        up[link.worker, link.peer] = float(link.state == "open" and not link.suspect)
    labels: tuple[str, ...] = ("worker", "peer", "direction")
    yield Family("aiograd_bytes", COUNTER, "Bytes of open links", labels, list(sizes.items()))
    yield Family("aiograd_link_up", GAUGE, "Connected", ("worker", "peer"), list(up.items()))
    reached = [
        ((row.name, limit), float(count)) for row in known for limit, count in row.limits.items()
    ]
    text, labels = "Limits that were reached", ("worker", "limit")
    yield Family("aiograd_limit_reached", COUNTER, text, labels, reached)
    yield from _counted(data)
    info = [
        ((row.name, row.versions.get("aiograd", ""), row.versions.get("python", "")), 1.0)
        for row in known
    ]
    yield Family("aiograd_info", GAUGE, "Versions", ("worker", "version", "python"), info)


def _counted(data: Data) -> Iterator[Family]:
    """Give what workers have counted for us."""
    calls = [row for row in data.tallies if row.kind == "call"]
    passes = [row for row in data.tallies if row.kind == "pass"]
    outcomes = [
        ((row.worker, row.function, outcome), float(count))
        for row in calls
        for outcome, count in row.outcomes.items()
    ]
    labels: tuple[str, ...] = ("worker", "function", "outcome")
    yield Family("aiograd_calls", COUNTER, "Calls served", labels, outcomes)
    text = "How long calls took where they were served"
    found = [((row.worker, row.function), _buckets(row)) for row in calls]
    yield Family("aiograd_call_seconds", HISTOGRAM, text, ("worker", "function"), (), found)
    ended = [
        ((row.worker, outcome), float(count))
        for row in passes
        for outcome, count in row.outcomes.items()
    ]
    labels = ("worker", "outcome")
    yield Family("aiograd_passes", COUNTER, "Backward passes begun", labels, ended)
    text = "How long backward passes took"
    lasted = [((row.worker,), _buckets(row)) for row in passes]
    yield Family("aiograd_backward_seconds", HISTOGRAM, text, ("worker",), (), lasted)


def _buckets(row: TallyRow) -> Buckets:
    bounds = [*map(str, row.bounds), "+Inf"]
    counts = map(float, itertools.accumulate(row.counts))
    return Buckets([*zip(bounds, counts, strict=True)], row.total or 0.0)
