"""Recordings of calls, and of what they did on other workers: where the time goes.

    with profile() as prof:
        await rpc_async("worker1", train_step)
    print(prof.table())
    prof.to_chrome("trace.json")            # opens in chrome://tracing or Perfetto
    prof.to_otel()                          # to OpenTelemetry
    ag.viz.timeline(prof.events)            # a picture

    profile() ─▶ SCOPE.recording ─▶ Profile.add(Span) … ─▶ table · Chrome · OpenTelemetry

Recording is a property of the context: calls made inside are recorded here, run recorded at the
callee, and bring the spans of their callees back, however deep. Outside, nothing is recorded. How
recorded calls cross the wire is in `tracing`, pictures are in `aiograd.viz.timeline`.

A worker can also record everything that is called there, by any caller: `start_profile` and
`stop_profile`, called on it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from aiograd._html import BLUE, card, code, quiet
from aiograd._html import table as html_table
from aiograd.errors import RpcError
from aiograd.rpc.scope import SCOPE, current

F = TypeVar("F", bound=Callable[..., Any])
# Spans of one recording: more than a person or a viewer can look through.
LIMIT: Final = 100_000
SHOWN: Final = 10  # lines of a profile in a notebook


# ── what is recorded ────────────────────────────────────────────────────────────────────────────


class Span(NamedTuple):
    """An interval of time on a worker, and what happened in it.

    `key` says what it was, after the keys of the calls it happened in:
    `rpc_call#f(a -> b)/rpc_call#g(b -> c)/g`. Times are seconds of the clock of the worker that
    recorded; spans from a clock of its own were moved into the call that brought them.
    """

    key: str
    kind: str  # "call", "op", "remote", "fetch", "stream"; "run" at the callee; "scope", …
    worker: str
    start: float
    end: float
    id: int = 0
    parent: int = 0  # the id of the span it happened in; 0: of none
    error: str = ""  # the name of the type of exception it raised
    detail: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Profile:
    """The spans of one recording, in the order in which they ended.

    `details` asks callees for the shapes of arrays they were given, and the bytes of their results.
    What is recorded `within` another recording appears in both.

        >>> with ag.profile() as prof:
        ...     with ag.span("load"):
        ...         pass
        >>> prof
        <Profile of 1 spans>
        >>> prof.to_chrome("trace.json")
    """

    def __init__(
        self,
        details: bool = False,
        within: Profile | None = None,
        limit: int = LIMIT,
        carries: bool = False,
    ) -> None:
        self.events: list[Span] = []
        self.dropped: int = 0  # spans that ended when there were `limit` already
        self.details: bool = details or (within is not None and within.details)
        self.carries: bool = carries  # nothing is recorded, but calls belong to a trace
        self._within, self._limit = within, limit
        # Shared with the outer recording: a span appears in both, under one id.
        self.ids: Iterator[int] = itertools.count(1) if within is None else within.ids

    def number(self) -> int:
        """Return the id of a new span."""
        return next(self.ids)

    def add(self, span: Span) -> None:
        """Record a span that has ended. May be called in any thread."""
        if len(self.events) < self._limit:
            self.events.append(span)
        else:
            self.dropped += 1
        if self._within is not None:
            self._within.add(span)

    def children(self, span: Span) -> list[Span]:
        """Return the spans directly inside a span."""
        return [each for each in self.events if each.parent == span.id]

    def table(self) -> str:
        """Return the recording as text: one line per key and worker, the longest first."""
        return table(self.events)

    def chrome_trace(self) -> dict[str, Any]:
        """Return the recording in Chrome's trace format: one process per worker."""
        return chrome_trace(self.events)

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a file that chrome://tracing and Perfetto open."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.chrome_trace(), file)

    def to_otel(self, tracer: Any = None) -> int:
        """Export the recording to OpenTelemetry (needs `aiograd[otel]`); return how many spans.

        They go to the tracer that is given, else to the program's own, below its current span.
        """
        from aiograd.rpc.observe.otel import export  # an extra: not needed to record

        return export(self.events, tracer)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        lost = f", {self.dropped} dropped" if self.dropped else ""
        return f"<Profile of {len(self.events)} spans{lost}>"

    def _repr_html_(self) -> str:
        groups: dict[tuple[str, str], list[float]] = {}
        for span in self.events:
            groups.setdefault((span.name, span.worker), []).append(span.seconds)
        longest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:SHOWN]
        rows = [
            (code(name), code(worker), str(len(times)), f"{1e3 * sum(times):.3f} ms")
            for (name, worker), times in longest
        ]
        more = f" · the {SHOWN} longest of {len(groups)}" if len(groups) > SHOWN else ""
        title = f"<b>Profile</b> {quiet(f'{len(self.events)} spans{more}')}"
        return card(BLUE, title, html_table(rows, ("what", "worker", "times", "total")))

    def __reduce__(self) -> Any:
        # Spans as tuples: they pickle without a call of `Span` for each.
        return _rebuild, ([tuple(span) for span in self.events], self.dropped)


