"""The pytest plugin: a `cluster` fixture for asynchronous tests.

    async def test_a_call(cluster):
        async with cluster(2):
            assert await ag.rpc_async("worker1", max, args=(1, 2)) == 2

Workers run in the test's own loop, over the in-process transport, unless `processes=True`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

# Every pytest run where aiograd is installed loads this module. So it stands beside the package,
# whose import takes a moment, and imports it when a test asks for a cluster.
if TYPE_CHECKING:
    from aiograd.cluster.local import LocalCluster

__all__ = ["cluster"]


class Clusters:
    """Makes clusters for one test; the value of the `cluster` fixture."""

    def __call__(
        self, n_workers: int = 2, *, processes: bool = False, **settings: Any
    ) -> LocalCluster:
        """Make a `LocalCluster`, to be entered with `async with`; its workers are tasks here."""
        from aiograd.cluster.local import LocalCluster

        return LocalCluster(n_workers, processes=processes, **settings)


@pytest.fixture
def cluster() -> Clusters:
    """Give a function that makes clusters: `async with cluster(2) as c: …`."""
    return Clusters()
