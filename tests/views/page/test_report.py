"""The page as one file."""

from __future__ import annotations

import hashlib
import re

from aiograd.views.page.report import ASSETS, TYPES, asset, render


def test_a_report_is_whole_and_names_cannot_leave_their_place():
    name = "</script><script>alert(1)</script>"
    page = render([{"taken": 1.0, "workers": [{"name": name}]}], {"w": (1, ["<!-- out"])})
    assert name not in page
    assert "\\u003c/script>" in page
    assert "<!-- out" not in page
    assert not re.search(r'(src|href)="[^#"]', page.split("<body>")[0])
    assert "<script src=" not in page


def test_vendored_files_are_unchanged_and_have_their_licences():
    table = (ASSETS / "vendor" / "README.md").read_text()
    rows = re.findall(r"`([\w.-]+)` \|.*`([0-9a-f]{64})`", table)
    assert rows
    for name, digest in rows:
        assert hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest() == digest
    assert {each.name for each in ASSETS.glob("vendor/LICENSE-*")} == {
        "LICENSE-htm",
        "LICENSE-preact",
    }


def test_the_page_asks_nothing_of_other_hosts():
    for name in TYPES:
        text = asset(name).replace("http://www.w3.org/", "").replace("https://www.w3.org/", "")
        if name != "htm-preact.js":
            assert "http://" not in text
            assert "https://" not in text
    assert "innerHTML" not in asset("app.js")