def _rebuild(events: Iterable[tuple[Any, ...]], dropped: int) -> Profile:
    made = Profile()
    made.events, made.dropped = [Span(*each) for each in events], dropped
    return made


# ── recording ───────────────────────────────────────────────────────────────────────────────────


class Scope(NamedTuple):
    """The current recording, and the id of the span that new ones belong to."""

    profile: Profile
    parent: int


def key(kind: str, function: str, source: str, destination: str) -> str:
    """Return the key of a call."""
    return f"rpc_{kind}#{function}({source} -> {destination})"


@contextlib.contextmanager
def profile(*, details: bool = False) -> Iterator[Profile]:
    """Record the calls made in this block, and by the tasks it starts, when they end.

    May be nested; may stand inside an autograd context or around one. See `Profile` for `details`.

        >>> with ag.profile() as prof:
        ...     await ag.rpc_async("worker1", abs, args=(-1,))
        1
        >>> [span.name for span in prof]
        ['rpc_call#abs(driver -> worker1)', 'abs']
        >>> print(prof.table())
        key...worker...total ms...
    """
    outer = SCOPE.get().recording
    # Nested in the outer one, so that its spans appear there as well, below the same parent.
    made = Profile(details, None if outer is None else outer.profile)
    with under(Scope(made, 0 if outer is None else outer.parent)):
        yield made


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Record how long this block takes, if a recording is on.

    >>> def work():
    ...     with ag.span("first part"):
    ...         return 1
    >>> with ag.profile() as prof:
    ...     result = await ag.rpc_async("worker1", work)
    >>> "first part" in [each.name for each in prof]
    True
    """
    scope = SCOPE.get().recording
    if scope is None:
        yield
        return
    recording, parent = scope
    agent, id, error = current(), recording.number(), ""
    start = agent.runtime.time()
    try:
        with under(Scope(recording, id)):
            yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        end = agent.runtime.time()
        recording.add(Span(name, "scope", agent.name, start, end, id, parent, error))


@contextlib.contextmanager
def under(scope: Scope) -> Iterator[None]:
    """Let calls made in this block be recorded."""
    token = SCOPE.set(SCOPE.get().recorded(scope))
    try:
        yield
    finally:
        # An async generator, or a notebook cell, may leave the block in another context than it
        # entered; that context ends with its task, and the recording in it.
        with contextlib.suppress(ValueError):
            SCOPE.reset(token)


class RecordingWorker(Protocol):
    """What recording needs of a worker."""

    profiles: list[Profile] | None
    tally: Any


def _quiet(func: F) -> F:
    """Mark a function that runs on the loop, and is neither counted nor recorded as a call."""
    func.__aiograd_inline__ = func.__aiograd_quiet__ = True  # type: ignore[attr-defined]
    return func


@_quiet
def start_profile(*, details: bool = False) -> None:
    """Begin to record what is called on the current worker, by any caller.

    Call it there: `await rpc_async("worker1", start_profile)`. A second one nests in the first.

        >>> await ag.rpc_async("worker1", ag.start_profile)
        >>> await ag.rpc_async("worker1", abs, args=(-1,))
        1
        >>> len(await ag.rpc_async("worker1", ag.stop_profile))
        1
    """
    agent = current()
    stack = agent.profiles or []
    agent.profiles = [*stack, Profile(details, stack[-1] if stack else None)]


@_quiet
def stop_profile() -> Profile:
    """End the recording on the current worker that was started last, and return it.

    >>> ag.start_profile()
    >>> len(ag.stop_profile())
    0
    """
    agent = current()
    if not agent.profiles:
        raise RpcError(f"no profile was started on {agent.name}")
    last: Profile
    *rest, last = agent.profiles
    set_profiles(agent, rest)
    return last


def set_profiles(worker: RecordingWorker, profiles: list[Profile]) -> None:
    """Let a worker have these recordings; None if neither they nor a tally want calls observed."""
    # Every call being served asks only whether it is None.
    worker.profiles = profiles if profiles or worker.tally is not None else None


# ── presenting ──────────────────────────────────────────────────────────────────────────────────

_MICRO = 1e6  # Chrome counts microseconds


def table(spans: Sequence[Span]) -> str:
    """Return one line of text per key and worker, the longest in total first."""
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
    """Return a Chrome trace: one process per worker.

    Spans that overlap without nesting are in different threads: Chrome draws a thread as a stack.
    """
    pids = {name: pid for pid, name in enumerate(sorted({span.worker for span in spans}))}
    # From the first span on: Chrome shows absolute times, and these count from the boot.
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
    """Return spans in order of their start, each with the first lane of its worker with room.

    In a lane, of two spans one ends before the other begins, or lies inside it.
    """
    open_ends: dict[str, list[list[float]]] = {}  # per worker and lane, ends of spans still open
    placed = []
    # Of two that start together the longer one first, so that the other one can nest in it.
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        rows = open_ends.setdefault(span.worker, [])
        # Open spans of a lane nest, so the last one ends first, and its end is the next limit.
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
