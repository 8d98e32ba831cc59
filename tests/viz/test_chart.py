"""Charts."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from aiograd.viz import chart
from aiograd.viz.chart import HEIGHT, LEFT, TOP, WIDTH, _ticks

SVG = "{http://www.w3.org/2000/svg}"


def corners(picture) -> list[list[float]]:
    lines = ET.fromstring(picture.svg).iter(f"{SVG}polyline")
    return [
        [float(n) for pair in line.get("points").split() for n in pair.split(",")] for line in lines
    ]


def test_a_line_goes_through_its_numbers() -> None:
    (line,) = corners(chart({"loss": [0.0, 1.0, 0.5, 1.0, 0.0]}))
    assert line[:2] == [LEFT, TOP + HEIGHT]
    assert line[2:6] == [LEFT + WIDTH / 4, TOP, LEFT + WIDTH / 2, TOP + HEIGHT / 2]
    assert line[8:] == [LEFT + WIDTH, TOP + HEIGHT]


def test_pairs_and_dots_share_the_axes() -> None:
    picture = chart({"a": ([0, 10], [0, 1])}, dots={"b": ([5], [0.5]), "a": ([10], [1])}, y="<m>")
    page = ET.fromstring(picture.svg)
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in page.iter(f"{SVG}circle")]
    assert dots == [(LEFT + WIDTH / 2, TOP + HEIGHT / 2), (LEFT + WIDTH, TOP)]
    words = [t.text for t in page.iter(f"{SVG}text")]
    assert words.count("a") == words.count("b") == words.count("<m>") == 1
    assert repr(picture) == "<Chart of a, b>"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 70.0, [-10.0, 0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]),
        (
            0.0121,
            0.0139,
            [0.012, 0.0122, 0.0124, 0.0126, 0.0128, 0.013, 0.0132, 0.0134, 0.0136, 0.0138, 0.014],
        ),
        (5.0, 5.0, [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
    ],
)
def test_axes_have_round_numbers_that_enclose_all(low, high, expected) -> None:
    assert _ticks([low, high]) == pytest.approx(expected)


def test_nothing_and_what_is_not_finite_can_be_drawn() -> None:
    ET.fromstring(chart().svg)
    (line,) = corners(chart({"a": [1.0, math.nan, math.inf, 2.0]}))
    assert len(line) == 4
