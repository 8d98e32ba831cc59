"""The live view in a notebook."""

from __future__ import annotations

import warnings

import aiograd as ag
from tests.support.waiting import until


async def test_the_widget_shows_the_workers_and_stops_when_it_is_closed():
    async with ag.LocalCluster(2, processes=False) as cluster:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a kernel, widgets warn
            widget = cluster.live()
        await until(lambda: widget.digest.get("workers"))
        assert [row["name"] for row in widget.digest["workers"]] == ["worker0", "worker1", "driver"]
        assert widget.digest["calls"] == 0
        assert "export default" in widget._esm
        widget.close()


async def test_the_widget_of_a_closed_cluster_asks_no_more():
    async with ag.LocalCluster(1, processes=False) as cluster:
        widget = cluster.live()
        await until(lambda: widget.digest.get("workers"))
    await until(lambda: widget._task.done(), within=10)
    assert "error" in widget.digest
    widget.close()
