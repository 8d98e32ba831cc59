"""The data of a snapshot: plain, versioned, the same for a terminal, a page and a file. Pure.

    Snapshot ─┬─ workers       one row per worker, also for those that did not answer
              ├─ links         one row per worker and peer, as that worker sees it
              ├─ pending       calls that a worker has made and that have not ended
              ├─ running       calls that a worker was asked for and that have not ended
              ├─ references    values by owner, line and type
              ├─ contexts      one row per worker that has a part of the context
              ├─ passes        backward passes, with whom each worker waits for
              ├─ collectives   barriers and gathers that are not complete
              └─ tallies       calls and passes by outcome and duration, for who collects them

A call is in `pending` of its caller and in `running` of its callee, under one `key`. Ages and
durations are seconds; None is what is not known. Ids are texts: JavaScript has no 64-bit integers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

VERSION: Final = 1  # grows when a field changes its meaning or goes; new fields do not count
GATHER: Final = "cluster.gather"  # the request by which a worker takes part in a barrier
Row = TypeVar("Row")

# How a worker was found.
RUNNING: Final = "running"
BLOCKED: Final = "blocked"  # its event loop does not answer, and its watchdog says where it is
STOPPED: Final = "stopped"  # its process is (SIGSTOP, a debugger)
SILENT: Final = "silent"  # no answer, and nobody knows why
LOST: Final = "lost"  # no member any more, and it did not leave
HIDDEN: Final = "hidden"  # it answers, and does not show itself to who asks


@dataclass(slots=True)
class WorkerRow:
    """One worker."""

    name: str
    rank: int
    state: str = RUNNING
    why: str = ""  # what is known about a state other than running
    incarnation: str = ""
    host: str = ""
    pid: int | None = None
    memory: int | None = None  # bytes that are resident
    cpu: float | None = None  # seconds of processor time so far
    lag: float | None = None  # seconds that a message waits for the event loop, at present
    threads: int | None = None
    age: float | None = None  # since its start
    round_trip: float | None = None  # of the question for this row
    coordinator: bool = False
    counters: dict[str, int] = field(default_factory=dict)  # those of `ag.debug_info`
    limits: dict[str, int] = field(default_factory=dict)  # how often each was reached
    versions: dict[str, str] = field(default_factory=dict)
    started: int = 0  # calls made so far
    steps: int = 0  # of optimisers on its leaves so far
    blocked: float | None = None  # for how long its event loop has not answered
    stack: list[str] = field(default_factory=list)  # where it is blocked; the innermost line last
    at: str = ""  # the innermost line of user code in `stack`


@dataclass(slots=True)
class LinkRow:
    """One link, as one of its two ends sees it."""

    worker: str
    peer: str
    state: str
    address: str = ""
    suspect: bool = False  # silent, or being connected again
    sent: int = 0  # bytes of this session
    received: int = 0
    queue: int = 0  # bytes that wait to be written
    pending: int = 0  # calls and requests that await an answer
    running: int = 0  # calls of the peer that run here
    round_trip: float | None = None  # as the kernel measures it; not for Unix sockets


@dataclass(slots=True)
class CallRow:
    """One call or request, as its caller (`pending`) or its callee (`running`) sees it."""

    key: str
    caller: str
    callee: str
    function: str
    kind: str = "call"  # "call", "op", "remote", "stream", or "service" for the library's own
    state: str = "sent"  # pending: "sent", "waiting"; running: see `tables`
    line: str = ""  # pending: the line that made the call
    at: str = ""  # running: the line that it has reached
    age: float | None = None
    budget: float | None = None  # seconds that it may take; None: without a deadline
    parent: str | None = None  # the key of the call that made it
    behind: str | None = None  # the key of the call that has to end before it may run


@dataclass(slots=True)
class ReferenceRow:
    """Values of one owner that one line made."""

    owner: str
    line: str
    type: str
    count: int = 1
    size: int = 0  # bytes
    state: str = "ready"  # "creating", "failed"
    holders: dict[str, int] = field(default_factory=dict)  # references by worker


@dataclass(slots=True)
class ContextRow:
    """One worker's part of one context."""

    worker: str
    id: str
    opened_by: str
    workers: list[str] = field(default_factory=list)  # to which it sent the context, or who did
    sends: int = 0  # edges to others
    receives: int = 0  # and from others
    failed: str = ""  # how the last pass failed
    edges: dict[str, int] = field(default_factory=dict)  # `sends` by worker


