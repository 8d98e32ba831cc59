"""Who waits for whom: what a snapshot says about a cluster that does not go on. Pure.

A call waits for the calls that it has made, for its turn, for a barrier or a pass; these wait for
workers. The graph of that is made from a snapshot, and read in this order:

    cycle     calls that wait for each other: they never end by themselves
    return    a chain of calls that comes back to a function it has come from: a cycle if that
              holds a lock, which no table knows
    worker    one that is blocked, stopped, silent or lost, and what waits for it
    barrier   a collective that somebody never reached
    pass      a backward pass that does not end
    chain     what is left, the longest first

    driver>worker0#3 ──▶ worker0>worker1#1 ──▶ worker1>worker2#7 ──▶ worker2>worker0#2 ─┐
            ▲                                                         waits for its turn │
            └────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiograd.observe.snapshot import GATHER, LOST, CallRow, Data, WorkerRow

OLDER: Final = 1.0  # seconds after which a wait is worth a line
_ORDER: Final = ("cycle", "return", "worker", "barrier", "pass", "chain")


@dataclass(slots=True)
class Hop:
    """One step of a chain: who waits, in which function, at which line, since when, for what."""

    worker: str
    function: str
    line: str = ""
    age: float | None = None
    note: str = ""


@dataclass(slots=True)
class Finding:
    """One reason why something does not go on."""

    kind: str
    title: str
    age: float
    hops: list[Hop] = field(default_factory=list)
    guilty: str = ""  # the line to look at first


class _Chain(NamedTuple):
    """A chain of calls, each of which waits for the next one."""

    length: int
    following: str | None  # the second of them
    end: str


class _Graph:
    """The calls of a snapshot, and what each waits for.

    A page asks once a second, on the loop of a worker that may have thousands of calls in a queue:
    whatever is found for all of them takes time in proportion to their number, not to its square.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.pending = {row.key: row for row in data.pending}
        self.running = {row.key: row for row in data.running}
        self.workers = {row.name: row for row in data.workers}
        self.troubled = {row.name: row for row in data.troubled}
        self.edges: dict[str, list[str]] = {key: [] for key in {**self.pending, **self.running}}
        for row in data.pending:
            if row.parent is not None and row.parent in self.edges:
                self.edges[row.parent].append(row.key)
        for row in data.running:
            if row.behind is not None and row.behind in self.edges:
                self.edges[row.key].append(row.behind)
        self.waiters: dict[str, list[str]] = {}  # the edges backwards
        for key, tos in self.edges.items():
            for to in tos:
                self.waiters.setdefault(to, []).append(key)
        self._told: set[str] = set()  # calls of which everything that waits for them is told
        self._chains: dict[str, _Chain] = {}  # the longest one from each call on, once asked for

    def age(self, key: str) -> float:
        """Return the age of a call, as its caller or its callee knows it."""
        ages = [row.age for row in self.rows(key) if row.age is not None]
        return max(ages, default=0.0)

    def rows(self, key: str) -> list[CallRow]:
        """Return the rows of a call, its callee's first."""
        return [rows[key] for rows in (self.running, self.pending) if key in rows]

    def hop(self, key: str, note: str = "") -> Hop:
        """Describe a call: where it runs, and the line it has reached."""
        row = self.rows(key)[0]
        return Hop(row.callee, row.function, row.at or self.line(key), self.age(key), note)

    def line(self, key: str) -> str:
        """Return the line that made a call."""
        return self.pending[key].line if key in self.pending else ""

    def is_made_by(self, key: str, others: list[str]) -> bool:
        """Tell whether a call was made by one of these."""
        return key in self.pending and self.pending[key].parent in others

    def tell(self, key: str, told: set[str]) -> None:
        """Add a call, and everything that waits for it, to what is told."""
        waiting = [key]
        while waiting:
            at = waiting.pop()
            if at not in self._told:
                self._told.add(at)
                waiting += self.waiters.get(at, ())
                told.add(at)

    def longest(self, key: str) -> _Chain:
        """Return the longest chain of calls from one on."""
        return self._chains[key] if key in self._chains else self._measure(key)

    def chain(self, key: str) -> list[str]:
        """Return the calls of the longest chain from one on; it ends where one comes again."""
        chain: dict[str, None] = {}
        at: str | None = key
        while at is not None and at not in chain:
            chain[at] = None
            at = self.longest(at).following
        return list(chain)

    def _measure(self, key: str) -> _Chain:
        """Find the longest chains from one call on, and from all that it waits for."""
        # Not recursive: a queue of thousands of calls is a chain of thousands.
        path, rest = [key], [iter(self.edges.get(key, ()))]
        self._chains[key] = _Chain(1, None, key)  # so far; an edge back to it ends there
        while path:
            to = next(rest[-1], None)
            if to is None:
                rest.pop()
                to = path.pop()
            elif to not in self._chains:
                self._chains[to] = _Chain(1, None, to)
                path.append(to)
                rest.append(iter(self.edges.get(to, ())))
                continue
            rest_of_it = self._chains[to]
            if path and rest_of_it.length >= self._chains[path[-1]].length:
                self._chains[path[-1]] = _Chain(rest_of_it.length + 1, to, rest_of_it.end)
        return self._chains[key]


