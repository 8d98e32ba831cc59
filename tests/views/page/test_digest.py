"""What a page gets of a snapshot is small, however large the cluster is."""

from __future__ import annotations

import json

from aiograd.observe.snapshot import (
    CallRow,
    ContextRow,
    Data,
    LinkRow,
    PassRow,
    ReferenceRow,
    WorkerRow,
)
from aiograd.views.page.digest import CALLS, REFERENCES, digest, slim


def test_a_call_is_shown_once_with_what_both_ends_know():
    data = Data(1.0, "driver")
    data.pending = [
        CallRow("d>a#1", "d", "a", "f", "call", "sent", "x.py:1", age=2.0, parent="p"),
        CallRow("d>a#2", "d", "a", "rref.fetch", "service"),
    ]
    data.running = [CallRow("d>a#1", "d", "a", "f", state="running", at="y.py:2")]
    found = digest(data)
    (call,) = found["calls"]
    assert (call["line"], call["at"], call["age"], call["parent"]) == ("x.py:1", "y.py:2", 2.0, "p")
    assert found["edges"] == [{"from": "d", "to": "a", "count": 2, "oldest": 2.0}]


def test_of_an_old_digest_only_numbers_are_kept():
    data = Data(1.0, "a", workers=[WorkerRow("a", 0, cpu=2.0)])
    data.pending = [CallRow("d>a#1", "d", "a", "f")]
    found = slim(digest(data))
    assert found["workers"][0]["cpu"] == 2.0
    assert "counters" not in found["workers"][0]
    assert found["calls"] == []
    assert slim(found) == found  # once more changes nothing


def test_links_are_added_up_per_worker():
    data = Data(1.0, "a", workers=[WorkerRow("a", 0, limits={"window": 1, "values": 0})])
    data.links = [LinkRow("a", "b", "open", sent=1), LinkRow("a", "c", "away", "", True, 2, 3)]
    (row,) = digest(data)["workers"]
    assert (row["sent"], row["received"], row["links"], row["suspects"]) == (3, 3, 1, ["c"])
    assert row["limits"] == {"window": 1}


def test_contexts_have_their_parts_and_passes():
    data = Data(1.0, "a")
    data.contexts = [ContextRow(name, "7", "a") for name in ("a", "b")]
    data.passes = [
        PassRow("a", "7", "1", "a", "waiting", {"b": 2}),
        PassRow("a", "8", "1", "a", ""),
    ]
    (context,) = digest(data)["contexts"]
    assert [part["worker"] for part in context["parts"]] == ["a", "b"]
    assert [each["waits_for"] for each in context["passes"]] == [{"b": 2}]


def test_sixty_four_workers_and_ten_thousand_references_are_small():
    names = [f"worker{i}" for i in range(64)]
    data = Data(1.0, "worker0", workers=[WorkerRow(name, i) for i, name in enumerate(names)])
    data.links = [LinkRow(a, b, "open") for a in names for b in names if a != b]
    data.pending = [CallRow(f"{a}>b#{i}", a, "worker1", "f") for a in names for i in range(100)]
    data.references = [ReferenceRow("worker0", f"x.py:{i}", "int", 1, i) for i in range(10_000)]
    found = digest(data)
    assert (len(found["calls"]), found["call_count"]) == (CALLS, 6400)
    assert (len(found["references"]), found["reference_count"]) == (REFERENCES, 10_000)
    assert len(json.dumps(found)) < 250_000
