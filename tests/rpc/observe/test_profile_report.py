"""How recordings look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiograd.rpc.observe.profile import Span, chrome_trace, lanes, table


def at(start, end, worker="a", key="f"):
    return Span(key, "run", worker, start, end)


def test_the_table_sums_up_by_key_and_worker():
    text = table([at(0, 1), at(1, 4), at(0, 2, "b"), at(0, 9, "b", "rpc_call#g(b -> a)")])
    head, _, *lines = text.splitlines()
    assert head.split() == ["key", "worker", "count", "total", "ms", "mean", "ms", "max", "ms"]
    assert [line.split()[-5:] for line in lines] == [
        ["b", "1", "9000.000", "9000.000", "9000.000"],
        ["a", "2", "4000.000", "2000.000", "3000.000"],
        ["b", "1", "2000.000", "2000.000", "2000.000"],
    ]
    assert lines[0].startswith("rpc_call#g(b -> a)")


def test_an_empty_recording_is_an_empty_table():
    assert len(table([]).splitlines()) == 2
    assert chrome_trace([])["traceEvents"] == []


def test_chrome_gets_one_process_per_worker_and_microseconds_from_the_start():
    spans = [at(5.0, 6.0, "b"), at(5.5, 5.75)._replace(error="ValueError", detail={"bytes": 8})]
    *names, first, second = chrome_trace(spans)["traceEvents"]
    assert {each["args"]["name"]: each["pid"] for each in names} == {"a": 0, "b": 1}
    assert (first["pid"], first["ts"], first["dur"]) == (1, 0.0, 1e6)
    assert (second["pid"], second["ts"], second["dur"]) == (0, 0.5e6, 0.25e6)
    assert second["args"] == {"bytes": 8, "error": "ValueError"}


def test_what_overlaps_without_nesting_gets_a_lane_of_its_own():
    spans = [at(0, 10), at(1, 5), at(4, 8), at(5, 6), at(11, 12)]
    assert [lane for _, lane in lanes(spans)] == [0, 0, 1, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10))))
def test_in_a_lane_spans_nest_or_follow_each_other(times):
    placed = lanes([at(start, start + length) for start, length in times])
    assert len(placed) == len(times)
    for i, (one, lane) in enumerate(placed):
        for other, same in placed[i + 1 :]:
            if lane == same:
                assert other.start >= one.end or other.end <= one.end
