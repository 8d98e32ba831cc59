"""F7: a large call is overtaken by thousands of small ones."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from tests.failures.work import echo, now

SMALL = 12_000  # calls; far more numbers than a gap that a receiver could be expected to remember
# Bytes. More than a socket takes while the small calls are made, and less than what makes calls
# wait for those before them (a quarter of `outbound_buffer` where memory is shared).
LARGE = {"auto": 15 << 20, "tcp": 48 << 20}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_f7_a_large_call_overtaken_by_thousands_runs_once(cluster, figure, transport):
    async with cluster(1, transport=transport, max_inflight=16_384):
        assert await ag.rpc_async("worker0", echo, (0,)) == 0
        size = LARGE[transport]
        # All in one tick: the large call is the first one over this link that could use shared
        # memory, so that it takes the socket, which is full before the small calls are made.
        large = ag.rpc_async("worker0", len, (np.zeros(size, np.uint8),), timeout=10.0)
        small = [ag.rpc_async("worker0", echo, (i,)) for i in range(SMALL)]
        assert await asyncio.gather(*small) == list(range(SMALL))
        began = now()
        assert await large == size
        what = "a large call that 12,000 small ones overtake: answered after them"
        figure("F7", what, 1.0, now() - began)
