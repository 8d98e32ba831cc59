"""What is printed of a snapshot."""

from __future__ import annotations

from aiograd.observe.snapshot import LOST, CallRow, Data, LinkRow, WorkerRow
from aiograd.observe.waits import Finding, Hop
from aiograd.views import terminal


def sample(taken=10.0, cpu=1.0, sent=0):
    data = Data(taken, "driver")
    counters = {"pending_calls": 1, "running_calls": 2, "owner_rrefs": 3}
    for rank, name in enumerate(("a", "b")):
        row = WorkerRow(name, rank, host="h", pid=7, memory=1_500_000, cpu=cpu * rank, lag=0.0012)
        row.counters, row.versions, row.started = counters, {"python": "3.11"}, int(100 * cpu)
        data.workers.append(row)
    data.links = [LinkRow("a", "b", "open", sent=sent)]
    data.running = [
        CallRow("b>a#1", "b", "a", "old", at="/x/y/z/w.py:3", age=9.0),
        CallRow("b>a#2", "b", "a", "young", age=1.0),
    ]
    return data


def test_status_has_a_row_per_worker_and_a_line_per_trouble():
    data = sample()
    data.workers[1].state, data.workers[1].why = LOST, "killed \x1b[2J"
    data.workers[1].limits = {"window": 2}
    lines = terminal.status(data)
    assert lines[1].split() == ["a", "0", "running", "h:7", "1.5", "MB", "1.2", "ms", *"123"]
    assert lines[3] == "b is lost: killed ?[2J"
    assert lines[4] == "limits reached: b window ×2"
    assert "\x1b[31mlost" in terminal.status(data, terminal.ansi)[2]


def test_versions_that_differ_are_told():
    data = sample()
    data.workers[1].versions = {"python": "3.12", "loop": "uvloop"}
    assert terminal.status(data)[-1] == "versions differ: python 3.11 (1), 3.12 (1)"


def test_top_shows_rates_and_sorts():
    rates = terminal.Rates()
    assert rates.update(sample()) == {}
    data = sample(taken=12.0, cpu=2.0, sent=4000)
    found = rates.update(data)
    assert found["a"] == {"cpu": 0.0, "calls": 50.0, "sent": 2000.0, "received": 0.0}
    lines = terminal.top(data, found, "cpu")
    assert [line.split()[0] for line in lines[1:3]] == ["b", "a"]
    assert "50 %" in lines[1]
    assert "2.0 kB" in lines[2]
    assert [line.split()[0] for line in lines[5:]] == ["old", "young"]
    assert "z/w.py:3" in lines[5]
    assert len(terminal.top(data, found, "rank", height=6)) <= 6


def test_a_hundred_workers_fit_on_a_screen():
    data = Data(1.0)
    data.workers = [WorkerRow(f"w{i}", i) for i in range(100)]
    lines = terminal.top(data, {}, height=20)
    assert len(lines) <= 20
    assert lines[-1] == "… and 85 more"


def test_stuck_says_when_nothing_is():
    assert terminal.stuck([], 5.0) == ["nothing waits for longer than 5 s"]
    finding = Finding("chain", "a \x07 chain", 2.0, [Hop("a", "f", "/x/y/z/w.py:3", 2.0, "runs")])
    assert terminal.stuck([finding], 1.0) == ["a ? chain", "  a  f  z/w.py:3     2.0 s  runs"]


def test_equal_stacks_are_shown_once():
    entries = [{"kind": "task", "name": f"t{i}", "stack": ["x.py:1 in f"]} for i in range(3)]
    lines = terminal.stacks({"a": entries, "b": "no answer"})
    assert lines == [
        "── a",
        "   task t0 (and 2 like it)",
        "     x.py:1 in f",
        "── b",
        "   no answer",
    ]


def test_paths_and_sizes_are_short():
    assert terminal.short_path("/home/u/p/train.py:3", "/home/u/p") == "train.py:3"
    assert terminal.short_path("/usr/lib/x/y.py:3", "/home") == "x/y.py:3"
    assert terminal.short_path("<stdin>:3") == "<stdin>:3"
    assert terminal.short_path("") == ""
    sizes = [terminal.size(each) for each in (None, 12, 1500, 123_456_000, 5e12)]
    assert sizes == ["–", "12 B", "1.5 kB", "123 MB", "5.0 TB"]
