"""SECURITY.md names a test for each promise: the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+/test_\w+\.py)(?:::(\w+))?`", PAGE)


def test_the_page_names_tests():
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_test_that_the_page_names_exists(file, name):
    text = (ROOT / file).read_text()
    assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)
