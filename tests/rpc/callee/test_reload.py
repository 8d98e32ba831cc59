"""Modules that are edited and loaded again: workers run the new code."""

from __future__ import annotations

import importlib
import sys

import cloudpickle
import pytest

import aiograd as ag

FIRST = """
def helper():
    return 1

def value():
    return helper()

def other():
    return helper()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "edited_module.py").write_text(FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("edited_module")
    yield module
    if "edited_module" in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["edited_module"]


def edit(module, text):
    with open(module.__file__, "w") as file:
        file.write(text + "\n" * (10 + len(text)))  # another size: else the old pyc would do
    importlib.reload(module)


async def test_a_module_that_was_loaded_again_is_sent_anew(module):
    async with ag.LocalCluster(2) as cluster:
        assert await cluster["worker0"].call(module.value) == 1
        # Only the helper changes: the function itself has the same code as before.
        edit(module, FIRST.replace("return 1", "return 2"))
        for worker in cluster.workers:
            assert await worker.call(module.value) == 2
            assert await worker.call(module.other) == 2
        edit(module, FIRST.replace("return 1", "return 3"))
        assert await cluster["worker0"].call(module.value) == 3


async def test_a_module_that_was_not_loaded_again_goes_by_reference(module):
    async with ag.LocalCluster(1) as cluster:
        for _ in range(2):
            assert await cluster["worker0"].call(module.value) == 1
    assert "edited_module" not in cloudpickle.list_registry_pickle_by_value()
