"""Clusters of notebooks: a cell that is run again replaces the one it made before."""

from __future__ import annotations

import asyncio
import textwrap
import warnings

import pytest

import aiograd as ag
from tests.support.waiting import until


async def run_cell(text: str, names: dict) -> None:
    """Run code with `await` at its top level, as a notebook does."""
    import ast

    code = compile(textwrap.dedent(text), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if result is not None:
        await result


CELL = "cluster = await ag.LocalCluster(1, processes=False)"


async def test_a_cell_that_is_run_again_closes_the_cluster_that_it_replaces():
    names = {"ag": ag, "__name__": "__main__"}
    await run_cell(CELL, names)
    first = names["cluster"]
    with pytest.warns(ResourceWarning, match="<cell>:1"):
        await run_again(names, first)
    assert names["cluster"].driver_runs
    assert await ag.rpc_async("worker0", abs, args=(-1,)) == 1
    await names["cluster"].close()


async def run_again(names: dict, first: ag.LocalCluster) -> None:
    await run_cell(CELL, names)
    await until(lambda: not first.driver_runs)


async def test_two_clusters_with_names_of_their_own_stay():
    names = {"ag": ag, "__name__": "__main__"}
    await run_cell("one = await ag.LocalCluster(1, processes=False)", names)
    await run_cell("two = await ag.LocalCluster(1, processes=False)", names)
    await asyncio.sleep(0)
    assert names["one"].driver_runs
    assert names["two"].driver_runs
    with pytest.warns(ResourceWarning, match="calls by name now go to the one started at <cell>:1"):
        await names["two"].close()
    await names["one"].close()


async def test_clusters_of_async_with_nest_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with ag.LocalCluster(1, processes=False) as outer:
            async with ag.LocalCluster(2, processes=False):
                assert len(ag.workers()) == 3
            assert len(ag.workers()) == 2
            assert outer.driver_runs
