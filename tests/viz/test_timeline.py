"""Timelines."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from aiograd.viz import Span, timeline

SPANS = [
    Span("driver", "backward", 0.0, 0.020),
    Span("driver", "feed", 0.001, 0.004),
    Span("driver", "drain", 0.005, 0.006),
    Span("worker<1>", "matmul", 0.002, 0.012),
]


def test_spans_that_overlap_stand_below_each_other() -> None:
    rows = timeline(SPANS).rows()
    assert list(rows) == ["driver", "worker<1>"]
    assert [[span.name for span in line] for line in rows["driver"]] == [
        ["backward"],
        ["feed", "drain"],
    ]


def test_bars_are_as_long_as_what_they_show() -> None:
    picture = timeline(SPANS)
    groups = ET.fromstring(picture.svg).iter("{http://www.w3.org/2000/svg}g")
    widths = {g[0].text: float(g[1].get("width")) for g in groups}
    assert widths["backward: 20 ms"] == pytest.approx(2 * widths["matmul: 10 ms"])
    assert picture._repr_svg_() == picture.svg
    assert repr(picture) == "<Timeline of 4 spans>"


def test_an_empty_timeline_and_a_moment_can_be_drawn() -> None:
    ET.fromstring(timeline([]).svg)
    ET.fromstring(timeline([Span("a", "tick", 1.0, 1.0)]).svg)
    assert "2 s" in timeline([Span("a", "long", 0.0, 2.0)]).svg
    assert "µs" in timeline([Span("a", "short", 0.0, 2e-6)]).svg


def test_an_end_before_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match="before"):
        timeline([Span("a", "odd", 1.0, 0.5)])