@dataclass(slots=True)
class PassRow:
    """One worker's part of one backward pass."""

    worker: str
    context: str
    number: str
    originator: str
    state: str  # "computing", "waiting", or "complete" (the others are not, as far as it knows)
    waits_for: dict[str, int] = field(default_factory=dict)  # edges by worker
    informed: list[str] = field(default_factory=list)  # participants it exchanged messages with
    age: float | None = None
    line: str = ""  # at the originator: the line that waits for it


@dataclass(slots=True)
class CollectiveRow:
    """A barrier or gather that is not complete, at its root."""

    root: str
    group: list[str]
    arrived: list[str]
    missing: list[str]
    age: float | None = None  # since the first one came


@dataclass(slots=True)
class TallyRow:
    """How often a function was called on a worker, or a pass begun there, and how long it took."""

    worker: str
    kind: str  # "call" or "pass"
    function: str  # "" for passes
    outcomes: dict[str, int]
    bounds: list[float]  # of durations, in seconds
    counts: list[int]  # between the bounds; the last one: longer than all of them
    total: float | None  # seconds


TABLES: Final[Mapping[str, type]] = {
    "workers": WorkerRow,
    "links": LinkRow,
    "pending": CallRow,
    "running": CallRow,
    "references": ReferenceRow,
    "contexts": ContextRow,
    "passes": PassRow,
    "collectives": CollectiveRow,
    "tallies": TallyRow,
}


