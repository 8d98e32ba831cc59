"""Behaviour that users of `torch.distributed.rpc` rely on, tested against aiograd.

The beginning of a test's name is the id of that behaviour in a catalogue of torch's own tests
(`ctx_`, `bwd_`, `rref_` …), so that coverage of the catalogue can be counted; the end says what is
tested here.

Workers live in the test's loop unless a test is about processes. Leaks are errors, and every
counter ends at zero: leaving the block of a cluster asserts that no worker keeps a context, a pass
or a call; the shutdown that follows raises for leaked references.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiograd as ag
from tests.support.waiting import until_not

RELEASED = 2.0 * 4  # seconds; contexts are promised to be gone within 2, and we allow four times
COUNTERS = (
    "contexts",
    "backward_passes",
    "pending_calls",
    "running_calls",
    "abandoned_calls",
    "buffered_bytes",
)


async def counters(cluster: ag.LocalCluster) -> dict[str, dict[str, int]]:
    """What every worker, and the driver, still holds; empty at rest."""
    found = {"driver": ag.debug_info()}
    for worker in cluster:
        # Not in the default time, which some tests make very short.
        found[worker.name] = await ag.rpc_async(worker, ag.debug_info, timeout=RELEASED)
    return {
        name: busy
        for name, values in found.items()
        if (busy := {key: values[key] for key in COUNTERS if values[key]})
    }


async def at_rest(cluster: ag.LocalCluster) -> None:
    """Wait until no worker holds anything; fail if that does not happen in time."""
    try:
        await until_not(lambda: counters(cluster), RELEASED)
    except AssertionError:
        pytest.fail(f"not at rest: {await counters(cluster)}")


@asynccontextmanager
async def _cluster(
    n: int = 3, *, processes: bool = False, rest: bool = True, **options: Any
) -> AsyncIterator[ag.LocalCluster]:
    made = ag.Options(**{"strict_leaks": True, "timeout": 20.0, **options})
    async with ag.LocalCluster(n, processes=processes, options=made) as cluster:
        yield cluster
        if rest:
            await at_rest(cluster)


@pytest.fixture
def workers() -> Callable[..., Any]:
    """`async with workers(3) as cluster:`: worker0 … worker2 and the driver, all in this loop."""
    return _cluster
