"""References of other engines where these are not installed; see test_dask and test_ray, too."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from aiograd.cluster.engines.values import DaskFutures, RayReferences, attach
from aiograd.errors import SerializationError


def attached(monkeypatch, **modules):
    """Return what the travellers of an agent promise, by tag."""
    promised = {}
    for name in ("ray", "distributed"):
        monkeypatch.setitem(sys.modules, name, modules.get(name))
    added = []
    travellers = SimpleNamespace(
        promise=lambda tag, name, add: promised.update({tag: (name, add)}),
        add=lambda kind, traveller: added.append((kind, traveller)),
    )
    attach(SimpleNamespace(travellers=travellers, name="here"))
    return promised, added


def test_nothing_is_imported_until_a_reference_comes(monkeypatch):
    promised, added = attached(monkeypatch)
    assert {name for name, _ in promised.values()} == {"ray.ObjectRef", "distributed.client.Future"}
    assert added == []


def test_a_reference_of_ray_is_refused_where_ray_is_not_installed(monkeypatch):
    promised, _ = attached(monkeypatch)
    with pytest.raises(SerializationError, match="Ray is not installed here"):
        promised[RayReferences.tag][1]()


def test_the_libraries_that_are_there_get_their_traveller(monkeypatch):
    ray = SimpleNamespace(ObjectRef=int)
    dask = SimpleNamespace(Future=float)
    promised, added = attached(monkeypatch, ray=ray, distributed=dask)
    for _, add in promised.values():
        add()
    assert [kind for kind, _ in added] == [int, float]


def test_a_reference_is_refused_at_both_ends_if_ray_does_not_run(monkeypatch):
    ray = SimpleNamespace(is_initialized=lambda: False, cloudpickle=None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(TypeError, match="was shut down here"):
        RayReferences("here").depart(object(), None)
    with pytest.raises(SerializationError, match="not in a Ray cluster: send the value"):
        RayReferences("here").arrive(b"", None)


def test_a_future_of_dask_is_refused_with_the_cure():
    with pytest.raises(TypeError, match=r"\(sum-1\) belongs to its client; send its value"):
        DaskFutures().depart(SimpleNamespace(key="sum-1"), None)
    with pytest.raises(SerializationError, match="belongs to its client"):
        DaskFutures().arrive(b"", None)
