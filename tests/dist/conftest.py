"""Workers in one loop over a memory network, with references and autograd attached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiograd as ag


@asynccontextmanager
async def _cluster(workers: int = 2, **options: Any) -> AsyncIterator[ag.LocalCluster]:
    made = ag.Options(**options) if options else None
    async with ag.LocalCluster(workers, processes=False, options=made) as cluster:
        yield cluster


@pytest.fixture
def workers() -> Callable[..., Any]:
    """`async with workers(3) as cluster:`: worker0 … worker2 and the driver, all in this loop."""
    return _cluster
