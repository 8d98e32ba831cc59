"""Cards: what is shown of objects is theirs, and cannot leave its place."""

from __future__ import annotations

from aiograd._html import BLUE, card, code, quiet, table


def test_names_cannot_add_markup():
    page = card(BLUE, code("<b>&"), quiet("<script>"))
    assert "&lt;b&gt;&amp;" in page
    assert "<script>" not in page


def test_a_row_begins_with_its_name_unless_there_is_a_head():
    assert table([("a", "1")]).count("<th") == 1
    headed = table([("a", "1"), ("b", "2")], ("name", "number"))
    assert headed.count("<th") == 2
    assert headed.count("<td") == 4
