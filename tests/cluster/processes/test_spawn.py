"""What children write, in lines, and what they are given."""

from __future__ import annotations

import io
import sys

import pytest

from aiograd.cluster.processes.spawn import (
    MAX_LINE,
    LineSplitter,
    OutputLog,
    forward_lines,
    worker_environment,
)

TEXT = "one\ntwo\r\n\nthree, ünfinished"


@pytest.mark.parametrize("piece", [1, 2, 7, 100])
def test_lines_survive_being_cut_anywhere(piece):
    lines, data = LineSplitter(), TEXT.encode()
    heard = [line for i in range(0, len(data), piece) for line in lines.feed(data[i : i + piece])]
    assert heard == ["one", "two", ""]
    assert lines.end() == ["three, ünfinished"]
    assert lines.end() == []


def test_a_line_without_end_is_cut_and_shown():
    lines = LineSplitter()
    assert lines.feed(b"x" * (2 * MAX_LINE + 1)) == ["x" * MAX_LINE] * 2
    assert lines.end() == ["x"]


@pytest.mark.parametrize("piece", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\r0/3\r1/3\r2/3\r3/3\nnext\n", ["3/3", "next"]),
        (b"0/3\r1/3\r", ["1/3"]),  # ends without a line end
        (b"loading\r\r\r\nx\r\n", ["loading", "x"]),
        (b"50 %\r     \rready\n", ["ready"]),
        (b"50 %\r     \r", []),  # a bar that clears itself
    ],
)
def test_of_a_line_that_is_drawn_over_and_over_the_last_state_is_shown(data, shown, piece):
    lines = LineSplitter()
    heard = [line for i in range(0, len(data), piece) for line in lines.feed(data[i : i + piece])]
    assert heard + lines.end() == shown


def test_a_bar_that_is_drawn_for_hours_stays_one_line():
    lines = LineSplitter()
    assert [lines.feed(b"\r%06d of many" % n) for n in range(10 * MAX_LINE // 14)] == [[]] * (
        10 * MAX_LINE // 14
    )
    assert lines.end() == [f"{10 * MAX_LINE // 14 - 1:06d} of many"]


def test_bytes_that_are_no_text_are_shown_as_well_as_possible():
    assert LineSplitter().feed(b"\xff!\n") == ["�!"]


def test_lines_of_a_child_are_flushed_once_per_read(monkeypatch):
    class Target(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    target = Target()
    monkeypatch.setattr(sys, "stdout", target)
    forward_lines("worker0", "stdout", ["one", "two"])
    assert (target.getvalue(), target.flushes) == ("[worker0] one\n[worker0] two\n", 1)


def test_a_log_keeps_the_last_lines():
    log = OutputLog(lines=3)
    for n in range(10):
        log.add(f"line {n}")
    assert str(log) == "line 7\nline 8\nline 9"
    assert log.tail(1) == "line 9"


def test_a_log_of_long_lines_is_bounded_too():
    log = OutputLog(lines=1000, characters=100)
    for n in range(50):
        log.add(f"{n:02d}" * 20)
    assert str(log) == "48" * 20 + "\n" + "49" * 20


def test_workers_get_their_parents_environment_and_one_thread_per_library():
    environment = worker_environment({"HOME": "/x", "MKL_NUM_THREADS": "8"})
    assert environment["HOME"] == "/x"
    assert environment["MKL_NUM_THREADS"] == "8"
    assert environment["OMP_NUM_THREADS"] == "1"
