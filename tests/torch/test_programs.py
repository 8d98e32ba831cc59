"""Random programs over two to five workers give plain torch's gradients, hooks and node runs."""

from __future__ import annotations

import pytest

from tests.torch.check_programs import ORDERS, check

# Per order and event loop, so 300 in all; `make programs` runs as many as one likes.
COUNT = 75
BATCH = 25
BATCHES = [range(start, min(start + BATCH, COUNT)) for start in range(0, COUNT, BATCH)]


@pytest.mark.deadline(180)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds.start}-")
async def test_random_programs_equal_plain_torch(seeds, order):
    tally = await check(order, seeds)
    assert tally["programs"] == len(seeds)
    assert tally["compared"] > len(seeds) / 2  # the others have no root that needs a gradient
    assert tally["hooks and functions"] > 0
