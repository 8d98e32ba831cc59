"""Where boxes go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aiograd.viz.layout import GAP, arrange, rows


def test_rows_are_the_longest_paths() -> None:
    edges = [("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")]
    assert rows(list("abcd"), edges) == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_a_leaf_stands_right_above_its_first_use() -> None:
    edges = [("x", "f"), ("f", "g"), ("w", "g"), ("g", "h"), ("w", "h")]
    assert rows(list("xfgwh"), edges) == {"x": 0, "f": 1, "g": 2, "w": 1, "h": 3}


def test_a_side_branch_joins_from_right_above() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("x", "y"), ("y", "d")]
    assert rows(list("abcdxy"), edges) == {"a": 0, "b": 1, "c": 2, "d": 3, "x": 1, "y": 2}


def test_a_long_edge_bends_around_the_boxes_between() -> None:
    layout = arrange(
        {"a": 60.0, "b": 60.0, "c": 60.0},
        [("a", "b"), ("b", "c"), ("a", "c")],
        dict.fromkeys("abc", 0),
    )
    (bend,) = layout.paths[2][1:-1]
    assert abs(layout.x[bend] - layout.x["b"]) > 30


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_keep_their_distance_and_lanes_do_not_mix(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    lanes = data.draw(st.integers(1, 3))
    width = {i: float(data.draw(st.integers(20, 200))) for i in range(count)}
    lane = {i: data.draw(st.integers(0, lanes - 1)) for i in range(count)}
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = [(min(p), max(p)) for p in data.draw(st.lists(pairs, max_size=25)) if p[0] != p[1]]
    layout = arrange(width, edges, lane, lanes)
    for source, target in edges:
        assert layout.row[source] < layout.row[target]
    for i in range(count):
        left, right = layout.lanes[lane[i]]
        assert left < layout.x[i] - width[i] / 2
        assert layout.x[i] + width[i] / 2 < right
        for j in range(i):
            if layout.row[i] == layout.row[j]:
                apart = abs(layout.x[i] - layout.x[j]) - (width[i] + width[j]) / 2
                assert apart >= GAP - 1e-6
    for (_, right), (left, _) in zip(layout.lanes, layout.lanes[1:], strict=False):
        assert right <= left