@dataclass(slots=True)
class Data:
    """A snapshot as data alone; `Snapshot` is what users get."""

    taken: float = 0.0  # seconds since 1970
    by: str = ""  # the worker that has taken it
    version: int = VERSION
    workers: list[WorkerRow] = field(default_factory=list)
    links: list[LinkRow] = field(default_factory=list)
    pending: list[CallRow] = field(default_factory=list)
    running: list[CallRow] = field(default_factory=list)
    references: list[ReferenceRow] = field(default_factory=list)
    contexts: list[ContextRow] = field(default_factory=list)
    passes: list[PassRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    tallies: list[TallyRow] = field(default_factory=list)

    def worker(self, name: str) -> WorkerRow:
        """Return the row of a worker; KeyError if there is none."""
        for row in self.workers:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def lost(self) -> list[WorkerRow]:
        """Workers that are no members any more and did not leave."""
        return [row for row in self.workers if row.state == LOST]

    @property
    def troubled(self) -> list[WorkerRow]:
        """Workers that are lost, or did not answer."""
        return [row for row in self.workers if row.state not in (RUNNING, HIDDEN)]

    @property
    def calls(self) -> list[CallRow]:
        """All calls that have not ended, each once: who made it where, and how far it has got."""
        running = {row.key: row for row in self.running}
        found = []
        for made in self.pending:
            there = running.pop(made.key, None)
            if there is not None:
                made = dataclasses.replace(made, state=there.state, at=there.at)
            found.append(made)
        return found + list(running.values())

    def add(self, other: Data) -> None:
        """Take in the rows of another part."""
        for name in TABLES:
            getattr(self, name).extend(getattr(other, name))

    def reconcile(self) -> None:
        """Fill in what one end of a call knows and the other does not."""
        ages = {row.key: row.age for row in self.pending}
        for row in self.running:
            if row.age is None:  # a request of the library itself
                row.age = ages.get(row.key)
        for each in self.collectives:
            come = [
                row.age
                for row in self.running
                if row.function == GATHER and row.callee == each.root and row.caller in each.arrived
            ]
            each.age = max((age for age in come if age is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, texts and numbers."""
        found: dict[str, Any] = {"version": self.version, "taken": self.taken, "by": self.by}
        for name in TABLES:
            found[name] = [as_dict(row) for row in getattr(self, name)]
        return found

    def to_json(self, indent: int | None = None) -> str:
        """Return everything as JSON."""
        separators = (",", ":") if indent is None else None
        return json.dumps(self.to_dict(), indent=indent, separators=separators, allow_nan=False)


def as_dict(row: Any) -> dict[str, Any]:
    """Return a row as a dict by the names of its fields."""
    # Not `dataclasses.asdict`, which copies every text: 10,000 rows take 0.2 s by it.
    return {name: getattr(row, name) for name in row.__slots__}


def from_dict(data: Mapping[str, Any]) -> Data:
    """Rebuild a snapshot; ValueError if it is none, or of another version."""
    if data.get("version") != VERSION:
        theirs = data.get("version")
        raise ValueError(f"a snapshot of version {theirs!r}; this aiograd reads {VERSION}")
    try:
        found = Data(float(data["taken"]), str(data["by"]))
        for name, row in TABLES.items():
            setattr(found, name, _rows(row, data.get(name, ())))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no snapshot: {error!r}") from None
    return found


def from_json(text: str) -> Data:
    """Rebuild a snapshot from JSON; ValueError if it is none, or of another version."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("this is no snapshot: it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("this is no snapshot")
    return from_dict(data)


def _rows(kind: type[Row], rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    # A newer minor version may know more fields: they are left out.
    known = {each.name: _FORMS[each.type] for each in dataclasses.fields(kind)}  # type: ignore
    found = []
    for row in rows:
        fields = {key: value for key, value in row.items() if key in known}
        # Else whatever reads the snapshot would fail, also at what other workers answered.
        if not all(known[key](value) for key, value in fields.items()):
            raise ValueError(f"this is no snapshot: a malformed {kind.__name__}")
        found.append(kind(**fields))
    return found


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _is_dict_of(kind: type, value: Any) -> bool:
    return type(value) is dict and all(type(each) is kind for each in value.values())


_FORMS: Final[Mapping[Any, Callable[[Any], bool]]] = {  # by the annotation of a field
    "str": lambda value: type(value) is str,
    "str | None": lambda value: value is None or type(value) is str,
    "bool": lambda value: type(value) is bool,
    "int": lambda value: type(value) is int,
    "int | None": lambda value: value is None or type(value) is int,
    "float | None": _is_number,
    "dict[str, int]": functools.partial(_is_dict_of, int),
    "dict[str, str]": functools.partial(_is_dict_of, str),
    "list[str]": lambda value: type(value) is list and all(type(each) is str for each in value),
    "list[int]": lambda value: type(value) is list and all(type(each) is int for each in value),
    "list[float]": lambda value: type(value) is list and all(map(_is_number, value)),
}
# Whose row it is, by table: one worker tells of no other.
_OWNERS: Final = {
    "links": "worker",
    "pending": "caller",
    "running": "callee",
    "references": "owner",
    "contexts": "worker",
    "passes": "worker",
    "collectives": "root",
}
_ROWS: Final = 1000  # of each table of a partner


def of_partner(data: Data, name: str, rank: int, incarnation: str) -> Data:
    """Return what of a partner's answer is believed: rows about itself, a bounded number."""
    why = "a partner: it shows nothing but what is between it and who asks"
    found = Data(data.taken, name, workers=[WorkerRow(name, rank, HIDDEN, why, incarnation)])
    for table, owner in _OWNERS.items():
        rows = [row for row in getattr(data, table) if getattr(row, owner) == name]
        setattr(found, table, rows[:_ROWS])
    return found
