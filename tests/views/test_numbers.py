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
    rows = re.findall(r"^    (aiograd_\w+) +(gauge|counter) +(.+?)  ", numbers.__doc__, re.M)
    return {name: (kind, tuple(labels.split(", "))) for name, kind, labels in rows}


def test_the_documented_names_are_those_that_are_given():
    given = {each.full_name: (each.kind, each.labels) for each in families(Data())}
    assert given == documented()


def test_the_grafana_dashboard_uses_documented_names_only_and_all_of_them():
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    used = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used |= set(re.findall(r"aiograd_\w+", target["expr"]))
            legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
            labels = set().union(*(documented()[name][1] for name in used))
            assert set(legend) <= labels
    assert used == set(documented())
    places = [tuple(panel["gridPos"].values())[:2] for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


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
