"""The `cluster` fixture, as users' tests see it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import aiograd as ag


async def where() -> tuple[str, int]:
    return ag.get_worker_info().name, os.getpid()


async def test_test_harness(cluster):
    async with cluster(2) as c:
        assert await ag.rpc_async("worker1", where) == ("worker1", os.getpid())
        assert len(c) == 2
    async with cluster(1, processes=True):
        name, process = await ag.rpc_async("worker0", where)
        assert name == "worker0"
        assert process != os.getpid()


async def test_settings_are_passed_on(cluster):
    async with cluster(names=["left", "right"], options=ag.Options(timeout=7.0)) as c:
        assert [worker.name for worker in c] == ["left", "right"]
        assert ag.current_worker().options.timeout == 7.0


def test_the_plugin_itself_loads_nothing_until_it_is_used():
    source = Path(ag.__file__).with_name("testing") / "plugin.py"
    found = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.Import)]
    found += [
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    modules = {getattr(node, "module", None) or node.names[0].name for node in found}
    assert modules == {"__future__", "typing", "pytest"}