def find(data: Data, older: float = OLDER) -> list[Finding]:
    """Return why a cluster does not go on, the most certain reasons first."""
    graph = _Graph(data)
    told: set[str] = set()  # calls that are part of a finding
    found = [*_cycles(graph, told)]
    found += _troubled(graph, told)
    found += _barriers(graph, told, older)
    found += _passes(graph, told, older)
    found += _chains(graph, told, older)
    found.sort(key=lambda each: (_ORDER.index(each.kind), -len(each.hops), -each.age))
    return found


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


def _cycles(graph: _Graph, told: set[str]) -> Iterator[Finding]:
    for cycle in _find_cycles(graph.edges):
        told.update(cycle)
        # From where it was entered, else from the oldest call on.
        outside = [key for key in cycle if not graph.is_made_by(key, cycle)]
        first = cycle.index(max(outside or cycle, key=graph.age))
        cycle = cycle[first:] + cycle[:first]
        hops = []
        # The call that waits for its turn is a hop of the one that made it.
        shown = [key for key in cycle if not _is_queued(graph, key)] or cycle
        for i, key in enumerate(shown):
            following = graph.rows(shown[(i + 1) % len(shown)])[0]
            hops.append(graph.hop(key, f"waits for {following.callee}"))
        title = f"cycle of {len(shown)} calls: each waits for the next one, the last for the first"
        age = min(hop.age or 0.0 for hop in hops)
        yield Finding("cycle", title, age, hops, hops[-1].line)


def _is_queued(graph: _Graph, key: str) -> bool:
    return key in graph.running and graph.running[key].state == "turn"


def _find_cycles(edges: dict[str, list[str]]) -> Iterator[list[str]]:
    """Give one cycle of every group of calls that wait for each other."""
    done: set[str] = set()
    for root in sorted(edges):
        # The path from the root, and for each call on it what is left to look at.
        path, rest = {root: None}, [iter(edges[root])]  # a dict: it may be thousands of calls long
        while path and root not in done:
            to = next(rest[-1], None)
            if to is None:
                done.add(path.popitem()[0])
                rest.pop()
            elif to in path:
                keys = list(path)
                yield keys[keys.index(to) :]
            elif to not in done:
                path[to] = None
                rest.append(iter(edges[to]))


def _chains(graph: _Graph, told: set[str], older: float) -> Iterator[Finding]:
    roots = [key for key in graph.pending if key not in graph.waiters and graph.age(key) >= older]
    # The longest first: a call that is part of one needs no line of its own.
    for root in sorted(roots, key=lambda key: (-graph.longest(key).length, -graph.age(key))):
        # Asked first: of a thousand calls in a queue, all chains end with the same one.
        if graph.longest(root).end in told:
            continue
        chain = graph.chain(root)
        if chain[-1] in told:
            continue
        rows = [graph.rows(key)[0] for key in chain]
        if len(chain) == 1 and rows[0].kind == "service":
            continue  # the library's own, and alone
        told.update(chain)
        hops = [Hop(rows[0].caller, "", graph.line(chain[0]), graph.age(chain[0]))]
        hops += [graph.hop(key) for key in chain]
        hops[-1].note = _what_it_does(graph, chain[-1])
        age, kind = graph.age(chain[0]), "chain"
        title = f"chain of {len(chain)} calls, since {seconds(age)}"
        if len(chain) == 1:
            title = f"{rows[0].function} on {rows[0].callee}, since {seconds(age)}"
        places = [(row.callee, row.function) for row in rows]
        # Calls in one queue do not come back to it: only what has left it can.
        queued = len(chain) - 1
        while queued and not graph.is_made_by(chain[queued], chain[queued - 1 : queued]):
            queued -= 1
        if places.index(places[-1]) < queued:
            kind = "return"
            title = (
                f"a chain of {len(chain)} calls comes back to {places[-1][1]} on {places[-1][0]}: "
                "does it wait for a lock that it holds?"
            )
        yield Finding(kind, title, age, hops, hops[-1].line)


def _what_it_does(graph: _Graph, key: str) -> str:
    row = graph.running.get(key)
    if row is None:
        pending = graph.pending.get(key)
        if pending is not None and pending.state == "waiting":
            return "waits until fewer calls are under way to this worker"
        return "has not begun there"
    return {
        "queued": "waits for a thread",
        "turn": "waits for its turn",
        "arguments": "waits for its arguments",
        "held": "waits until its caller reads its answers",
        "abandoned": "runs on, though nobody waits for it",
    }.get(row.state, "runs")


# ── workers, barriers, passes ───────────────────────────────────────────────────────────────────


