"""The names of metrics are those that are documented, in every mouth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiograd as ag
from aiograd.observe.snapshot import BLOCKED, Data, WorkerRow
from aiograd.views import numbers
from aiograd.views.numbers import families

ROOT = Path(__file__).parents[2]


def documented():
    rows = re.findall(
        r"^    (aiograd_\w+) +(gauge|counter|histogram) +(.+?)  ", numbers.__doc__, re.M
    )
    return {name: (kind, tuple(labels.split(", "))) for name, kind, labels in rows}


def test_the_documented_names_are_those_that_are_given():
    given = {each.full_name: (each.kind, each.labels) for each in families(Data())}
    assert given == documented()


def test_the_grafana_dashboard_uses_documented_names_only_and_all_of_them():
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    used = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = {stored_as(name) for name in re.findall(r"aiograd_\w+", target["expr"])}
            labels = {label for name in names for label in documented()[name][1]}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
            summed = re.findall(r"by \(([\w, ]+)\)", target["expr"])
            assert {label for each in summed for label in each.split(", ")} <= labels | {"le"}
            used |= names
    assert used == set(documented())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def stored_as(name):
    """Return the documented name of what Prometheus stores under a name."""
    histogram = name.removesuffix("_bucket")
    return histogram if documented().get(histogram, ("",))[0] == "histogram" else name


def test_the_guide_lists_every_documented_name():
    text = (ROOT / "docs" / "looking.md").read_text()
    assert set(re.findall(r"`(aiograd_\w+)`", text)) == set(documented())


def test_a_worker_that_does_not_answer_is_counted_and_has_no_numbers():
    data = Data(workers=[WorkerRow("a", 0, BLOCKED)])
    found = {each.name: dict(each.samples) for each in families(data)}
    assert found["aiograd_workers"][BLOCKED,] == 1
    assert found["aiograd_pending_calls"] == found["aiograd_memory_bytes"] == {}


async def test_the_numbers_of_a_cluster_are_those_of_its_workers():
    async with ag.LocalCluster(1, processes=False):
        await ag.rpc_async("worker0", abs, args=(-1,))
        kept = ag.remote("worker0", ag.zeros, args=(100,))
        await kept
        found = {each.name: dict(each.samples) for each in families(await ag.inspect())}
        assert found["aiograd_calls_started"]["driver",] == 2
        assert found["aiograd_owner_rrefs"]["worker0",] == 1
        assert found["aiograd_owned_bytes"]["worker0",] == 800
        assert found["aiograd_link_up"]["driver", "worker0"] == 1
        assert found["aiograd_bytes"]["driver", "worker0", "sent"] > 0
        assert found["aiograd_limit_reached"]["driver", "window"] == 0
        assert found["aiograd_workers"]["running",] == 2
        del kept
