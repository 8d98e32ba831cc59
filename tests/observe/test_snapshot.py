"""Snapshots survive the way through JSON, and refuse what is none."""

from __future__ import annotations

import dataclasses
import json

import pytest

from aiograd.observe import snapshot
from aiograd.observe.snapshot import (
    GATHER,
    HIDDEN,
    LOST,
    SILENT,
    TABLES,
    VERSION,
    CallRow,
    CollectiveRow,
    Data,
    LinkRow,
    ReferenceRow,
    WorkerRow,
    from_dict,
    from_json,
)


def sample() -> Data:
    data = Data(12.5, "driver")
    data.workers = [WorkerRow("worker0", 0, counters={"pending_calls": 1}), WorkerRow("driver", 1)]
    data.links = [LinkRow("driver", "worker0", "open", sent=10, received=20)]
    data.pending = [CallRow("driver>worker0#1", "driver", "worker0", "f", line="x.py:3", age=1.0)]
    data.references = [ReferenceRow("worker0", "x.py:4", "Tensor[3] float64", 2, 48)]
    return data


def test_a_snapshot_is_the_same_after_json():
    data = sample()
    assert from_json(data.to_json()) == data
    assert from_json(data.to_json(indent=2)) == data


def test_json_has_every_table_and_the_version():
    found = json.loads(sample().to_json())
    assert found["version"] == VERSION
    assert found.keys() == {"version", "taken", "by", *TABLES}
    assert found["workers"][0]["counters"] == {"pending_calls": 1}


def test_fields_of_a_newer_minor_version_are_left_out():
    found = sample().to_dict()
    found["workers"][0]["temperature"] = 80
    assert from_dict(found) == sample()


def _with_worker(**fields: object) -> str:
    row = {"name": "a", "rank": 0} | fields
    return json.dumps({"version": VERSION, "taken": 1, "by": "a", "workers": [row]})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "no snapshot"),
        ('{"version": 999}', "of version 999"),
        (f'{{"version": {VERSION}}}', "no snapshot"),
        (f'{{"version": {VERSION}, "taken": 1, "by": "a", "workers": [3]}}', "no snapshot"),
        (_with_worker(name=5), "malformed WorkerRow"),
        (_with_worker(rank="first"), "malformed WorkerRow"),
        (_with_worker(rank=True), "malformed WorkerRow"),
        (_with_worker(age=float("nan")), "malformed WorkerRow"),
        (_with_worker(stack=[[]]), "malformed WorkerRow"),
        (_with_worker(counters={"a": "b"}), "malformed WorkerRow"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_snapshot_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        from_json(text)


def test_lost_workers_are_told_from_those_that_do_not_answer():
    data = Data()
    states = ["running", HIDDEN, SILENT, LOST]
    data.workers = [WorkerRow(state, rank, state) for rank, state in enumerate(states)]
    assert [row.name for row in data.lost] == [LOST]
    assert [row.name for row in data.troubled] == [SILENT, LOST]
    assert data.worker(SILENT).rank == 2
    with pytest.raises(KeyError):
        data.worker("nobody")


def test_the_age_of_a_gather_is_that_of_the_member_that_came_first():
    data = Data()
    for caller, age in (("a", 5.0), ("b", 2.0)):
        key = f"{caller}>a#1"
        data.pending.append(CallRow(key, caller, "a", GATHER, age=age))
        data.running.append(CallRow(key, caller, "a", GATHER))
    data.collectives = [CollectiveRow("a", ["a", "b", "c"], ["a", "b"], ["c"])]
    data.reconcile()
    assert [row.age for row in data.running] == [5.0, 2.0]
    assert data.collectives[0].age == 5.0


def test_every_field_of_a_row_has_a_form():
    """A field of a kind that is not known would make every snapshot unreadable."""
    kinds = {field.type for row in TABLES.values() for field in dataclasses.fields(row)}
    assert kinds <= snapshot._FORMS.keys()