def _troubled(graph: _Graph, told: set[str]) -> Iterator[Finding]:
    for row in graph.troubled.values():
        age = row.blocked or 0.0
        hops: list[Hop] = []
        if row.at:
            hops.append(Hop(row.name, "", row.at, row.blocked, "blocks the event loop"))
        hops += _waiting_for(graph, row, told)
        if row.state == LOST and not hops:
            continue  # nobody waits for it: nothing is stuck
        age = max([age, *(hop.age or 0.0 for hop in hops)])
        guilty = row.at or (hops[0].line if hops else "")
        yield Finding("worker", f"{row.name} is {row.state}: {row.why}", age, hops, guilty)


def _waiting_for(graph: _Graph, row: WorkerRow, told: set[str]) -> Iterator[Hop]:
    """Give what waits for a worker: calls and passes, the oldest first."""
    calls = [each for each in graph.data.pending if each.callee == row.name]
    for call in sorted(calls, key=lambda each: -(each.age or 0.0)):
        if call.kind == "service" and call.function != GATHER:
            continue
        graph.tell(call.key, told)
        note = f"calls {call.function} on {row.name}"
        name = graph.rows(call.parent)[0].function if call.parent in graph.edges else ""
        yield Hop(call.caller, name, call.line, call.age, note)
    for each in graph.data.passes:
        if row.name in each.waits_for:
            told.add(f"pass {each.context} {each.number}")
            count = each.waits_for[row.name]
            note = f"its backward pass waits for {count} edge{'s' * (count > 1)} of {row.name}"
            line = each.line or _line_of_pass(graph, each.context, each.number)
            yield Hop(each.worker, "backward", line, each.age, note)


def _line_of_pass(graph: _Graph, context: str, number: str) -> str:
    same = [each for each in graph.data.passes if (each.context, each.number) == (context, number)]
    return next((each.line for each in same if each.line), "")


def _barriers(graph: _Graph, told: set[str], older: float) -> Iterator[Finding]:
    for row in graph.data.collectives:
        if (row.age or 0.0) < older:
            continue
        hops = []
        for call in graph.data.pending:
            if call.function == GATHER and call.callee == row.root and call.caller in row.arrived:
                graph.tell(call.key, told)
                name = graph.rows(call.parent)[0].function if call.parent in graph.edges else ""
                hops.append(Hop(call.caller, name, call.line, call.age, "waits"))
        for name in row.missing:
            busy = [each for each in graph.data.running if each.callee == name]
            busy = [each for each in busy if each.kind != "service"]
            if name in graph.troubled:
                hops.append(Hop(name, "", graph.troubled[name].at, None, graph.troubled[name].why))
            hops += [
                Hop(name, each.function, each.at, each.age, "has not come: it is here")
                for each in sorted(busy, key=lambda each: -(each.age or 0.0))[:3]
            ]
            if not busy and name not in graph.troubled:
                hops.append(Hop(name, "", "", None, "has not come, and nothing is called there"))
        missing = ", ".join(row.missing)
        title = f"{missing} never reached the barrier of {', '.join(row.group)}"
        guilty = next((hop.line for hop in hops if hop.worker in row.missing and hop.line), "")
        guilty = guilty or next((hop.line for hop in hops if hop.line), "")
        yield Finding("barrier", title, row.age or 0.0, hops, guilty)


def _passes(graph: _Graph, told: set[str], older: float) -> Iterator[Finding]:
    passes: dict[tuple[str, str], list[Hop]] = {}
    for row in graph.data.passes:
        key = row.context, row.number
        if f"pass {row.context} {row.number}" in told or (row.age or 0.0) < older:
            continue
        if row.state == "complete":
            continue
        owed = [f"{count} of {name}" for name, count in row.waits_for.items()]
        note = f"waits for edges: {', '.join(owed)}" if owed else row.state
        hop = Hop(row.worker, "backward", row.line, row.age, note)
        passes.setdefault(key, []).append(hop)
    for (context, _), hops in passes.items():
        hops.sort(key=lambda hop: not hop.line)  # the originator first
        age = max(hop.age or 0.0 for hop in hops)
        title = f"a backward pass of context {context} does not end"
        yield Finding("pass", title, age, hops, hops[0].line)


# ── words ───────────────────────────────────────────────────────────────────────────────────────


def seconds(age: float | None) -> str:
    """Return a duration for people."""
    if age is None:
        return "?"
    if age < 100:
        return f"{age:.1f} s"
    minutes, rest = divmod(int(age), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def describe(
    findings: Iterable[Finding], short: Callable[[str], str] = str, most: int = 10
) -> list[str]:
    """Return findings as lines of text: a title, then a line per hop, in columns."""
    lines: list[str] = []
    for finding in findings:
        lines.append(finding.title)
        hops = finding.hops[:most]
        cells = [(hop.worker, hop.function or "–", short(hop.line) or "?") for hop in hops]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(3)]
        for hop, row in zip(hops, cells, strict=True):
            columns = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
            age = seconds(hop.age) if hop.age is not None else "–"
            lines.append("  " + "  ".join([*columns, age.rjust(8), hop.note]).rstrip())
        if len(finding.hops) > most:
            lines.append(f"  … and {len(finding.hops) - most} more")
    return lines
