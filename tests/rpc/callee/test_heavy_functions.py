"""Functions that hold much data and are sent with every call."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import aiograd as ag


async def test_a_closure_of_more_than_10_mb_that_is_sent_again_warns():
    table = np.ones(2 << 20)  # 16 MiB
    small = np.ones(100_000)
    async with ag.LocalCluster(2, processes=False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for to in ("worker0", "worker1"):  # once to each
                await ag.rpc_async(to, lambda: table.size)
            for _ in range(3):
                await ag.rpc_async("worker0", lambda: small.size)

        def size():
            return table.size

        await ag.rpc_async("worker0", size)
        with pytest.warns(UserWarning, match=r"size\(\) holds 16 MiB.*worker0.*ag.remote"):
            await ag.rpc_async("worker0", size)
