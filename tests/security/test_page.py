"""SECURITY.md names a test for each promise and each attack: the tests are there, and can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.security.mends import PLANTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+/test_\w+\.py)(?:::(\w+))?`", PAGE)
ATTACKS = dict(re.findall(r"^\| ([SM]\d+) \|(.*)$", PAGE, re.MULTILINE))
FINDINGS = [f"S{n}" for n in (1, 2, 3, 4, *range(8, 22))] + [f"M{n}" for n in range(1, 8)]


def defines(file: Path, name: str) -> bool:
    return bool(re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE))


def test_the_page_names_tests():
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_test_that_the_page_names_exists(file, name):
    assert (ROOT / file).exists()
    assert not name or defines(ROOT / file, name)


@pytest.mark.parametrize("finding", FINDINGS)
def test_each_attack_has_tests_that_fail_without_their_mend(finding):
    """`make mends` shows that they do; here every one is listed there."""
    named = set(re.findall(r"`(test_\w+)`", ATTACKS[finding]))
    planted = {test for plant in PLANTS if plant.finding == finding for test in plant.tests}
    assert {test.partition("::")[2] for test in planted} == named
    for test in planted:
        file, _, name = test.partition("::")
        assert defines(ROOT / "tests" / file, name)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.finding} {plant.file}")
def test_each_mend_is_where_it_is_taken_away(plant):
    for file, mend, without in plant.edits:
        assert (ROOT / "aiograd" / file).read_text().count(mend) == 1
        assert without != mend
