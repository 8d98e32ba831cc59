"""Cards: what is shown of objects is theirs, and cannot leave its place."""

from __future__ import annotations

import aiograd as ag
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


async def test_gradients_profiles_modules_and_workers_are_short_in_a_notebook():
    async with ag.LocalCluster(1, processes=False):
        w = ag.ones(2, 3, requires_grad=True)
        async with ag.context() as ctx:
            with ag.profile() as prof:
                y = await ag.rpc_async("worker0", ag.multiply, args=(w, 2.0))
            await ctx.backward(y.sum())
            shown = ctx.gradients._repr_html_()
        assert "of 1 leaves" in shown
        assert "(2, 3)" in shown
        assert ">2<" in shown  # the largest number of it
        assert "multiply" in prof._repr_html_()
        assert "worker0" in ag.workers()._repr_html_()
        assert ag.workers() == list(ag.workers())
        module = await ag.nn.RemoteModule("worker0", ag.nn.Linear, args=(2, 2))
        assert "worker0" in module._repr_html_()


def test_nothing_is_shown_where_there_is_nothing():
    assert "0 spans" in ag.Profile()._repr_html_()
