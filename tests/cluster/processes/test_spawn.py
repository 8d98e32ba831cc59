"""What children write, in lines, and what they are given."""

from __future__ import annotations

import pytest

from aiograd.cluster.processes.spawn import MAX_LINE, LineSplitter, OutputLog, worker_environment

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


def test_bytes_that_are_no_text_are_shown_as_well_as_possible():
    assert LineSplitter().feed(b"\xff!\n") == ["�!"]


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
